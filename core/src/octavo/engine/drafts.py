"""Drafts in a step: added to decodes when it is built, and what the model rejected taken back when it is done.

    positions   0 ......... known | drafts ....... |
    a step      computes known - 1 .. known - 1 + n, samples behind each of them
    its result  c tokens, 1 <= c <= 1 + n: keys and values of the first known - 1 + c positions are right

Blocks that were taken for rejected drafts stay with their sequence, which needs them a few tokens later. The prefix
cache hears only of tokens that are known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.engine.plan import Flags
from octavo.engine.roster import Roster
from octavo.engine.table import RequestTable, Rows
from octavo.plugin.step import Batch, BlockUpdate, Ints, StepResult
from octavo.speculate.drafting import Drafting


@dataclass(frozen=True, slots=True)
class Drafted:
    """order [S]: of a step's sequences: decodes, those with drafts, the others. In that order drafts [S, k], -1 padded,
    and lengths [S], how many of them. blocks: taken for them, one update per group."""

    order: NDArray[np.intp]
    drafts: Ints
    lengths: Ints
    blocks: list[BlockUpdate]


def add_drafts(
    drafting: Drafting, roster: Roster, rows: Rows, ends: Ints, singles: Flags, may: Flags, *, room: int
) -> Drafted | None:
    """Drafts for a step's sequences that may have some, at most `room` in all; None if there are none, or no blocks.

    rows, ends [S]: as for `Launched`; singles [S]: which compute one token; may [S]: which of these may have drafts.
    """
    (places,) = may.nonzero()
    if room <= 0 or not len(places) or (found := drafting.propose(roster.table, rows[places])) is None:
        return None
    lengths = (found >= 0).sum(axis=1, dtype=np.int32)
    lengths = np.clip(room - (np.cumsum(lengths) - lengths), 0, lengths).astype(np.int32)
    found[np.arange(found.shape[1]) >= lengths[:, None]] = -1
    need = roster.kv.need(rows[places], ends[places] + lengths)
    if not roster.kv.fits(need):
        return None
    drafts, every = np.full((len(rows), found.shape[1]), -1, np.int32), np.zeros(len(rows), np.int32)
    drafts[places], every[places] = found, lengths
    order = np.argsort(np.where(singles, every > 0, 2), kind="stable")
    return Drafted(order, drafts[order], every[order], roster.kv.extend(need))


def settle(drafting: Drafting, table: RequestTable, rows: Rows, ends: Ints, batch: Batch, result: StepResult) -> Ints:
    """What a step with drafts has computed for good: its ends [S] without what was rejected, noted in the table."""
    assert batch.drafts is not None, "a step without drafts is as it was scheduled"
    lengths = (batch.drafts >= 0).sum(axis=1, dtype=np.int32)
    counts = np.ones(len(rows), np.int32)
    counts[batch.samples] = result.counts
    ends = np.minimum(ends, ends - lengths + counts - 1)
    alive = table.alive[rows]
    table.scheduled[rows[alive]] = ends[alive]
    drafted = alive & (lengths > 0)
    drafting.count(lengths[drafted], counts[drafted])
    return ends
