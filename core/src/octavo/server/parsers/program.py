"""A format made ready to run: the marks of each state, with the texts that are to be left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from octavo.server.parsers.grammar import READING, Move, State
from octavo.server.parsers.marks import Marks

SKIPS_SPACE = READING | {"blank", "gap"}
TAKES_ALL = frozenset({"name", "header", "key", "value", "quote"})
"""Kinds of text in which no special token is left out."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A format made ready. drop: texts to leave out of content and reasoning; ids, name: see `ToolFormat`.

    moves, marks: of each state; the marks are those of its moves and the texts to drop.
    """

    states: Mapping[str, State]
    drop: frozenset[str] = frozenset()
    ids: str = "random"
    name: str = ""

    @cached_property
    def moves(self) -> dict[str, dict[str, Move]]:
        return {name: self._moves(state) for name, state in self.states.items()}

    @cached_property
    def marks(self) -> dict[str, Marks]:
        return {name: Marks([*moves, *self._dropped(name)]) for name, moves in self.moves.items()}

    def _moves(self, state: State) -> dict[str, Move]:
        skips_space = state.kind in SKIPS_SPACE
        return {mark.lstrip() if skips_space else mark: move for mark, move in state.marks.items()}

    def _dropped(self, name: str) -> frozenset[str]:
        state = self.states[name]
        return frozenset() if state.kind in TAKES_ALL else self.drop - state.marks.keys()

    def without_drops(self, text: str) -> str:
        for mark in self.drop:
            text = text.replace(mark, "")
        return text
