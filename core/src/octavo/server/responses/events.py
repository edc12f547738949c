"""From the deltas of an answer to typed events. A plain answer is the response in the last of them.

created, in_progress, output items, completed | incomplete | failed | cancelled

output items: output_item.added, what is in it, output_item.done
    message:        content_part.added, output_text.delta ..., output_text.done, content_part.done
    reasoning:      content_part.added, reasoning_text.delta ..., reasoning_text.done, content_part.done
    function_call:  function_call_arguments.delta ..., function_call_arguments.done
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import TypeVar

import msgspec

from octavo.server.conversation import AnswerDelta, Answers
from octavo.server.errors import ApiError, aborted, as_api_error
from octavo.server.openai.answers import TokenLogprob
from octavo.server.parsers import events as parsed
from octavo.server.responses.answers import (
    ArgumentsDelta,
    ArgumentsDone,
    Cancelled,
    Completed,
    Created,
    End,
    Event,
    Failed,
    FunctionCall,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputTokensDetails,
    Item,
    ItemAdded,
    ItemDone,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    Part,
    PartAdded,
    PartDone,
    Queued,
    Reasoning,
    ReasoningDelta,
    ReasoningDone,
    ReasoningText,
    Response,
    ResponseError,
    TextDelta,
    TextDone,
    Usage,
)

Events = AsyncGenerator[Event, None]
Logprobs = Callable[[AnswerDelta], list[TokenLogprob]]
"""The logprobs of a delta's tokens."""
Kind = TypeVar("Kind", bound=Event)

ENDS: dict[str, type[End]] = {
    "completed": Completed,
    "incomplete": Incomplete,
    "failed": Failed,
    "cancelled": Cancelled,
}


class ResponseWriter:
    """Writes the events of one response, numbered. response: as it was when it was last told."""

    def __init__(self, response: Response, *, logprobs: Logprobs | None = None) -> None:
        self.response = response
        self._numbers = itertools.count()
        self._logprobs = logprobs
        self._done: list[Item] = []
        self._open: Item | None = None
        self._pieces: list[str] = []
        self._pending: list[TokenLogprob] = []
        self._written: list[TokenLogprob] = []

    def queue(self) -> Iterator[Event]:
        """The events of a response that has to wait."""
        yield self._tell(Created)
        yield self._tell(Queued)

    def start(self) -> Iterator[Event]:
        """The events of a response that begins."""
        queued = self.response.status == "queued"
        self.response = msgspec.structs.replace(self.response, status="in_progress")
        if not queued:
            yield self._tell(Created)
        yield self._tell(InProgress)

    def write(self, new: AnswerDelta) -> Iterator[Event]:
        """The events of what is new."""
        if self._logprobs is not None:
            self._pending += self._logprobs(new)
        for event in new.events:
            match event:
                case parsed.Content(text):
                    yield from self._text(text)
                case parsed.Reasoning(text):
                    yield from self._reason(text)
                case parsed.ToolCallStart(_, call_id, name):
                    yield from self._begin(FunctionCall(_id("fc"), call_id, name, "", "in_progress"))
                case parsed.ToolCallArguments(_, text):
                    self._pieces.append(text)
                    yield self._inside(ArgumentsDelta, delta=text)
                case parsed.ToolCallEnd():
                    yield from self._end_item("completed")

    def end(
        self, status: str, *, usage: Usage | None = None, reason: str | None = None, error: ApiError | None = None
    ) -> Iterator[Event]:
        """The last events. reason: of an incomplete response."""
        yield from self._end_item("completed" if status == "completed" else "incomplete")
        self.response = msgspec.structs.replace(
            self.response,
            status=status,
            output=list(self._done),
            usage=usage,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=None if reason is None else IncompleteDetails(reason),
            error=None if error is None else response_error(error),
        )
        yield self._tell(ENDS[status])

    def _text(self, text: str) -> Iterator[Event]:
        if not isinstance(self._open, OutputMessage):
            yield from self._begin(OutputMessage(_id("msg"), "in_progress", []))
            yield self._inside(PartAdded, part=OutputText(""))
        self._pieces.append(text)
        new, self._pending = self._pending, []
        self._written += new
        yield self._inside(TextDelta, delta=text, logprobs=new)

    def _reason(self, text: str) -> Iterator[Event]:
        if not isinstance(self._open, Reasoning):
            yield from self._begin(Reasoning(_id("rs"), "in_progress", []))
            yield self._inside(PartAdded, part=ReasoningText(""))
        self._pieces.append(text)
        self._pending = []  # logprobs are those of output text
        yield self._inside(ReasoningDelta, delta=text)

    def _begin(self, item: Item) -> Iterator[Event]:
        yield from self._end_item("completed")
        self._open, self._pieces, self._pending, self._written = item, [], self._pending, []
        yield ItemAdded(sequence_number=next(self._numbers), output_index=len(self._done), item=item)

    def _end_item(self, status: str) -> Iterator[Event]:
        item, text = self._open, "".join(self._pieces)
        if item is None:
            return
        whole: Item
        part: Part | None = None
        match item:
            case FunctionCall():
                self._pending = []
                whole = msgspec.structs.replace(item, arguments=text, status=status)
                yield self._inside(ArgumentsDone, name=item.name, arguments=text)
            case OutputMessage():
                part = OutputText(text, logprobs=self._written)
                whole = msgspec.structs.replace(item, content=[part], status=status)
                yield self._inside(TextDone, text=text, logprobs=self._written)
            case Reasoning():
                part = ReasoningText(text)
                whole = msgspec.structs.replace(item, content=[part], status=status)
                yield self._inside(ReasoningDone, text=text)
        if part is not None:
            yield self._inside(PartDone, part=part)
        yield ItemDone(sequence_number=next(self._numbers), output_index=len(self._done), item=whole)
        self._done.append(whole)
        self._open, self._pieces = None, []

    def _tell(self, kind: Callable[..., Kind]) -> Kind:
        return kind(sequence_number=next(self._numbers), response=self.response)

    def _inside(self, kind: Callable[..., Kind], **fields: object) -> Kind:
        assert self._open is not None
        return kind(sequence_number=next(self._numbers), output_index=len(self._done), item_id=self._open.id, **fields)


