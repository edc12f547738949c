"""Where a step with drafts samples, and what of it counts. No torch.

A sequence that knows tokens .. c and has the drafts d1 d2 is computed from c on, and sampled behind each of the three:

    token      c   d1  d2
    sampled    t0  t1  t2      t0 counts; t1 counts if t0 = d1; t2 if t1 = d2 too
    expected   d1  d2  -1
    before     0   1   2

A sampled token is a function of the tokens before it, the seed and the position. So what counts is what the model would
have said step by step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.plugin.step import Batch, Ints

Longs = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Places:
    """N places of M sequences that sample, those of a sequence side by side.

    at [N]: tokens of the step; rows int32 [N]; positions [N]: of the sampled tokens; expected [N]: the draft at that
    position, -1 behind a sequence's last; before [N]: drafts of the sequence that stand before. drafts int32 [M, k].
    """

    at: Longs
    rows: Ints
    positions: Longs
    expected: Longs
    before: Longs
    drafts: Ints

    @classmethod
    def of(cls, batch: Batch) -> Places:
        """The places of a batch that has drafts."""
        assert batch.drafts is not None, "the batch has no drafts"
        sampling = np.flatnonzero(batch.samples)
        drafts = batch.drafts[sampling]
        sizes = 1 + (drafts >= 0).sum(axis=1)
        before = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        # Counted from the sequence's last token, behind which its last place is.
        left = np.repeat(sizes, sizes) - 1 - before
        last, rows, ends = np.cumsum(batch.counts)[sampling] - 1, batch.rows[sampling], (batch.starts + batch.counts)
        padded = np.concatenate((drafts, np.full((len(drafts), 1), -1, np.int32)), axis=1)
        return cls(
            at=np.repeat(last, sizes) - left,
            rows=np.repeat(rows, sizes),
            positions=(np.repeat(ends[sampling], sizes) - left).astype(np.int64),
            expected=padded[np.arange(padded.shape[1]) < sizes[:, None]].astype(np.int64),
            before=before,
            drafts=drafts,
        )

    @property
    def firsts(self) -> Longs:
        """[N]: the first place of each place's sequence."""
        return np.arange(len(self.before)) - self.before

    @property
    def owners(self) -> Longs:
        """[N]: which of the M sequences a place belongs to."""
        return np.cumsum(self.before == 0) - 1

    def history(self, places: Longs) -> tuple[Longs, Longs]:
        """The drafts before some places [m]: which of the m (int64 [h]), and their ids (int64 [h])."""
        sizes = self.before[places]
        index = np.repeat(np.arange(len(places)), sizes)
        offset = np.arange(len(index)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return index, self.expected[self.firsts[places][index] + offset]

    def accepted(self, tokens: Ints) -> tuple[Ints, Ints]:
        """Sampled tokens [N] by sequence, as `StepResult` has them: tokens [M, 1 + k], -1 padded; counts [M]."""
        table = np.full((len(self.drafts), self.drafts.shape[1] + 1), -1, np.int32)
        table[self.owners, self.before] = tokens
        counts = accepted_counts(table, self.drafts)
        table[np.arange(table.shape[1]) >= counts[:, None]] = -1
        return table, counts


def accepted_counts(tokens: Ints, drafts: Ints) -> Ints:
    """How many of the tokens [M, 1 + k] sampled behind drafts [M, k] (-1 padded) count: 1 + the drafts they agree with,
    up to the first other one."""
    right = (tokens[:, :-1] == drafts) & (drafts >= 0)
    counts: Ints = (1 + np.logical_and.accumulate(right, axis=1).sum(axis=1)).astype(np.int32)
    return counts
