"""How many tokens each running row gets in the next step, under the token budget and the platform's limits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from octavo.config import SchedulerConfig
from octavo.engine.table import RequestTable, Rows
from octavo.plugin.data import ScheduleLimits
from octavo.plugin.step import Ints

Flags = NDArray[np.bool_]


class Kind(Enum):
    """Which rows a step may hold: with one token each (decodes), with many (prefills), or both."""

    ANY = 0
    ONE = 1
    MANY = 2


@dataclass(slots=True)
class Plan:
    """Rows with one token first. `steady`: every row has one token, its newest."""

    rows: Rows
    starts: Ints
    counts: Ints
    ends: Ints
    steady: bool


def plan_running(
    table: RequestTable, running: Rows, kind: Kind, config: SchedulerConfig, limits: ScheduleLimits
) -> Plan:
    """Share the token budget among running rows, best first; changes nothing.

    A row that waits for its last token, or whose whole prompt is in flight, wants nothing.
    """
    target, starts = table.target[running], table.scheduled[running]
    want = target - starts
    ready = target < table.view(running).limit
    rows, budget = running, config.max_num_batched_tokens
    simple = kind is not Kind.MANY and limits.max_batch_context_tokens is None and len(rows) <= budget
    if simple and np.count_nonzero(ready & (want == table.ones[: len(rows)])) == len(rows):
        return Plan(rows, starts, want, target, steady=True)

    ready &= want > 0
    rows, starts, want = rows[ready], starts[ready], want[ready]
    many = want > 1
    keep = np.ones(len(rows), np.bool_)
    if budget > 1:  # with a budget of one token all steps are decodes
        if kind is Kind.ONE:
            keep &= ~many
        if kind is Kind.MANY:
            keep &= many
    if limits.max_prefills_per_step is not None:
        keep &= ~many | (np.cumsum(many & keep) <= limits.max_prefills_per_step)
    if limits.max_batch_context_tokens is not None:
        keep &= many | _within_context(starts + 1, keep & ~many, limits.max_batch_context_tokens)
    order = np.argsort(many, kind="stable")
    order = order[keep[order]]
    rows, starts, want = rows[order], starts[order], want[order]
    counts = np.clip(budget - (np.cumsum(want) - want), 0, want).astype(np.int32)
    given = counts > (1 if kind is Kind.MANY and budget > 1 else 0)
    rows, starts, counts = rows[given], starts[given], counts[given]
    return Plan(rows, starts, counts, starts + counts, steady=False)


def _within_context(contexts: Ints, singles: Flags, cap: int) -> Flags:
    """Mark the leading singles for which (number of them) x (longest context) stays under the cap; at least one."""
    number = np.cumsum(singles)
    longest = np.maximum.accumulate(np.where(singles, contexts, 0))
    allowed: Flags = singles & ((number * longest <= cap) | (number == 1))
    return allowed


class Room:
    """What a plan leaves for new sequences."""

    def __init__(self, plan: Plan, kind: Kind, config: SchedulerConfig, limits: ScheduleLimits) -> None:
        self.budget = config.max_num_batched_tokens - int(plan.counts.sum())
        self._full_budget = config.max_num_batched_tokens
        self._may_cut = config.enable_chunked_prefill
        self._kind = kind if self._full_budget > 1 else Kind.ANY
        self._cap = limits.max_batch_context_tokens
        singles = plan.counts == 1
        self._num_singles = int(singles.sum())
        self._longest = int(plan.ends[singles].max(initial=0))
        self._prefills = len(plan.rows) - self._num_singles
        self._max_prefills = limits.max_prefills_per_step

    def offer(self, left: int, *, context: int) -> int:
        """Tokens that a sequence with `left` to compute up to length `context` may have now; 0 if it must wait."""
        count = min(left, self.budget)
        # A sequence longer than any step (a preempted one has grown) must be cut even where prompts are not.
        if count < left and not self._may_cut and not (left > self._full_budget == self.budget):
            return 0
        if count > 1:
            full = self._max_prefills is not None and self._prefills >= self._max_prefills
            return 0 if full or self._kind is Kind.ONE else count
        if self._kind is Kind.MANY:
            return 0
        longest = max(self._longest, context)
        if self._cap is not None and self._num_singles and (self._num_singles + 1) * longest > self._cap:
            return 0
        return count

    def take(self, count: int, *, context: int) -> None:
        """Note that a new sequence got `count` tokens."""
        self.budget -= count
        if count > 1:
            self._prefills += 1
        else:
            self._num_singles += 1
            self._longest = max(self._longest, context)
