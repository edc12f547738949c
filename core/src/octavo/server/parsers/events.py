"""What a parser makes of a model's text. A plain answer is a stream's events joined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the model's thinking."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A call begins. index: 0, 1, ... within one choice; name: as the model wrote it, known to the request or not."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments. All of one call joined are one JSON value once the call has ended."""

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True):
    """A call is complete."""

    index: int


Event = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd


class OutputParser(Protocol):
    """Takes the text of one choice apart, in pieces of any size; how it is split changes no joined text.

    expects_reasoning: whether the text begins with reasoning, or may do so. in_reasoning: whether what comes next is
    reasoning, as far as is known.
    """

    expects_reasoning: bool

    @property
    def in_reasoning(self) -> bool: ...
    def feed(self, text: str) -> list[Event]:
        """What the next piece of text makes known. Special tokens must be in the text."""
        ...

    def finish(self) -> list[Event]:
        """The text is over: what was held back, and the end of a call that was still open. Call it once."""
        ...


class Tool(Protocol):
    """What parsers need to know of a tool. `parameters`: JSON schema of its arguments, or None."""

    @property
    def name(self) -> str: ...
    @property
    def parameters(self) -> Mapping[str, Any] | None: ...
    @property
    def strict(self) -> bool | None: ...
