"""Who waits, who runs, who leaves: every move of a sequence between its states.

enter           admit             end                            bury
------> waiting -----> running  ------> leaving (step in flight) ------> gone
           ^              |        \\___________________________________/
           |___ preempt __|              at once if nothing is in flight

Further answers to a prompt are held in the queue until the first one has computed it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.kv import KVTables
from octavo.engine.messages import Submit
from octavo.engine.prefix_cache import Match
from octavo.engine.queue import WaitingQueue
from octavo.engine.sequence import Sequence, open_sequence
from octavo.engine.table import RequestTable, Rows
from octavo.errors import EngineError, RequestError
from octavo.plugin.step import KVGroup


class Roster:
    """All live sequences, their rows and their blocks."""

    def __init__(
        self, groups: Many[KVGroup], *, cache: CacheConfig, scheduler: SchedulerConfig, max_model_len: int
    ) -> None:
        self.max_model_len = max_model_len
        self.max_queue = scheduler.max_queue
        self.max_prompt = None if scheduler.enable_chunked_prefill else scheduler.max_num_batched_tokens
        self.by_priority = scheduler.policy == "priority"
        self.table = RequestTable(scheduler.max_num_seqs)
        self.kv = KVTables(
            groups,
            num_rows=scheduler.max_num_seqs,
            max_model_len=max_model_len,
            max_chunk=scheduler.max_num_batched_tokens,
            caching=cache.enable_prefix_caching,
        )
        self.waiting = WaitingQueue(by_priority=self.by_priority)
        self.running: Rows = np.empty(0, np.intp)
        """Rows, first served first: the last one is preempted first. Replaced, never changed in place."""
        self.filling: set[int] = set()
        """Rows whose known tokens are not all scheduled yet."""
        self.watched: set[int] = set()
        """Rows whose answers end when they repeat themselves."""
        self.live: dict[tuple[int, int], Sequence] = {}
        self.leaving: dict[int, bool] = {}
        """Ended rows in a step in flight -> whether their blocks may be published."""
        self.done_step = 0
        self.num_arrived = 0
        self.num_preempted = 0

    def enter(self, request: Submit) -> None:
        """Queue a request. Raises RequestError if it is wrong, EngineError if the queue is full."""
        key = (request.client, request.handle)
        if key in self.live:
            raise RequestError(f"handle {request.handle} is still in use: choose another", field="handle")
        if self.max_queue is not None and len(self.waiting) >= self.max_queue:
            raise EngineError(f"{len(self.waiting)} requests are waiting already: try again later")
        seq = open_sequence(
            request, arrival=self.num_arrived, max_model_len=self.max_model_len, max_prompt=self.max_prompt
        )
        self.kv.check_fits(seq)
        self.num_arrived += 1
        self.live[key] = seq
        leader = self.live.get((request.client, request.leader)) if request.leader else None
        if leader and not leader.prompt_done and seq.uses_cache and self.kv.shareable(len(seq.prompt)):
            self.waiting.hold(seq, leader)
        else:
            self.waiting.push(seq)

    def prompt_done(self, seq: Sequence) -> None:
        """Note that a whole prompt is computed and published: those that share it may start."""
        seq.prompt_done = True
        self.waiting.let_go(seq)

    def admit(self, seq: Sequence, match: Match) -> int:
        """Give the head of the queue a row."""
        self.waiting.pop()
        if not seq.started:
            seq.started = True
            seq.cached = match.length
        row = self.table.admit(seq, num_cached=match.length)
        self.filling.add(row)
        if seq.repetition is not None:
            self.watched.add(row)
        at = len(self.running)
        while self.by_priority and at and self._rank(int(self.running[at - 1])) > self._rank(row):
            at -= 1
        self.running = np.insert(self.running, at, row)
        return row

    def _rank(self, row: int) -> tuple[int, int]:
        seq = self.table.sequence(row)
        return seq.submit.priority, seq.arrival

    def preempt_last(self) -> None:
        """Put the last running sequence back into the queue. Needs all its tokens known: nothing in flight."""
        row = int(self.running[-1])
        seq = self.table.sequence(row)
        assert self.table.last_step[row] <= self.done_step, "a row in flight cannot be preempted"
        seq.output = self.table.output_of(row)
        self.running = self.running[:-1]
        self._vacate(row, publish=True)
        self.waiting.push(seq)
        self.num_preempted += 1

    def end(self, seq: Sequence, *, publish: bool = True) -> None:
        """End a sequence in any state; call `drop_ended` after. A row in flight is kept until that is collected."""
        del self.live[seq.submit.client, seq.submit.handle]
        self.waiting.let_go(seq)
        if seq.row < 0:
            self.waiting.remove(seq)
            return
        row = seq.row
        seq.ended = True
        self.table.alive[row] = False
        if self.table.last_step[row] > self.done_step:
            self.leaving[row] = publish
        else:
            self._vacate(row, publish=publish)

    def drop_ended(self) -> None:
        """Take ended rows out of `running`."""
        self.running = self.running[self.table.alive[self.running]]

    def bury(self) -> None:
        """Free the rows and blocks of ended sequences that are in no step any more."""
        for row in [row for row in self.leaving if self.table.last_step[row] <= self.done_step]:
            self._vacate(row, publish=self.leaving.pop(row))

    def publish(self, row: int) -> None:
        """Let prefixes find what a row has computed of its known tokens."""
        seq, table = self.table.sequence(row), self.table
        valid = int(min(table.computed[row], table.known[row]))
        self.kv.publish(seq, np.concatenate((seq.prompt, table.output_of(row))), valid)

    def _vacate(self, row: int, *, publish: bool) -> None:
        if publish:
            self.publish(row)
        self.filling.discard(row)
        self.watched.discard(row)
        self.kv.clear(row)
        self.table.release(row)
