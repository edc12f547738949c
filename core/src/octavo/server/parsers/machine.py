"""The one engine that runs every format: text in, events out.

Text between marks goes where the state says. From the first mark of a call until its name is known all text is kept:
if it turns out to be no call, it is content (or reasoning) like the text before it. After that, what does not belong
to the call ends it and is content. No text is lost but marks, white space around them, and what stands in an envelope
beside name and arguments.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.server.parsers.arguments import ArgumentWriter, Parameters
from octavo.server.parsers.calls import CallReader, EnvelopeReader, PythonicReader
from octavo.server.parsers.events import (
    Content,
    Event,
    Reasoning,
    Tool,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from octavo.server.parsers.grammar import CALL_KINDS, READING, State
from octavo.server.parsers.json_text import JsonScanner, quoted
from octavo.server.parsers.program import Program

NAME = re.compile(r"\s*[^\s<>{}\[\]\"]{0,256}\s*")
"""Text that may be a function's name, with white space around it."""

HEADER = re.compile(r"[\w.:=\-<|> /]{0,400}")
WORDS = {"name": NAME, "header": HEADER}
SHORT_ID = string.ascii_letters + string.digits


@dataclass
class _Call:
    """A call, or what may become one. raw: its text until it has a name; index: None as long as it is not certain."""

    in_reasoning: bool
    raw: str
    name: str = ""
    index: int | None = None
    has_arguments: bool = False
    key: str = ""
    parameters: Parameters = field(default_factory=lambda: Parameters(None))
    reader: JsonScanner | CallReader | None = None
    writer: ArgumentWriter | None = None


