"""From a Responses body to a `Conversation`, and to the response before it has an answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.sampling.params import SamplingParams, integer
from octavo.server.conversation import Conversation, TemplateOptions, renamed
from octavo.server.errors import unsupported
from octavo.server.message_builder import MessageBuilder
from octavo.server.openai.protocol import SamplingFields
from octavo.server.openai.sampling import check_max_logprobs, check_request_fields, to_params
from octavo.server.responses.answers import ReasoningOptions, Response
from octavo.server.responses.items import Item, add_items
from octavo.server.responses.protocol import (
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponsesBody,
    TextFormat,
    TextOptions,
)
from octavo.server.responses.tools import read_tool_use
from octavo.server.service import Service
from octavo.server.shared_fields import SharedFields

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = frozenset(
    {
        LOGPROBS,
        # Of things that are never there, or that are there anyway: reasoning comes in the open, not encrypted.
        "reasoning.encrypted_content",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
FIELD_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
}
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512


def to_conversation(
    body: ResponsesBody, service: Service, items: Sequence[Item], earlier: Sequence[Item], *, request_id: str
) -> Conversation:
    """All but what only sampling needs. earlier: items of the responses that this one goes on from."""
    if body.conversation is not None:
        raise unsupported("conversation", "use previous_response_id")
    if body.prompt is not None:
        raise unsupported("prompt", "prompt templates are not kept here")
    turns = MessageBuilder()
    if body.instructions:
        turns.add_text("system", body.instructions)
    add_items(turns, earlier)
    add_items(turns, items)
    if not any(message["role"] != "system" for message in turns.messages):
        raise RequestError("input must not be empty", field="input")
    use = read_tool_use(body)
    max_tokens = service.info.default_sampling.get("max_tokens")
    return Conversation(
        messages=turns.messages,
        params=SamplingParams(max_tokens=None),
        tools=use.tools,
        tool_choice=use.choice,
        tool_name=use.name,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        template=TemplateOptions(chat_template_kwargs=body.chat_template_kwargs),
        request_id=request_id,
        default_max_tokens=None if max_tokens is None else int(max_tokens),
        field_names=names_of(body),
    )


def read_params(body: ResponsesBody, service: Service) -> SamplingParams:
    """Sampling parameters. Raises RequestError naming the field that the client used."""
    if body.top_logprobs is not None:
        integer(body.top_logprobs, "top_logprobs", low=0)
        check_max_logprobs(body.top_logprobs, limit=service.options.max_logprobs, field="top_logprobs")
    if body.max_output_tokens is not None:
        integer(body.max_output_tokens, "max_output_tokens", low=1)
    shared = {name: getattr(body, name) for name in SharedFields.__struct_fields__}
    fields = SamplingFields(**shared, response_format=response_format(body.text))
    check_request_fields(fields)
    try:
        return to_params(
            fields,
            defaults=service.info.default_sampling,
            max_tokens=body.max_output_tokens,
            logprobs=(body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None,
            prompt_logprobs=None,
            detokenize=True,
        )
    except RequestError as error:
        error.field = renamed(error.field, names_of(body))
        raise


def response_format(text: TextOptions | None) -> dict[str, Any] | None:
    """What the form of the answer's text must be, as OpenAI's chat has it."""
    match text and text.format:
        case JsonSchemaFormat(schema):
            return {"type": "json_schema", "json_schema": {"schema": schema}}
        case JsonObjectFormat():
            return {"type": "json_object"}
    return None


def names_of(body: ResponsesBody) -> dict[str, str]:
    """The engine's names of fields, and the chat's -> what this API calls them."""
    of_format = {} if getattr(body, "structured_outputs", None) else {"structured_outputs": "text.format"}
    return FIELD_NAMES | of_format


def check_body(body: ResponsesBody) -> None:
    """Raise RequestError for what excludes itself, and for what no later step looks at."""
    if body.background and body.store is False:
        raise RequestError("background needs store=true", field="background")
    for index, name in enumerate(body.include or ()):
        if name not in INCLUDABLE:
            raise RequestError(f"include[{index}] {name!r} is not known", field=f"include[{index}]")
    if body.max_tool_calls is not None:
        integer(body.max_tool_calls, "max_tool_calls", low=1)
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA:
        raise RequestError(f"metadata may have at most {MAX_METADATA} entries", field="metadata")
    for key, value in metadata.items():
        if len(key) > MAX_KEY or len(value) > MAX_VALUE:
            message = f"metadata keys may have {MAX_KEY} characters and values {MAX_VALUE}"
            raise RequestError(message, field="metadata")


def new_response(body: ResponsesBody, params: SamplingParams, *, model: str) -> Response:
    """The response as it is before anything was generated."""
    reasoning = body.reasoning
    return Response(
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningOptions(
            reasoning.effort if reasoning else None,
            (reasoning.summary or reasoning.generate_summary) if reasoning else None,
        ),
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        temperature=params.temperature,
        text=msgspec.to_builtins(text_options(body)),
        tool_choice=read_tool_use(body).echo,
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
        metadata=body.metadata or {},
    )


def text_options(body: ResponsesBody) -> TextOptions:
    """The form of the text as the response tells it."""
    options = body.text or TextOptions()
    return msgspec.structs.replace(options, format=options.format or TextFormat())
