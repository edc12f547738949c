"""One answer and its grammar: free until the mark of `structured_after` has come, then as the matcher allows."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from octavo.structured.matcher import Matcher, MatchError, Words


class State(IntEnum):
    """What may come next. MASKED: the tokens of a mask; FREE: any; DONE: nothing, the answer is whole."""

    MASKED = 0
    FREE = 1
    DONE = 2


class ShapedAnswer:
    """Follows one answer.

    ends: ids that end it; they are allowed where the grammar may end. after: ids before which it is free, though it
    may not end there: an answer that ends has its shape. num_tokens: of the vocabulary; the grammar's own end is the
    id behind them.
    """

    def __init__(self, matcher: Matcher, *, num_tokens: int, ends: Sequence[int], after: Sequence[int] = ()) -> None:
        self._matcher = matcher
        self._num_tokens = num_tokens
        self._ends = tuple(end for end in ends if end < num_tokens)
        self._after = tuple(after)
        self._tail: tuple[int, ...] = ()
        self._words: Words = np.empty((num_tokens + 32) // 32, np.int32)

    @property
    def is_free(self) -> bool:
        """Whether the grammar has not begun."""
        return bool(self._after)

    def accept(self, tokens: Sequence[int]) -> None:
        """Take tokens that were sampled. Raises MatchError for one that the grammar forbids."""
        taken = self._take(tokens)
        if taken < len(tokens):
            raise MatchError(f"the token {tokens[taken]} was sampled, which the grammar forbids")

    def masks(self, out: Words, *, may_end: bool, drafts: Sequence[int] = ()) -> list[State]:
        """Masks of the next token and of those behind each draft, into out [1 + drafts, words].

        may_end: False lets the answer end only where the grammar leaves nothing else. A draft that the grammar
        forbids gets, and all behind it get, the mask of the last position that can be reached.
        """
        before = self._after, self._tail
        states = [self._mask(out[0], may_end)]
        taken = 0
        for row, draft in enumerate(drafts, start=1):
            blocked = taken < row - 1 or states[-1] is State.DONE or self._take([draft]) == 0
            if blocked:
                out[row] = out[row - 1]
                states.append(states[-1])
            else:
                taken = row
                states.append(self._mask(out[row], may_end))
        if taken:
            matched = taken if not before[0] else self._num_behind_mark(before, drafts[:taken])
            self._matcher.rollback(matched)
            self._after, self._tail = before
        return states

    def _take(self, tokens: Sequence[int]) -> int:
        """Take tokens until one is forbidden; how many were taken."""
        if not self._after:
            return self._matcher.accept(tokens)
        behind = self._num_behind_mark((self._after, self._tail), tokens)
        free = len(tokens) - behind
        tail = (*self._tail, *tokens[:free])[-len(self._after) :]
        if tail != self._after:
            self._tail = tail
            return len(tokens)
        self._after = self._tail = ()
        return free + self._matcher.accept(tokens[free:])

    @staticmethod
    def _num_behind_mark(state: tuple[tuple[int, ...], tuple[int, ...]], tokens: Sequence[int]) -> int:
        """How many of the tokens come behind the first mark; 0 if there is none."""
        after, tail = state
        seen = (*tail, *tokens)
        for place in range(len(tail), len(seen)):
            if seen[max(0, place + 1 - len(after)) : place + 1] == after:
                return len(seen) - place - 1
        return 0

    def _mask(self, out: Words, may_end: bool) -> State:
        if self._after:
            out.fill(-1)
            self._clear_padding(out)
            self._set_ends(out, False)
            return State.MASKED if self._ends else State.FREE
        words, end = self._words, self._num_tokens
        self._matcher.fill(words)
        complete = bool(words[end // 32] >> (end % 32) & 1)
        out[:] = words[: len(out)]
        self._clear_padding(out)
        if not out.any():
            if not complete:
                raise MatchError("the grammar allows no token of this vocabulary here")
            return State.DONE
        if complete and may_end:
            self._set_ends(out, True)
        return State.MASKED

    def _clear_padding(self, out: Words) -> None:
        """Clear the bits behind the last token: the grammar's end, and what libraries leave there."""
        if spare := self._num_tokens % 32:
            out[-1] &= np.int32((1 << spare) - 1)

    def _set_ends(self, out: Words, allowed: bool) -> None:
        for token in self._ends:
            if allowed:
                out[token // 32] |= ~_without(token)
            else:
                out[token // 32] &= _without(token)


def _without(token: int) -> np.int32:
    """A word with all bits but that of a token."""
    return np.int32(~(1 << (token % 32)) if token % 32 < 31 else 0x7FFFFFFF)
