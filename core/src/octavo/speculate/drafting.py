"""The drafter of an engine: asked for guesses, checked, and counted.

A drafter only makes a step longer, so one that fails is not worth a request: it is named in the log, with what it did,
and not asked again. Answers go on, one token a step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.engine.sequence import Sequence
from octavo.engine.table import RequestTable, Rows
from octavo.errors import ConfigError
from octavo.extensions import resolve
from octavo.plugin.drafter import Drafter, DrafterSpec, DraftInput
from octavo.plugin.step import Ints

log = logging.getLogger("octavo.speculate")


def make_drafter(method: str, spec: DrafterSpec, known: Mapping[str, str]) -> Drafter:
    """The drafter of that name, out of the registered ones (name -> target). Raises ConfigError."""
    if method not in known:
        raise ConfigError(
            f"speculative_config.method {method!r}: no drafter has that name; known: {', '.join(sorted(known))}. "
            "A package that registers it in the entry-point group 'octavo.extensions' would add it"
        )
    try:
        drafter: Drafter = resolve(known[method])(spec)
    except ValueError as error:
        raise ConfigError(f"speculative_config of method {method!r}: {error}") from error
    return drafter


@dataclass(slots=True)
class Text:
    """All tokens of a running sequence in one piece: tokens[:length] are known."""

    seq: Sequence
    tokens: Ints
    length: int


class Drafting:
    """One engine's drafter. num_tokens: most drafts of a sequence in one step.

    Counters, which only grow: num_drafts (sequences times steps), num_draft_tokens, accepted [num_tokens]: drafts that
    came true, by their place behind the last known token.
    """

    def __init__(self, drafter: Drafter, *, name: str, num_tokens: int, vocab_size: int) -> None:
        self.drafter: Drafter | None = drafter
        self.name = name
        self.num_tokens = num_tokens
        self.vocab_size = vocab_size
        self._texts: dict[int, Text] = {}
        self.num_drafts = self.num_draft_tokens = 0
        self.accepted = np.zeros(num_tokens, np.int64)

    @property
    def counters(self) -> dict[str, Any]:
        """Fields of `Stats`."""
        return {
            "spec_drafts": self.num_drafts,
            "spec_draft_tokens": self.num_draft_tokens,
            "spec_accepted": tuple(self.accepted.tolist()),
        }

    def propose(self, table: RequestTable, rows: Rows) -> Ints | None:
        """Drafts int32 [S, num_tokens] for rows whose newest token is known, -1 padded; None if there is none."""
        if self.drafter is None:
            return None
        most = np.clip(table.limit[rows] - table.known[rows] - 1, 0, self.num_tokens)
        drafts = np.full((len(rows), self.num_tokens), -1, np.int32)
        (asked,) = most.nonzero()
        if not len(asked):
            return None
        chosen = rows[asked]
        texts = [self._text(table, row) for row in chosen.tolist()]
        try:
            found = self.drafter.propose(DraftInput(rows=chosen.astype(np.int32), tokens=texts, most=most[asked]))
            self._check(found, most[asked])
        except Exception as error:
            self._give_up(error)
            return None
        drafts[asked, : found.shape[1]] = found[:, : self.num_tokens]
        return drafts if (drafts[:, 0] >= 0).any() else None

    def count(self, lengths: Ints, counts: Ints) -> None:
        """Note for n sequences how many drafts they had, and how many tokens came of it: 1 + those that were right."""
        self.num_drafts += len(lengths)
        self.num_draft_tokens += int(lengths.sum())
        self.accepted += (np.arange(1, self.num_tokens + 1) < counts[:, None]).sum(axis=0)

    def _text(self, table: RequestTable, row: int) -> Ints:
        """The known tokens of a row, read-only."""
        seq, known = table.sequence(row), int(table.known[row])
        text = self._texts.get(row)
        if text is None or text.seq is not seq or text.length > known:
            text = self._texts[row] = Text(seq, np.empty(seq.limit, np.int32), len(seq.prompt))
            text.tokens[: text.length] = seq.prompt
        num_prompt = len(seq.prompt)
        text.tokens[text.length : known] = table.outputs[row, text.length - num_prompt : known - num_prompt]
        text.length = known
        view = text.tokens[:known]
        view.setflags(write=False)
        return view

    def _check(self, found: object, most: Ints) -> None:
        """Raise ValueError for an answer that is none."""
        if not isinstance(found, np.ndarray) or found.ndim != 2 or found.dtype.kind not in "iu":
            what = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
            raise ValueError(f"it gave {what} instead of an array of integers [{len(most)}, k]")
        if len(found) != len(most):
            raise ValueError(f"it gave drafts of {len(found)} sequences for {len(most)}")
        given = found >= 0
        lengths = given.sum(axis=1)
        if (lengths > most).any():
            row = int((lengths > most).argmax())
            raise ValueError(f"it gave {lengths[row]} drafts where at most {most[row]} were asked for")
        if (given != (np.arange(found.shape[1]) < lengths[:, None])).any() or (found < -1).any():
            raise ValueError("behind the drafts of a sequence stands something other than -1")
        if (found >= self.vocab_size).any():
            raise ValueError(f"it gave token {found.max()}; the vocabulary has ids 0 to {self.vocab_size - 1}")

    def _give_up(self, error: Exception) -> None:
        log.error(
            "the drafter %r (%s) failed, and is not asked again: %s: %s. Answers go on without it, and do not change",
            self.name,
            type(self.drafter).__qualname__,
            type(error).__name__,
            error,
            exc_info=error,
        )
        self.drafter = None
        self._texts.clear()
