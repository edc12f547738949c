"""What a grammar library gives: compiled grammars, and matchers that follow one answer each.

A mask is int32 [ceil((V + 1) / 32)] over the model's V tokens and the end of the text (`Vocabulary.end`): bit i of
word w says that token 32 w + i may come next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int32]


class Matcher(Protocol):
    """Where one answer is in its grammar. It never holds the end of the text."""

    def accept(self, tokens: Sequence[int]) -> int:
        """Take tokens until one does not fit; returns how many were taken."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""

    def fill(self, words: Words) -> None:
        """Write the mask of the next token. Raises MatchError if the library gives up."""


class Compiled(Protocol):
    """A grammar, shared by all answers of its shape. size: bytes of memory, roughly."""

    @property
    def backend(self) -> str: ...
    @property
    def size(self) -> int: ...
    def matcher(self) -> Matcher: ...


class MatchError(Exception):
    """The library cannot go on with one answer."""


class Unsupported(Exception):
    """A library cannot do this spec: the message names the part."""


def one_line(error: Any, limit: int = 400) -> str:
    """What a library says, on one line, without the dump of its state that llguidance appends."""
    text = " ".join(str(error).partition("<state>")[0].split())
    return text if len(text) <= limit else text[:limit] + "..."