async def make_events(answers: Answers, writer: ResponseWriter) -> Events:
    """The events of an answer; errors are raised as they come."""
    num_generated = 0
    started = False
    async with aclosing(answers):
        async for new in answers:
            if not started:
                started = True
                for event in writer.start():
                    yield event
            num_generated += len(new.token_ids)
            for event in writer.write(new):
                yield event
            if new.finish_reason is None:
                continue
            if new.finish_reason == "abort":
                raise aborted()
            cut = new.finish_reason == "length"
            usage = count_usage(new, num_generated)
            for event in writer.end(
                "incomplete" if cut else "completed", usage=usage, reason="max_output_tokens" if cut else None
            ):
                yield event


async def saved(events: Events, save: Callable[[Response], Awaitable[None]]) -> Events:
    """The same events; the last one is told once its response is saved, as a client may go on from it at once."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, End):
                await save(event.response)
            yield event


async def with_failure(events: Events, writer: ResponseWriter) -> Events:
    """The same events; an error behind the first one becomes the last of them."""
    begun = False
    async with aclosing(events):
        try:
            async for event in events:
                begun = True
                yield event
        except Exception as error:
            if not begun:
                raise
            for event in writer.end("failed", error=as_api_error(error)):
                yield event


def count_usage(new: AnswerDelta, num_generated: int) -> Usage:
    """The usage so far."""
    return Usage(
        new.num_prompt_tokens,
        InputTokensDetails(new.num_cached_tokens),
        num_generated,
        OutputTokensDetails(new.num_reasoning_tokens),
        new.num_prompt_tokens + num_generated,
    )


def response_error(error: ApiError) -> ResponseError:
    """An error in the short form that responses carry. Its codes are OpenAI's where there is one that fits."""
    own_code = error.body.error.code
    return ResponseError(own_code or ("invalid_prompt" if error.status < 500 else "server_error"), str(error))


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
