"""The pieces of a chat answer: from deltas to the chunks of a stream, and from the chunks to a whole answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from msgspec import UNSET, UnsetType

from octavo.server.conversation import AnswerDelta
from octavo.server.openai.answers import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChunkChoice,
    Delta,
    FunctionCall,
    FunctionDelta,
    Message,
    ToolCall,
    ToolCallDelta,
)
from octavo.server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs_json
from octavo.server.openai.protocol import ChatBody
from octavo.server.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart


class DeltaWriter:
    """Turns the deltas of one choice into the chunks of it: role, what is said, and at last the finish reason alone."""

    def __init__(self, body: ChatBody, names: TokenNames, *, echo: str) -> None:
        self._num_top = (body.top_logprobs or 0) if body.logprobs else None
        self._with_ids = bool(body.return_token_ids)
        self._shows_tokens = self._with_ids or self._num_top is not None
        self._names = names
        self._echo = echo
        self._started = False

    def write(self, new: AnswerDelta) -> list[ChunkChoice]:
        """What is new, as chunks of a stream."""
        written = []
        if not self._started:
            self._started = True
            written.append(ChunkChoice(index=new.index, delta=Delta(role="assistant", content=self._echo)))
        said = say(new.events)
        if said is not None or (new.token_ids and self._shows_tokens):
            written.append(self._chunk(new, Delta(content="") if said is None else said))
        if new.finish_reason is not None:
            written.append(
                ChunkChoice(
                    index=new.index, delta=Delta(), finish_reason=new.finish_reason, stop_reason=new.stop_reason
                )
            )
        return written

    def _chunk(self, new: AnswerDelta, said: Delta) -> ChunkChoice:
        choice = ChunkChoice(index=new.index, delta=said)
        if self._num_top is not None:
            choice.logprobs = chat_logprobs(new.token_ids, new.logprobs or (), self._names, num_top=self._num_top)
        if self._with_ids:
            choice.token_ids = new.token_ids
        return choice


def say(events: Sequence[Event]) -> Delta | None:
    """All events in one delta, or None if there is nothing to show.

    One delta, because clients add up each field by itself; and one entry per tool call, because they take the first
    list of calls as it is.
    """
    if len(events) == 1 and type(events[0]) is Content:  # nearly every token of nearly every answer
        return Delta(content=events[0].text)
    out = Delta()
    calls: dict[int, ToolCallDelta] = {}
    for event in events:
        match event:
            case Content(text):
                out.content = text if out.content is UNSET else f"{out.content}{text}"
            case Reasoning(text):
                out.reasoning = out.reasoning_content = text if out.reasoning is UNSET else out.reasoning + text
            case ToolCallStart(index, id, name):
                calls[index] = ToolCallDelta(
                    index=index, id=id, type="function", function=FunctionDelta(name=name, arguments="")
                )
            case ToolCallArguments(index, text):
                call = calls.setdefault(index, ToolCallDelta(index=index, function=FunctionDelta(arguments="")))
                call.function.arguments += text
    if calls:
        out.tool_calls = list(calls.values())
    return None if out == Delta() else out


def add_prompt(chunk: ChatChunk, body: ChatBody, new: AnswerDelta) -> None:
    """Put the prompt's ids and logprobs into a chunk, if they were asked for."""
    if body.return_token_ids:
        chunk.prompt_token_ids = new.prompt_token_ids
    if body.prompt_logprobs is not None and new.prompt_logprobs is not None:
        chunk.prompt_logprobs = prompt_logprobs_json(new.prompt_logprobs, num_top=body.prompt_logprobs)


def join_pieces(pieces: Sequence[ChatChunk]) -> ChatCompletion:
    """The whole answer."""
    by_index: dict[int, list[ChunkChoice]] = {}
    for piece in pieces:
        for choice in piece.choices:
            by_index.setdefault(choice.index, []).append(choice)
    first = pieces[0]
    return ChatCompletion(
        id=first.id,
        created=first.created,
        model=first.model,
        choices=[join_choice(by_index[index]) for index in sorted(by_index)],
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=first.prompt_logprobs,
    )


def join_choice(parts: Sequence[ChunkChoice]) -> ChatChoice:
    """One whole choice from its chunks."""
    last = parts[-1]
    with_ids = [part.token_ids for part in parts if part.token_ids is not UNSET]
    whole = ChatChoice(
        index=last.index,
        token_ids=list(chain.from_iterable(with_ids)) if with_ids else UNSET,
        message=join_message([part.delta for part in parts]),
        finish_reason=last.finish_reason,
        stop_reason=None if last.stop_reason is UNSET else last.stop_reason,
    )
    for part in parts:
        if part.logprobs is not None:
            if whole.logprobs is None:
                whole.logprobs = part.logprobs
            else:
                whole.logprobs.content.extend(part.logprobs.content)
    return whole


def join_message(deltas: Sequence[Delta]) -> Message:
    """The message that a stream's deltas add up to. Its content is null if there is something else instead of text."""
    content = "".join(delta.content or "" for delta in deltas)
    reasoning: str | UnsetType = "".join(delta.reasoning or "" for delta in deltas) or UNSET
    calls: dict[int, ToolCall] = {}
    for call in chain.from_iterable(delta.tool_calls or () for delta in deltas):
        if call.id is not UNSET:
            calls[call.index] = ToolCall(id=call.id, function=FunctionCall(name=call.function.name or "", arguments=""))
        calls[call.index].function.arguments += call.function.arguments
    return Message(
        content=content or (None if reasoning or calls else ""),
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=[calls[index] for index in sorted(calls)] or UNSET,
    )
