"""A format as data: states, the marks that may come in each, and where a mark leads. `machine.py` runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.errors import ConfigError

TEXT_KINDS = frozenset({"content", "reasoning"})
CALL_KINDS = frozenset({"gap", "name", "header", "arguments", "words", "quote", "envelope", "pythonic", "key", "value"})
KINDS = TEXT_KINDS | CALL_KINDS | {"blank"}
READING = frozenset({"arguments", "words", "envelope", "pythonic"})
"""Kinds that know their own end; marks count only where they stop."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """What a mark does. to: the next state; end: the call is over; keep: the mark is the next state's text too.

    is_text: for a mark behind a key, whether the model says that its value is text (True) or JSON (False).
    """

    to: str
    end: bool = False
    keep: bool = False
    is_text: bool | None = None


@dataclass(frozen=True, kw_only=True)
class State:
    """What text is until the next mark.

    kind:
      content, reasoning   text for the client
      blank                white space between parts, left out; anything else goes to the state `otherwise`
      gap                  the same inside a call, where anything else means that it is no call
      name                 a function's name
      header               free words, taken apart by `routes`
      arguments            a JSON value
      words, quote         a JSON value whose keys and words have no quotes; a string in it, between marks
      envelope             a JSON object with name and arguments
      pythonic             `f(a=1)`
      key, value           one argument's key and value
    then: where to go when what the text is has its own end (arguments, envelope, pythonic).
    keeps: white space of a blank state that text follows is that text's.
    strict: nothing but the text itself says that an envelope is a call.
    trim: one line break around a value is not the value's.
    routes: (pattern, state) in order, for the text of a header; its group `name` is a function's.
    """

    kind: str
    marks: Mapping[str, Move] = field(default_factory=dict)
    otherwise: str = ""
    then: str = ""
    keeps: bool = False
    strict: bool = False
    trim: bool = False
    routes: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"a state's kind is one of {', '.join(sorted(KINDS))}, not {self.kind!r}")


@dataclass(frozen=True, kw_only=True, eq=False)
class CallTag:
    """How a call is written, for grammars that force one (xgrammar's structural tags).

    begin, end: around the arguments of one call, `{name}` being the function's; style: how arguments are written
    ("json", "pythonic", "escaped", or one that xgrammar knows: "qwen_xml", ...).
    before, after: around all calls; between: what separates two.
    trigger: what begins a call in free text; none: a call can only be the whole answer.
    number: the begin ends in a number and this text behind it.
    thought: (begin, end) of reasoning that may come first, in formats that have no marks of their own for it.
    """

    begin: str
    end: str
    style: str = "json"
    before: str = ""
    after: str = ""
    between: str = ""
    trigger: str = ""
    number: str = ""
    thought: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ToolFormat:
    """How a family of models writes tool calls.

    opens: marks that begin a call anywhere in text. leads: those that do so only before all other text.
    again: those that may begin another call right behind one. closes: what may be left of a call behind it.
    states: the format's own; they may lead to content, after (white space behind a call), reasoning.
    name: a pattern whose group `name` is what the function is called; the whole may be the call's id.
    ids: "random", "short" (nine letters and digits) or "name" (what stands in the place of the name).
    whole: `states` has all states and does reasoning too. turn: the mark that begins a message of such a format.
    stops: tokens that end the answer besides the model's own end tokens.
    """

    opens: Mapping[str, Move] = field(default_factory=dict)
    leads: Mapping[str, Move] = field(default_factory=dict)
    again: Mapping[str, Move] = field(default_factory=dict)
    closes: tuple[str, ...] = ()
    states: Mapping[str, State]
    name: str = ""
    ids: str = "random"
    tag: CallTag | None = None
    whole: bool = False
    turn: str = ""
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class ReasoningFormat:
    """How a family of models writes its reasoning.

    start, end: the marks around it, each in all its spellings. It starts before all other text, or at a mark of
    `anywhere` in it.
    begins: the answer begins with reasoning though no mark says so, unless the prompt has ended it.
    wraps: marks around the content behind it, left out.
    shown: what the answer begins with; for formats whose marks are left in the content.
    part_of: the whole tool format that this is a part of.
    """

    start: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    begins: bool = False
    anywhere: tuple[str, ...] = ()
    wraps: tuple[str, ...] = ()
    shown: str = ""
    part_of: str = ""


def compose(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> dict[str, State]:
    """The states of both formats as one.

    start: nothing came yet; thinking, reasoning; answer: right behind reasoning; content; after: behind a call.
    A mark of a call ends reasoning as well: models forget to end it. Raises ConfigError for a mark that leads nowhere.
    """
    states = dict(tools.states) if tools is not None and tools.whole else _composed(tools, reasoning)
    for name, state in states.items():
        leads = [move.to for move in state.marks.values()] + [to for _, to in state.routes]
        ends = (
            [state.then]
            if state.kind in READING
            else [state.otherwise]
            if state.otherwise or state.kind == "blank"
            else []
        )
        if missing := [to for to in [*leads, *ends, "content", "start"] if to not in states]:
            raise ConfigError(f"the format's state {name!r} leads to {missing[0]!r}, which is no state of it")
    return states


def _composed(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> dict[str, State]:
    opens = dict(tools.opens) if tools else {}
    leads = dict(tools.leads) if tools else {}
    states = dict(tools.states) if tools else {}
    starts, ends, wraps, anywhere = {}, {}, {}, {}
    if reasoning is not None:
        starts = {mark: Move(to="thinking") for mark in reasoning.start}
        anywhere = {mark: Move(to="thinking") for mark in reasoning.anywhere}
        ends = {mark: Move(to="answer") for mark in reasoning.end}
        wraps = {mark: Move(to="content") for mark in reasoning.wraps}
        states["thinking"] = State(kind="blank", marks=opens | starts | ends, otherwise="reasoning")
        states["reasoning"] = State(kind="reasoning", marks=opens | ends)
    behind = {mark: Move(to="after") for mark in tools.closes} | dict(tools.again) if tools else {}
    answer_wraps = {mark: Move(to="answer") for mark in wraps}
    states["start"] = State(kind="blank", keeps=True, marks=leads | opens | starts, otherwise="content")
    states["answer"] = State(kind="blank", marks=leads | opens | anywhere | ends | answer_wraps, otherwise="content")
    states["content"] = State(kind="content", marks=opens | anywhere | wraps)
    states["after"] = State(kind="blank", marks=opens | anywhere | ends | behind, otherwise="content")
    return states
