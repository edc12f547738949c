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
from octavo.server.answer_reader import SWITCHES, ChoiceReader, plan
from octavo.server.messages import count_characters
from octavo.server.parsers.detect import GENERIC
from octavo.server.parsers.events import Content, Event
from octavo.server.plain_tools import in_words, shows_tools
from octavo.server.service import Rendered, Service


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
    stream_interval: at least that many tokens in a delta, but for the first and the last of a choice.
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
    stream_interval: int = 1
    field_names: Mapping[str, str] = field(default_factory=lambda: {"prompt": "messages"})

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the model gets to see."""
        return () if self.tool_choice == "none" else self.tools


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
    return (await render_text(service, conversation)).token_ids


async def render_text(service: Service, conversation: Conversation) -> Rendered:
    """The prompt. Raises RequestError."""
    template = conversation.template
    messages = conversation.messages
    tools = [tool_json(tool) for tool in conversation.offered_tools]
    if (
        tools
        and service.format.tool_name == GENERIC
        and not shows_tools(service.template_source(template.chat_template))
    ):
        messages = in_words(messages, tools)
    return await service.render_chat(
        messages,
        num_characters=count_characters(messages),
        tools=tools or None,
        documents=template.documents,
        add_generation_prompt=template.add_generation_prompt,
        continue_final_message=template.continue_final_message,
        template=template.chat_template,
        template_kwargs=template_kwargs(conversation),
        add_special_tokens=template.add_special_tokens,
    )


def tool_json(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates take it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def template_kwargs(conversation: Conversation) -> Mapping[str, Any]:
    """The template's arguments: the request's own, and its effort under the names that templates know."""
    effort = conversation.reasoning_effort
    given = conversation.template.chat_template_kwargs or {}
    if effort is None:
        return given
    return {"reasoning_effort": effort, **(dict.fromkeys(SWITCHES, False) if effort == "none" else {}), **given}


async def answer(service: Service, conversation: Conversation) -> Answers:
    """The answer of every choice, as it comes; closing the generator aborts it.

    Raises before the first delta: RequestError naming the protocol's field, ApiError for a full queue.
    """
    service.admit()
    try:
        prompt = await render_text(service, conversation)
        reading = plan(service, conversation, prompt.text)
        outputs = service.generate(
            [prompt.token_ids],
            reading.params,
            request_id=conversation.request_id,
            priority=conversation.priority,
            cache_salt=conversation.cache_salt,
            default_max_tokens=conversation.default_max_tokens,
            stream_interval=conversation.stream_interval,
        )
        readers: dict[int, ChoiceReader] = {}
        async with aclosing(outputs):
            async for _, output in outputs:
                for new in output.outputs:
                    if reading.make is None:  # the hot path
                        yield delta(new, output, [Content(new.text)] if new.text else [])
                        continue
                    reader = readers.get(new.index)
                    if reader is None:
                        reader = readers[new.index] = reading.make()
                    made = delta(new, output, reader.read(new))
                    made.finish_reason = reader.finish_reason(new.finish_reason)
                    made.stop_reason = reader.stop_reason(new.stop_reason)
                    made.num_reasoning_tokens = reader.num_reasoning_tokens
                    yield made
    except RequestError as error:
        error.field = field_name(error.field, conversation)
        raise


def field_name(field: str, conversation: Conversation) -> str:
    """What the protocol calls a field of the engine."""
    names = conversation.field_names
    head = field.partition(".")[0]
    if head == "structured_outputs" and conversation.params.structured_outputs is None:
        return "tool_choice" if conversation.tool_choice in ("required", "named") else "tools"
    return renamed(field, names)


def renamed(field: str, names: Mapping[str, str]) -> str:
    """A field by its name in `names`; a field of a field by that of the whole."""
    return names.get(field, names.get(field.partition(".")[0], field))


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
