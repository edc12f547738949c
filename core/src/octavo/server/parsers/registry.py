"""Chooses the formats of a model, and makes the parser of one answer."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from octavo.errors import ConfigError
from octavo.server.parsers import response_template as described
from octavo.server.parsers.detect import GENERIC, detect
from octavo.server.parsers.events import OutputParser, Tool
from octavo.server.parsers.grammar import CALL_KINDS, ReasoningFormat, ToolFormat, compose
from octavo.server.parsers.machine import Machine
from octavo.server.parsers.program import Program
from octavo.server.parsers.structural import structural_tag

F = TypeVar("F")

TURN_MARK = re.compile(
    r"<\|[^<>|]{1,40}\|>|<｜[^<>｜]{1,40}｜>|\[/?INST\]|</?s>|<(?:start|end)_of_turn>|<\|turn>|<turn\|>"
)
"""What separates the turns of a prompt in the usual templates."""


class Registered(Protocol):
    """The formats by name, as `octavo.extensions.Extensions` has them."""

    @property
    def tool_parsers(self) -> Mapping[str, str]: ...
    @property
    def reasoning_parsers(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Format:
    """What was chosen for a model. tool_name, reasoning_name: None where nothing is parsed.

    description: the model's own `response_template`, which then does both.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    tool_name: str | None = None
    reasoning_name: str | None = None
    description: Mapping[str, Any] | None = None

    @property
    def has_tools(self) -> bool:
        return self.tools is not None or described.CALLS_FIELD in self._fields

    @property
    def has_reasoning(self) -> bool:
        return self.reasoning is not None or any(name in self._fields for name in described.REASONING_FIELDS)

    @property
    def _fields(self) -> Mapping[str, Any]:
        fields: Mapping[str, Any] = (self.description or {}).get("fields", {})
        return fields

    @property
    def reasoning_end(self) -> tuple[str, ...]:
        """The marks that end reasoning, without white space."""
        ends = self.reasoning.end if self.reasoning is not None else ()
        return tuple(dict.fromkeys(mark.strip() for mark in ends))

    @property
    def stop_tokens(self) -> tuple[str, ...]:
        """Texts of tokens that end an answer besides the model's own end tokens."""
        return self.tools.stops if self.tools is not None else ()

    def structural_tag(
        self, tools: Sequence[Tool], *, choice: str, name: str | None = None, parallel: bool = True
    ) -> dict[str, Any] | None:
        """See `octavo.server.parsers.structural`."""
        tag = self.tools.tag if self.tools is not None else None
        return None if tag is None else structural_tag(tag, tools, choice=choice, name=name, parallel=parallel)


def choose(
    registered: Registered,
    *,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
    template: str | None = None,
    has_token: Callable[[str], bool] = lambda text: False,
    response_template: Mapping[str, Any] | None = None,
) -> Format:
    """The formats named, or ("auto") those that the chat template shows; "none" parses nothing.

    template: source of the chat template that is used with tools; None if it is not known yet.
    has_token: whether a text is one token. response_template: the tokenizer's own description of answers; it is used
    by the name "hf", and where nothing else is known of the model.
    Raises ConfigError for a name that is not registered.
    """
    found_tools, found_reasoning = detect(template or "", has_token)
    asked = (tool_call_parser, reasoning_parser)
    if described.NAME in asked or (response_template and asked == ("auto", "auto") and found_tools == GENERIC):
        return _described(response_template, is_known=template is not None)
    tool_name = found_tools if tool_call_parser == "auto" else tool_call_parser
    reasoning_name = found_reasoning if reasoning_parser == "auto" else reasoning_parser
    tools = _named(registered.tool_parsers, tool_name, "tool_call_parser", ToolFormat)
    reasoning = _named(registered.reasoning_parsers, reasoning_name, "reasoning_parser", ReasoningFormat)
    if reasoning is not None and reasoning.part_of:
        tool_name = reasoning.part_of
        tools = _named(registered.tool_parsers, tool_name, "tool_call_parser", ToolFormat)
    elif tools is not None and tools.whole:
        reasoning, reasoning_name = ReasoningFormat(part_of=tool_name or ""), tool_name
    compose(tools, reasoning)  # a format that leads nowhere is refused here, not when it is first used
    return Format(
        tools=tools,
        reasoning=reasoning,
        tool_name=tool_name if tools is not None else None,
        reasoning_name=reasoning_name if reasoning is not None else None,
    )


