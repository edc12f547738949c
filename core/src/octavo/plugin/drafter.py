"""Drafters: what guesses the next tokens of answers, so that the model checks several of them in one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.plugin.step import Ints


@dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """What a `Drafter` is made with. num_tokens: most tokens that it is ever asked for at once. options: what else
    `speculative_config` holds, for it to check."""

    num_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DraftInput:
    """Sequences whose next tokens a `Drafter` may guess.

    rows int32 [S]: a sequence's number while it runs; another one may have it afterwards.
    tokens: of each, all that it knows, prompt and answer: int32 [n], read-only, and good until `propose` returns.
    most int32 [S], at least 1: how many tokens may be guessed.
    """

    rows: Ints
    tokens: Sequence[Ints]
    most: Ints


class Drafter(Protocol):
    """Guesses the next tokens of running sequences. Answers do not depend on the guesses: a wrong one costs a little
    time, a right one saves a step.

    One object in the engine's process, with the time between two steps to itself: it must be quick. One that raises, or
    gives what it was not asked for, is named in the log and not asked again.
    """

    def __init__(self, spec: DrafterSpec) -> None:
        """Raise ValueError for options that are wrong."""
        ...

    def propose(self, batch: DraftInput) -> Ints:
        """int32 [S, k]: the tokens that may come next in each sequence, -1 padded behind them; none is an answer."""
        ...
