"""A conversation and its answer, for every chat protocol: OpenAI's, Anthropic's and what else comes.

    a protocol's JSON ──> Conversation ──render──> prompt ids ──engine──> text ──parser──> AnswerDelta ──> its own JSON

A protocol only turns its bodies into a `Conversation`, and `AnswerDelta`s into its own shape. How a model writes tool
calls and reasoning is the parser's business (`server.parsers`); here it is only known who needs one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.sampling.params import SamplingParams
from octavo.server.messages import count_characters
from octavo.server.parsers.events import Content, Event
from octavo.server.service import Service


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call. parameters: JSON schema of its arguments; None takes any object.

    strict: the arguments must follow the schema; None leaves it to the server.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """How the conversation is rendered; see `Tokenizer.render_chat`."""

    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What one request asks for.

    messages: as chat templates take them, which is OpenAI's shape; assistant messages may hold `reasoning` (or
        `reasoning_content`) and `tool_calls`, and the role "tool" answers a call.
    params: already checked. tool_choice: "auto", "none", "required", or "named" with `tool_name`.
    default_max_tokens: used where params.max_tokens is None, cut to the room that is left.
    field_names: the engine's names of fields -> what the protocol calls them, for errors.
    """

    messages: list[dict[str, Any]]
    params: SamplingParams
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    tool_name: str | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    template: TemplateOptions = field(default_factory=TemplateOptions)
    request_id: str
    priority: int = 0
    cache_salt: str = ""
    default_max_tokens: int | None = None
    field_names: Mapping[str, str] = field(default_factory=lambda: {"prompt": "messages"})


class AnswerDelta(msgspec.Struct, kw_only=True):
    """What is new of one choice.

    token_ids, logprobs: as in `octavo.outputs.CompletionOutput`. They come when the tokens do; their text may come
    later, when a parser knows what it is.
    finish_reason: "stop", "length", "tool_calls", "abort", ...; set exactly once per choice, in its last delta.
    num_prompt_tokens, num_cached_tokens, prompt_token_ids, prompt_logprobs: of the request, on every delta
    (prompt_logprobs only on the first).
    num_reasoning_tokens: of this choice, so far.
    """

    index: int
    events: list[Event]
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_reasoning_tokens: int = 0


Answers = AsyncGenerator[AnswerDelta, None]


async def render(service: Service, conversation: Conversation) -> list[int]:
    """The prompt's token ids. Raises RequestError."""
    template = conversation.template
    return await service.encode_chat(
        conversation.messages,
        num_characters=count_characters(conversation.messages),
        documents=template.documents,
        add_generation_prompt=template.add_generation_prompt,
        continue_final_message=template.continue_final_message,
        template=template.chat_template,
        template_kwargs=template.chat_template_kwargs,
        add_special_tokens=template.add_special_tokens,
    )


async def answer(service: Service, conversation: Conversation) -> Answers:
    """The answer of every choice, as it comes; closing the generator aborts it.

    Raises before the first delta: RequestError naming the protocol's field, ApiError for a full queue.
    """
    service.admit()
    try:
        prompt = await render(service, conversation)
        outputs = service.generate(
            [prompt],
            conversation.params,
            request_id=conversation.request_id,
            priority=conversation.priority,
            cache_salt=conversation.cache_salt,
            default_max_tokens=conversation.default_max_tokens,
        )
        async with aclosing(outputs):
            async for _, output in outputs:
                for new in output.outputs:
                    yield delta(new, output, [Content(new.text)] if new.text else [])
    except RequestError as error:
        error.field = conversation.field_names.get(error.field, error.field)
        raise


def delta(new: CompletionOutput, output: RequestOutput, events: list[Event]) -> AnswerDelta:
    """A delta of the engine, with its text as events."""
    return AnswerDelta(
        index=new.index,
        events=events,
        token_ids=new.token_ids,
        logprobs=new.logprobs,
        cumulative_logprob=new.cumulative_logprob,
        finish_reason=new.finish_reason,
        stop_reason=new.stop_reason,
        num_prompt_tokens=len(output.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
        prompt_token_ids=output.prompt_token_ids,
        prompt_logprobs=output.prompt_logprobs,
    )