class Machine:
    """Implements `OutputParser`.

    state: where the text begins; seed: the end of the prompt, read before it; shown: content to begin with.
    may_reason: whether the text may begin with reasoning though it is not open yet.
    """

    def __init__(
        self,
        program: Program,
        *,
        tools: Sequence[Tool] = (),
        state: str = "start",
        seed: str = "",
        shown: str = "",
        may_reason: bool = False,
    ) -> None:
        self._program = program
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._name = state
        self._buffer = seed
        self._space = ""  # at the start, before it is known whether text follows
        self._call: _Call | None = None
        self._num_calls = 0
        self._events: list[Event] = []
        self._run(final=False)
        if self._call is not None:
            self._call.raw = ""  # the prompt's, not the answer's
        self._events = [Content(shown)] if shown else []
        self.expects_reasoning = may_reason or self.in_reasoning
        """Whether the text begins with reasoning, or may do so."""

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        if self._call is not None:
            return self._call.in_reasoning and self._call.index is None
        return self._name == "thinking" or self._state.kind == "reasoning"

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        self._run(final=False)
        return self._taken()

    def finish(self) -> list[Event]:
        self._run(final=True)
        if (call := self._call) is not None:
            self._read_up_to("")
            if call.index is not None:
                self._end_call()
            elif call.raw.strip():  # else it is white space behind a call
                self._no_call()
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    @property
    def _state(self) -> State:
        return self._program.states[self._name]

    def _run(self, *, final: bool) -> None:
        while STEPS[self._state.kind](self, final):
            pass

    # Steps: each reads from the buffer and says whether there may be more to do -------------------------------

    def _text(self, final: bool) -> bool:
        start, mark = self._find(final)
        self._say(self._buffer[:start])
        self._read_up_to(self._buffer[start:])
        return self._take(mark)

    def _blank(self, final: bool) -> bool:
        rest = self._buffer.lstrip()
        if self._state.keeps:
            self._space += self._buffer[: len(self._buffer) - len(rest)]
        self._read_up_to(rest)
        mark = self._program.marks[self._name].at_start(rest, final=final)
        if mark or mark is None:
            return self._take(mark)
        if not rest and not final:
            return False
        space, self._space = self._space, ""
        self._say(space)
        if not rest:
            return False
        if self._state.otherwise:
            self._go(self._state.otherwise)
        else:
            self._no_call()
        return True

    def _word(self, final: bool) -> bool:
        """A name, a header or a key."""
        call = self._called()
        start, mark = self._find(final)
        if self._state.kind == "key":
            call.key += self._buffer[:start]
        else:
            word = call.name + self._buffer[:start]
            found = WORDS[self._state.kind].match(word)
            end = found.end() if found else 0
            if end < len(word):
                self._read_up_to(self._buffer[end - len(call.name) :])
                self._no_call()
                return True
            call.name = word
        self._read_up_to(self._buffer[start:])
        if mark and self._state.kind == "name" and not call.name.strip():
            self._no_call()
            return True
        return self._take(mark)

    def _value(self, final: bool) -> bool:
        """An argument's value, or a string between marks."""
        call = self._called()
        start, mark = self._find(final)
        text = self._buffer[:start]
        self._read_up_to(self._buffer[start:])
        if self._state.kind == "value":
            self._arguments(self._writer(call).text(text))
        else:
            self._arguments(self._reader(call).feed(quoted(text))[0])
        return self._take(mark)

    def _reading(self, final: bool) -> bool:
        call = self._called()
        reader = self._reader(call)
        out, rest = reader.feed(self._buffer)
        self._read_up_to(rest)
        if call.index is None and not isinstance(reader, JsonScanner) and reader.name is not None:
            call.name = reader.name
            self._announce()
        self._arguments(out)
        if reader.done:
            self._end_call()
            self._go(self._state.then)
            return True
        if not rest:
            return False
        mark = self._program.marks[self._name].at_start(rest, final=final)
        if mark == "":
            self._no_call()
            return True
        return self._take(mark)

    def _find(self, final: bool) -> tuple[int, str | None]:
        return self._program.marks[self._name].find(self._buffer, final=final)

    def _read_up_to(self, rest: str) -> None:
        """All of the buffer is read but for `rest`, which may also give back text that was read before."""
        if self._call is not None and self._call.index is None:
            read = self._call.raw + self._buffer
            self._call.raw = read[: len(read) - len(rest)]
        self._buffer = rest

    # Marks -----------------------------------------------------------------------------------------------------------

    def _take(self, mark: str | None) -> bool:
        """Follow the mark that the buffer begins with. False if there is none yet."""
        if mark is None:
            return False
        left = self._state
        move = self._program.moves[self._name].get(mark)
        if move is None or not move.keep:
            self._read_up_to(self._buffer[len(mark) :])
        if move is None:  # a token to leave out
            return True
        to = move.to
        if (call := self._call) is not None:
            match left.kind:
                case "header":
                    to = self._route(call, left)
                case "name":
                    self._announce()
                case "value":
                    self._arguments(self._writer(call).end())
                case "quote":
                    self._arguments(self._reader(call).feed('"')[0])
            if move.end:
                if call.index is None and call.reader is not None:
                    self._no_call()
                    return True
                self._end_call()
        self._go(to, opening="" if move.keep or move.end else mark)
        if (call := self._call) is not None:
            match self._state.kind:
                case "value":
                    self._writer(call).start(call.key, is_text=move.is_text)
                    call.key = ""
                case "quote":
                    out, refused = self._reader(call).feed('"')
                    self._arguments(out)
                    if refused:
                        self._no_call()
        return True

    def _go(self, name: str, *, opening: str = "") -> None:
        """Enter a state. opening: the mark that led to it."""
        if self._program.states[name].kind not in CALL_KINDS:
            self._call = None  # a header may be no call's
        elif self._call is None:
            self._call = _Call(in_reasoning=self.in_reasoning, raw=self._space + opening)
        self._space = ""
        self._name = name

    def _route(self, call: _Call, state: State) -> str:
        for pattern, to in state.routes:
            if found := re.search(pattern, call.name):
                if name := found.groupdict().get("name"):
                    call.name = name
                    self._announce()
                return to
        return "content"

    # Calls -----------------------------------------------------------------------------------------------------------

    def _called(self) -> _Call:
        assert self._call is not None, self._name
        return self._call

    def _reader(self, call: _Call) -> JsonScanner | CallReader:
        if call.reader is None:
            match self._state.kind:
                case "envelope":
                    call.reader = EnvelopeReader(strict=self._state.strict)
                case "pythonic":
                    call.reader = PythonicReader()
                case "words" | "quote":
                    call.reader = JsonScanner(call.parameters.word)
                case _:
                    call.reader = JsonScanner()
        return call.reader

    def _writer(self, call: _Call) -> ArgumentWriter:
        if call.writer is None:
            call.writer = ArgumentWriter(call.parameters, trim=self._state.trim)
        return call.writer

    def _announce(self) -> None:
        """It is a call: say so."""
        call = self._called()
        written = call.name.strip()
        found = re.fullmatch(self._program.name, written) if self._program.name else None
        name = found["name"] if found else written
        call.index = self._num_calls
        call.parameters = Parameters(self._schemas.get(name))
        self._num_calls += 1
        self._events.append(ToolCallStart(call.index, self._id(written, name, call.index), name))

    def _id(self, written: str, name: str, index: int) -> str:
        match self._program.ids:
            case "short":
                return "".join(secrets.choice(SHORT_ID) for _ in range(9))
            case "name":
                return written if written != name else f"functions.{name}:{index}"
        return f"call_{secrets.token_hex(12)}"

    def _end_call(self) -> None:
        """The call is over, complete or not."""
        call, self._call = self._called(), None
        if call.index is None:
            return
        parts = (call.writer, call.reader)
        rest = "".join(part.close() for part in parts if part is not None)
        self._put_arguments(call, call.index, rest)
        if not call.has_arguments:
            self._put_arguments(call, call.index, "{}")
        self._events.append(ToolCallEnd(call.index))

    def _no_call(self) -> None:
        """What comes next belongs to no call: what has been read of one is text, unless it was announced."""
        call = self._called()
        if call.index is None:
            self._call = None
            self._name = "reasoning" if call.in_reasoning else "content"
            self._say(self._program.without_drops(call.raw))
            return
        held = "".join(part.held() for part in (call.writer, call.reader) if part is not None)
        self._end_call()
        self._name = "content"
        self._buffer = held + self._buffer

    # Events ----------------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        """Text for the client, of the kind that the state says."""
        if not text:
            return
        kind = Reasoning if self._state.kind == "reasoning" else Content
        last = self._events[-1] if self._events else None
        if isinstance(last, kind):
            self._events[-1] = kind(last.text + text)
        else:
            self._events.append(kind(text))

    def _arguments(self, text: str) -> None:
        call = self._called()
        if call.index is not None:
            self._put_arguments(call, call.index, text)

    def _put_arguments(self, call: _Call, index: int, text: str) -> None:
        if not text:
            return
        call.has_arguments = True
        last = self._events[-1] if self._events else None
        if isinstance(last, ToolCallArguments) and last.index == index:
            self._events[-1] = ToolCallArguments(index, last.text + text)
        else:
            self._events.append(ToolCallArguments(index, text))


STEPS: Mapping[str, Callable[[Machine, bool], bool]] = {
    "content": Machine._text,
    "reasoning": Machine._text,
    "blank": Machine._blank,
    "gap": Machine._blank,
    "name": Machine._word,
    "header": Machine._word,
    "key": Machine._word,
    "value": Machine._value,
    "quote": Machine._value,
} | dict.fromkeys(READING, Machine._reading)