def _described(response_template: Mapping[str, Any] | None, *, is_known: bool) -> Format:
    if response_template is not None:
        described.check_template(response_template)
    elif is_known:
        raise ConfigError(f"the parser {described.NAME!r} needs a response_template in tokenizer_config.json")
    return Format(tool_name=described.NAME, reasoning_name=described.NAME, description=response_template)


def _named(table: Mapping[str, str], name: str | None, flag: str, kind: type[F]) -> F | None:
    if name is None or name == "none":
        return None
    if name not in table:
        raise ConfigError(f"{flag} {name!r}: known are auto, none, {', '.join(sorted(table))}")
    module, _, attribute = table[name].partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{flag} {name!r}: {table[name]!r} cannot be imported: {error}") from error
    if not isinstance(found, kind):
        raise ConfigError(f"{flag} {name!r}: {table[name]!r} is no {kind.__name__}")
    return found


def make_parser(
    format: Format,
    *,
    tools: Sequence[Tool] = (),
    prompt_tail: str = "",
    reasoning: bool = True,
    drop: frozenset[str] = frozenset(),
) -> OutputParser:
    """The parser of one choice.

    tools: those the request may call; without any, what looks like a call is content.
    prompt_tail: the last characters of the rendered prompt: a mark of reasoning may be open in its last turn.
    reasoning: False if the request switched it off; then all is content, unless the prompt leaves reasoning open.
    drop: texts of special tokens to leave out of content and reasoning.
    """
    tool_format = format.tools
    if format.description is not None and tool_format is None:
        return described.ResponseTemplateParser(
            format.description, tools=tools, prompt=prompt_tail, drop=drop, reads_reasoning=reasoning
        )
    is_open = open_at_end(format.reasoning, prompt_tail, drop) if format.reasoning is not None else None
    # A template that leaves reasoning open has not heard of the switch, and then the model has not either.
    thinks = format.reasoning if reasoning or is_open else None
    if tool_format is not None and tool_format.whole:
        at = prompt_tail.rfind(tool_format.turn)
        seed = prompt_tail[at:] if at >= 0 else ""
        return Machine(_program(tool_format, None, bool(tools), drop), tools=tools, seed=seed, may_reason=True)
    program = _program(tool_format, thinks, bool(tools), drop)
    if thinks is None:
        return Machine(program, tools=tools)
    state = "answer" if is_open is False else "thinking" if is_open or thinks.begins else "start"
    return Machine(
        program, tools=tools, state=state, shown=thinks.shown, may_reason=is_open is not False and bool(thinks.start)
    )


def open_at_end(reasoning: ReasoningFormat, prompt: str, drop: frozenset[str]) -> bool | None:
    """Whether the last turn of the prompt leaves reasoning open (True) or has ended it (False); None: no mark."""
    marks = {mark.strip() for mark in (*reasoning.start, *reasoning.end)}
    turn = 0
    for found in TURN_MARK.finditer(prompt):
        if found.group() not in marks:
            turn = found.end()
    for token in drop - marks:
        if (at := prompt.rfind(token, turn)) >= 0:
            turn = at + len(token)
    last = prompt[turn:]
    start = max((last.rfind(mark.strip()) for mark in reasoning.start), default=-1)
    end = max((last.rfind(mark.strip()) for mark in reasoning.end), default=-1)
    return None if start < 0 and end < 0 else start > end


@lru_cache(maxsize=64)
def _program(tools: ToolFormat | None, reasoning: ReasoningFormat | None, calls: bool, drop: frozenset[str]) -> Program:
    """The formats made ready, without calls where there are no tools."""
    if tools is not None and not calls and not tools.whole:
        tools = None
    states = compose(tools, reasoning)
    if tools is not None and not calls:
        states = {name: replace(state, routes=_without_calls(states, state.routes)) for name, state in states.items()}
    return Program(
        states=states,
        drop=drop,
        ids=tools.ids if tools is not None else "random",
        name=tools.name if tools is not None else "",
    )


def _without_calls(states: Mapping[str, Any], routes: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (pattern.replace("?P<name>", ""), "content") if states[to].kind in CALL_KINDS else (pattern, to)
        for pattern, to in routes
    )


__all__ = ["Format", "OutputParser", "choose", "make_parser"]
