"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.errors import RequestError
from octavo.sampling.params import SamplingParams, integer
from octavo.server.answer_reader import SWITCHES
from octavo.server.anthropic.answers import Event, Message, TokenCount, Usage
from octavo.server.anthropic.events import join_events, make_events
from octavo.server.anthropic.protocol import CountTokensBody, MessagesBody, Thinking, ToolFields
from octavo.server.anthropic.turns import to_messages
from octavo.server.conversation import Conversation, TemplateOptions, Tool, answer, renamed, render
from octavo.server.decode import decode_body, decode_part
from octavo.server.endpoint import Call, Stream
from octavo.server.errors import unsupported
from octavo.server.openai.protocol import SamplingFields
from octavo.server.openai.sampling import to_params
from octavo.server.openai.tools import check_name, check_schema
from octavo.server.service import Service

MIN_THINKING_BUDGET = 1024
FIELD_NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "structured_outputs": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""The engine's names of fields, and OpenAI's -> Anthropic's."""
CHOICES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
"""Anthropic's tool_choice -> a conversation's."""


async def create_message(service: Service, call: Call[MessagesBody]) -> Message | Stream[Event]:
    """Answer a conversation. Raises RequestError for a wrong body, ApiError for an unknown model or a full queue."""
    body = decode_body(call.body, MessagesBody)
    model = service.model_name(body.model)
    params = read_params(body, service)
    conversation = replace(to_conversation(body, call.request_id), params=params, default_max_tokens=body.max_tokens)
    head = Message(id=f"msg_{call.request_id}", model=model, content=[], usage=Usage(input_tokens=0, output_tokens=0))
    events = make_events(answer(service, conversation), head, max_tokens=body.max_tokens)
    return Stream(events, named=True) if body.stream else await join_events(events)


async def count_tokens(service: Service, call: Call[CountTokensBody]) -> TokenCount:
    """How many tokens the prompt of such a message has, cached or not. Raises as `create_message`."""
    body = decode_body(call.body, CountTokensBody)
    service.model_name(body.model)
    return TokenCount(len(await render(service, to_conversation(body, call.request_id))))


def read_params(body: MessagesBody, service: Service) -> SamplingParams:
    """Sampling parameters. max_tokens is not among them: it is a most, and less where the context ends before."""
    integer(body.max_tokens, "max_tokens", low=1)
    for index, text in enumerate(body.stop_sequences or ()):
        if not text:
            raise RequestError(f"stop_sequences[{index}] must not be empty", field=f"stop_sequences[{index}]")
    fields = SamplingFields(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        stop=body.stop_sequences,
        thinking_token_budget=thinking_budget(body, service),
        response_format=response_format(body),
    )
    try:
        return to_params(
            fields,
            defaults=service.info.default_sampling,
            max_tokens=None,
            logprobs=None,
            prompt_logprobs=None,
            detokenize=True,
        )
    except RequestError as error:
        error.field = renamed(error.field, FIELD_NAMES)
        raise


def thinking_budget(body: MessagesBody, service: Service) -> int | None:
    """Tokens of thinking, where the engine can count them. Raises RequestError for more than the answer may have."""
    thinking = body.thinking
    if thinking is None or thinking.type != "enabled" or thinking.budget_tokens is None:
        return None
    if thinking.budget_tokens >= body.max_tokens:
        field = "thinking.budget_tokens"
        raise RequestError(f"{field} must be less than max_tokens ({body.max_tokens})", field=field)
    countable = service.format.has_reasoning and "thinking_token_budget" in service.info.logits_processors
    return thinking.budget_tokens if countable else None


def response_format(body: CountTokensBody) -> dict[str, Any] | None:
    """What the answer's form must be, as OpenAI's chat has it."""
    wanted = body.output_format or (body.output_config and body.output_config.format)
    return {"type": "json_schema", "json_schema": {"schema": wanted.schema}} if wanted else None


def to_conversation(body: CountTokensBody, request_id: str) -> Conversation:
    """All but what only sampling needs."""
    if body.mcp_servers:
        raise unsupported("mcp_servers")
    messages = to_messages(body)
    tools = read_tools(body.tools or [])
    choice = body.tool_choice
    if choice is not None and choice.type in ("any", "tool"):
        if not tools:
            raise RequestError("tool_choice needs tools", field="tool_choice")
        if choice.type == "tool" and choice.name not in {tool.name for tool in tools}:
            raise RequestError(f"tool_choice.name {choice.name!r} is none of the tools", field="tool_choice.name")
    continues = messages[-1]["role"] == "assistant"
    thinks = wants_thinking(body.thinking)
    return Conversation(
        messages=messages,
        params=SamplingParams(max_tokens=None),
        tools=tools,
        tool_choice=CHOICES[choice.type] if choice else "auto",
        tool_name=choice.name if choice and choice.type == "tool" else None,
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        reasoning_effort=body.output_config.effort if body.output_config else None,
        include_reasoning=thinks and not (body.thinking and body.thinking.display == "omitted"),
        template=TemplateOptions(
            chat_template_kwargs=dict.fromkeys(SWITCHES, thinks) | (body.chat_template_kwargs or {}),
            add_generation_prompt=not continues,
            continue_final_message=continues,
        ),
        request_id=request_id,
        field_names=FIELD_NAMES,
    )


def wants_thinking(thinking: Thinking | None) -> bool:
    """Whether the answer may have thinking: only if asked for, as clients take the first block for the answer else.

    Raises RequestError for a budget that is missing or too small.
    """
    if thinking is None or thinking.type == "disabled":
        return False
    if thinking.type != "enabled":
        return True
    if thinking.budget_tokens is None:
        raise RequestError("thinking.budget_tokens is required", field="thinking.budget_tokens")
    integer(thinking.budget_tokens, "thinking.budget_tokens", low=MIN_THINKING_BUDGET)
    return True


def read_tools(values: list[Any]) -> tuple[Tool, ...]:
    """The tools. Raises RequestError for one that the server itself would have to run."""
    tools: list[Tool] = []
    for index, value in enumerate(values):
        place = f"tools[{index}]"
        fields: ToolFields = decode_part(value, ToolFields, place)
        if fields.type not in (None, "custom"):
            message = f"{place}.type {fields.type!r} is not supported: only tools that the client runs (custom)"
            raise RequestError(message, field=f"{place}.type")
        if fields.input_schema is None:
            raise RequestError(f"{place}.input_schema is required", field=f"{place}.input_schema")
        check_name(fields.name, f"{place}.name", taken=[tool.name for tool in tools])
        check_schema(fields.input_schema, f"{place}.input_schema")
        tools.append(
            Tool(name=fields.name, description=fields.description, parameters=fields.input_schema, strict=fields.strict)
        )
    return tuple(tools)
