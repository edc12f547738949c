"""From the deltas of an answer to typed events, and from events to a whole message.

    message_start, ping, content blocks (content_block_start, _delta ..., _stop), message_delta, message_stop

A plain answer is a stream's events joined, so the two cannot differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import msgspec

from octavo.server.anthropic.answers import (
    Block,
    BlockChange,
    BlockDelta,
    BlockStart,
    BlockStop,
    Event,
    InputJsonDelta,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    OutputTokensDetails,
    Ping,
    SignatureDelta,
    Stop,
    Text,
    TextDelta,
    Thinking,
    ThinkingDelta,
    ToolUse,
    Usage,
)
from octavo.server.conversation import AnswerDelta, Answers
from octavo.server.errors import aborted
from octavo.server.parsers import events as parsed

Events = AsyncGenerator[Event, None]


async def make_events(answers: Answers, head: Message, *, max_tokens: int) -> Events:
    """The events of an answer. head: the message before it has content. Raises what the engine raises."""
    blocks = BlockWriter()
    num_generated = 0
    first = True
    async with aclosing(answers):
        async for new in answers:
            if first:
                first = False
                yield MessageStart(msgspec.structs.replace(head, usage=usage(new, 0)))
                yield Ping()
            num_generated += len(new.token_ids)
            for event in new.events:
                for written in blocks.write(event):
                    yield written
            if new.finish_reason is None:
                continue
            stop = make_stop(new, called=blocks.num_calls > 0, full=num_generated >= max_tokens)
            for written in blocks.finish():
                yield written
            yield MessageDelta(stop, usage(new, num_generated))
            yield MessageStop()


def usage(new: AnswerDelta, num_generated: int) -> Usage:
    """The usage so far."""
    return Usage(
        input_tokens=new.num_prompt_tokens - new.num_cached_tokens,
        cache_read_input_tokens=new.num_cached_tokens,
        output_tokens=num_generated,
        output_tokens_details=OutputTokensDetails(new.num_reasoning_tokens),
    )


def make_stop(new: AnswerDelta, *, called: bool, full: bool) -> Stop:
    """Why the answer ended. full: it has max_tokens; one that was cut shorter met the end of the context.

    Raises ApiError for an answer that was aborted: the protocol has no word for it.
    """
    match new.finish_reason:
        case "abort":
            raise aborted()
        case "length":
            return Stop("max_tokens" if full else "model_context_window_exceeded", None)
        case _ if called:
            return Stop("tool_use", None)
        case _ if isinstance(new.stop_reason, str):
            return Stop("stop_sequence", new.stop_reason)
    return Stop("end_turn", None)


class BlockWriter:
    """Writes what a parser found as content blocks, one open at a time.

    Text of nothing but white space that stands before a call or before thinking is dropped: models put line breaks
    there, and Anthropic's API refuses such a block when a client sends it back.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._index = -1
        self._open: Block | None = None
        self._blank = ""
        self._digest = hashlib.sha256()

    def write(self, event: parsed.Event) -> Iterator[Event]:
        """The events of one event of the parser."""
        match event:
            case parsed.Content(text):
                if isinstance(self._open, Text):
                    yield self._delta(TextDelta(text))
                elif (self._blank + text).isspace():
                    self._blank += text
                elif text:
                    yield from self._start(Text(""))
                    yield self._delta(TextDelta(self._blank + text))
                    self._blank = ""
            case parsed.Reasoning(text):
                if not isinstance(self._open, Thinking):
                    yield from self._start(Thinking("", ""))
                    self._digest = hashlib.sha256()
                self._digest.update(text.encode())
                yield self._delta(ThinkingDelta(text))
            case parsed.ToolCallStart(_, id, name):
                self.num_calls += 1
                self._blank = ""
                yield from self._start(ToolUse(id, name, {}))
            case parsed.ToolCallArguments(_, text):
                yield self._delta(InputJsonDelta(text))
            case parsed.ToolCallEnd():
                yield from self._stop()

    def finish(self) -> Iterator[Event]:
        """The events that end the content."""
        if self._blank and self._index < 0:  # white space is all that there is
            yield from self._start(Text(""))
            yield self._delta(TextDelta(self._blank))
        yield from self._stop()

    def _start(self, block: Block) -> Iterator[Event]:
        yield from self._stop()
        self._index += 1
        self._open = block
        yield BlockStart(self._index, block)

    def _delta(self, change: BlockChange) -> BlockDelta:
        return BlockDelta(self._index, change)

    def _stop(self) -> Iterator[Event]:
        if isinstance(self._open, Thinking):
            yield self._delta(SignatureDelta(self._digest.hexdigest()))
        if self._open is not None:
            yield BlockStop(self._index)
        self._open = None


async def join_events(events: Events) -> Message:
    """The whole message."""
    message: Message | None = None
    pieces: list[list[str]] = []
    async with aclosing(events):
        async for event in events:
            match event:
                case MessageStart(start):
                    message = start
                case BlockStart(_, block):
                    assert message is not None
                    message.content.append(block)
                    pieces.append([])
                case BlockDelta(index, SignatureDelta(signature)):
                    assert message is not None
                    block = message.content[index]
                    assert isinstance(block, Thinking)
                    block.signature = signature
                case BlockDelta(index, change):
                    pieces[index].append(text_of(change))
                case MessageDelta(stop, total):
                    assert message is not None
                    message.stop_reason, message.stop_sequence = stop.stop_reason, stop.stop_sequence
                    message.usage = total
    assert message is not None
    for block, parts in zip(message.content, pieces, strict=True):
        fill(block, "".join(parts))
    return message


def text_of(change: BlockChange) -> str:
    """What a delta adds."""
    match change:
        case TextDelta(text) | ThinkingDelta(text) | InputJsonDelta(text):
            return text
    return ""


def fill(block: Block, text: str) -> None:
    """Put all that a block's deltas said into it."""
    match block:
        case Text():
            block.text = text
        case Thinking():
            block.thinking = text
        case ToolUse():
            # A model may write any JSON value; the protocol wants an object, which a call without arguments has too.
            value = msgspec.json.decode(text) if text else {}
            block.input = value if isinstance(value, dict) else {"value": value}
