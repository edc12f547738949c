"""Decides what the next step computes, and takes in what the last one gave.

One notion, no phases: give each sequence n more tokens. A row wants `target - scheduled` of them; that is 1 for a
decode, a chunk for a prompt, a long one for a sequence that was preempted. Under a token budget decodes go first, then
started prompts, then new sequences.

Memory short: the last of `running` (newest, or of least priority) gives its blocks back and waits to be recomputed.
That is only done with no step in flight, when every token is known; `schedule` returns None to ask for that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from octavo.config import CacheConfig, SchedulerConfig
from octavo.engine.accept import Accepted, accept, end_repetitions
from octavo.engine.drafts import Drafted, add_drafts, settle
from octavo.engine.kv import join_updates
from octavo.engine.messages import Failure, Finish, LogprobBlock, Stats
from octavo.engine.outbox import Outbox, Progress
from octavo.engine.plan import Flags, Kind, Plan, Room, plan_running
from octavo.engine.roster import Roster
from octavo.engine.sequence import Sequence
from octavo.engine.shapes import Grammars, Shapes
from octavo.engine.table import NEVER, Rows
from octavo.plugin.data import ScheduleLimits
from octavo.plugin.step import Admit, Batch, BlockUpdate, Ints, KVGroup, Masks, StepResult, TokenLogprobs
from octavo.speculate.drafting import Drafting


@dataclass(slots=True)
class Launched:
    """A batch on its way. rows [S]: as in the batch; ends [S]: positions that they will have; prompts: rows that
    compute known tokens; most: rows of which only so many of the step's tokens count."""

    batch: Batch
    rows: Rows
    ends: Ints
    prompts: tuple[int, ...]
    most: dict[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """A sequence admitted to the batch being built."""

    admit: Admit
    start: int
    count: int
    blocks: list[BlockUpdate]


class Scheduler:
    """Turns the roster into batches and results into progress. Knows nothing of devices, text or processes."""

    def __init__(
        self,
        groups: Many[KVGroup],
        *,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        limits: ScheduleLimits,
        max_model_len: int,
        grammars: Grammars | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.shapes = Shapes(grammars)
        self.drafting = drafting
        self.config = scheduler
        self.limits = limits
        self.roster = Roster(groups, cache=cache, scheduler=scheduler, max_model_len=max_model_len)
        self.outbox = Outbox()
        self.step = 0
        self._decode_turn = False
        self._prefix_queries = self._prefix_hits = 0
        self._prompt_tokens = self._generation_tokens = self._aborts = 0

    def schedule(self, *, in_flight: bool) -> Launched | None:
        """The next batch; None if there is nothing to do, or nothing until the step in flight is collected."""
        roster = self.roster
        if roster.by_priority and not self._make_room(in_flight):
            return None
        for kind in self._kinds():
            while True:
                plan = plan_running(roster.table, roster.running, kind, self.config, self.limits)
                need = roster.kv.need(plan.rows, plan.ends, single=plan.steady)
                if roster.kv.fits(need):
                    break
                if in_flight:
                    return None
                roster.preempt_last()
            entries = [updates] if (updates := roster.kv.extend(need)) else []
            starts = self._admit(plan, kind) if len(roster.waiting) else []
            if len(plan.rows) or starts:
                self._decode_turn = kind is Kind.MANY
                return self._launch(plan, starts, entries + [start.blocks for start in starts])
        return None

    def update(self, launched: Launched, result: StepResult) -> None:
        """Take in the result of the oldest batch in flight; what clients must learn goes to the outbox."""
        roster, table = self.roster, self.roster.table
        roster.done_step = launched.batch.step
        if launched.batch.drafts is not None:
            result = self._settle(launched, result)
        self._confirm(launched)
        for row in launched.prompts:
            if table.alive[row] and row not in result.errors:
                roster.publish(row)
                if table.computed[row] >= table.prompt[row]:
                    roster.prompt_done(table.sequence(row))
        roster.kv.pass_windows(launched.rows, launched.ends)
        for row, message in result.errors.items():
            if table.alive[row]:
                self._fail(table.sequence(row), message)
            elif row in roster.leaving:
                roster.leaving[row] = False
        same = launched.batch.drafts is None and result.rows.tobytes() == launched.batch.rows.tobytes()
        rows = launched.rows if same else result.rows.astype(np.intp)
        # Behind drafts comes the first token that is not known: they wait for all steps before.
        first = launched.ends if same else (table.computed if launched.batch.drafts is None else table.known)[rows]
        tokens, counts = result.tokens, result.counts
        if roster.leaving or result.errors:
            alive = table.alive[rows]
            rows, first, tokens, counts = rows[alive], first[alive], tokens[alive], counts[alive]
        for block in result.prompt_logprobs:
            self._prompt_logprobs(block)
        if len(rows):
            accepted = accept(table, rows, first, tokens, counts)
            if roster.watched:
                accepted = end_repetitions(table, roster.watched, rows, accepted)
            self._progress(rows, accepted, result.logprobs)
        for row in launched.prompts:
            if table.alive[row] and not table.samples[row] and table.computed[row] == table.prompt[row]:
                self._finish(table.sequence(row), Finish.LENGTH)
        if roster.leaving or result.errors or len(table.released):
            roster.bury()
            roster.drop_ended()

    def masks(self, launched: Launched) -> Masks:
        """What a masked batch may sample, once all steps before it are taken in. Ends answers that are whole."""
        batch = launched.batch
        drafts = None if batch.drafts is None else batch.drafts[batch.samples]
        verdict = self.shapes.masks(self.roster, self.step, launched.rows[batch.samples], drafts)
        for row in verdict.done:
            self._finish(self.roster.table.sequence(row), Finish.COMPLETE)
        for row, message in verdict.errors.items():
            self._fail(self.roster.table.sequence(row), message)
        if verdict.done or verdict.errors:
            self.roster.drop_ended()
        launched.most = verdict.most
        return verdict.masks

    def _settle(self, launched: Launched, result: StepResult) -> StepResult:
        """Take back what is computed behind drafts that turned out wrong, and tokens that are none of an answer's."""
        assert self.drafting is not None, "only a drafter makes drafts"
        if launched.most:
            most = [launched.most.get(row, NEVER) for row in result.rows.tolist()]
            result = replace(result, counts=np.minimum(result.counts, np.array(most, np.int32)))
        launched.ends = settle(self.drafting, self.roster.table, launched.rows, launched.ends, launched.batch, result)
        return result

    def _confirm(self, launched: Launched) -> None:
        """Note what a step has computed. Nothing of a row that an earlier step ended: an executor that learnt of the
        end in time has not written its keys and values."""
        rows, ends = launched.rows, launched.ends
        if self.roster.leaving:
            alive = self.roster.table.alive[rows]
            rows, ends = rows[alive], ends[alive]
        self.roster.table.computed[rows] = ends

    def abort(self, client: int, handle: int, finish: Finish) -> None:
        """End a sequence in whatever state it is; a handle that is not known has ended already."""
        seq = self.roster.live.get((client, handle))
        if seq is not None:
            self._aborts += finish is Finish.ABORT
            self._finish(seq, finish)
            self.roster.drop_ended()

    def abort_all(self) -> None:
        """End every sequence as aborted."""
        self.shapes.abort_all(self.outbox)
        for client, handle in list(self.roster.live):
            self.abort(client, handle, Finish.ABORT)

    def forget_memory(self) -> None:
        """The executor that held the keys and values is gone. Needs all sequences ended and no step in flight."""
        assert not self.roster.live, "live sequences have keys and values"
        self.roster.kv.forget_unused()
        self.roster.table.released = []  # the next executor knows no rows

    @property
    def kv_sizes(self) -> list[tuple[int, int]]:
        """(block size, number of blocks) of each KV group."""
        return [(group.block_size, group.num_blocks) for group in self.roster.kv.groups]

    def fail_all(self, message: str) -> None:
        """End everything as failed, and forget the steps in flight."""
        self.shapes.fail_all(self.outbox, message)
        for seq in list(self.roster.live.values()):
            self._fail(seq, message)
        self.roster.leaving = dict.fromkeys(self.roster.leaving, False)
        self.roster.done_step = self.step
        self.roster.bury()
        self.roster.drop_ended()

    @property
    def stats(self) -> Stats:
        roster = self.roster
        stats = Stats(
            running=len(roster.running),
            waiting=len(roster.waiting) + self.shapes.num_preparing,
            kv_usage=roster.kv.usage,
            free_blocks=roster.kv.num_free,
            steps=self.step,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=roster.num_preempted,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            aborts=self._aborts,
            grammars=self.shapes.num_compiled,
            grammar_seconds=self.shapes.compile_seconds,
        )
        return stats if self.drafting is None else msgspec.structs.replace(stats, **self.drafting.counters)

    # ---- building a batch --------------------------------------------------------------------------------------

    def _kinds(self) -> tuple[Kind, ...]:
        """Which rows a step may hold, in the order to try: by turns if the platform cannot mix them."""
        if self.limits.mix_prefill_decode:
            return (Kind.ANY,)
        return (Kind.ONE, Kind.MANY) if self._decode_turn else (Kind.MANY, Kind.ONE)

    def _make_room(self, in_flight: bool) -> bool:
        """Preempt for a waiting sequence of higher priority that lacks memory. False: collect first."""
        roster = self.roster
        while (head := roster.waiting.head()) and len(roster.running):
            worst = roster.table.sequence(int(roster.running[-1]))
            if worst.submit.priority <= head.submit.priority:
                break
            match = roster.kv.match(head)
            if roster.kv.admissible(match, num_tokens=head.num_tokens, spare=len(roster.running)):
                break
            if in_flight:
                return False
            roster.preempt_last()
        return True

    def _admit(self, plan: Plan, kind: Kind) -> list[Start]:
        """Start waiting sequences while there is room."""
        roster = self.roster
        started: list[Start] = []
        room = Room(plan, kind, self.config, self.limits)
        while room.budget and roster.table.free_rows and (seq := roster.waiting.head()):
            # One free block for each running sequence: else one of them is soon put out again.
            spare = len(roster.running)
            if roster.kv.least_free <= spare:
                break
            match = roster.kv.match(seq)
            count = room.offer(seq.num_tokens - match.length, context=seq.num_tokens)
            if not count or not roster.kv.admissible(match, num_tokens=seq.num_tokens, spare=spare):
                break
            end = match.length + count
            room.take(count, context=end)
            if not seq.started:
                self.outbox.admitted(seq.submit.client, seq.submit.handle, time.monotonic())
                self._prompt_tokens += len(seq.prompt)
                if roster.kv.caching and seq.uses_cache:
                    self._prefix_queries += len(seq.prompt)
                    self._prefix_hits += match.length
            row = roster.admit(seq, match)
            admit = Admit(
                row=row,
                token_ids=seq.tokens,
                num_prompt_tokens=len(seq.prompt),
                params=seq.submit.params,
                seed=seq.submit.seed,
                lora=seq.submit.lora,
                stop_ids=seq.submit.eos,
                limit=seq.limit,
            )
            started.append(Start(admit, match.length, count, roster.kv.attach(row, match, end)))
        return started

    def _launch(self, plan: Plan, started: list[Start], entries: list[list[BlockUpdate]]) -> Launched:
        table, filling = self.roster.table, self.roster.filling
        rows, starts, counts, ends = plan.rows, plan.starts, plan.counts, plan.ends
        prompts: tuple[int, ...] = ()
        if plan.steady and not filling:
            samples = table.all[: len(rows)]
            table.target[rows] = ends + 1
        else:
            rows = np.concatenate((rows, np.array([s.admit.row for s in started], np.intp)))
            starts = np.concatenate((starts, np.array([s.start for s in started], np.int32)))
            counts = np.concatenate((counts, np.array([s.count for s in started], np.int32)))
            order = np.argsort(counts > 1, kind="stable")
            rows, starts, counts = rows[order], starts[order], counts[order]
            ends = starts + counts
            whole = ends == table.target[rows]
            samples = whole & table.samples[rows]
            table.target[rows[samples]] += 1
            prompts = tuple(row for row in rows.tolist() if row in filling)
            filling.difference_update(rows[whole].tolist())
        drafts = None
        if self.drafting is not None and (drafted := self._draft(rows, counts, ends, samples)):
            order, drafts = drafted.order, drafted.drafts
            rows, starts, samples = rows[order], starts[order], samples[order]
            counts = counts[order] + drafted.lengths
            ends = starts + counts
            entries = [*entries, drafted.blocks] if drafted.blocks else entries
        self.step += 1
        table.scheduled[rows] = ends
        table.last_step[rows] = self.step
        released, table.released = table.released, []
        batch = Batch(
            step=self.step,
            rows=table.view(rows).rows32,
            starts=starts,
            counts=counts,
            samples=samples,
            admits=[start.admit for start in started],
            blocks=join_updates(entries),
            released=released,
            drafts=drafts,
            masked=self.shapes.holds(table, rows[samples]) if self.shapes else False,
        )
        return Launched(batch, rows, ends, prompts)

    def _draft(self, rows: Rows, counts: Ints, ends: Ints, samples: Flags) -> Drafted | None:
        """Drafts for decodes, out of the tokens and blocks that the step has left: they are in nobody's way."""
        assert self.drafting is not None
        table, singles, cap = self.roster.table, counts == 1, self.limits.max_batch_context_tokens
        if cap is not None and singles.sum() * (ends[singles].max(initial=0) + self.drafting.num_tokens) > cap:
            return None
        may = singles & samples & (table.known[rows] == ends) & table.draftable[rows]
        if self.shapes:
            may &= self.shapes.may_end(table, rows)
        room = self.config.max_num_batched_tokens - int(counts.sum())
        return add_drafts(self.drafting, self.roster, rows, ends, singles, may, room=room)

    # ---- taking in a result ------------------------------------------------------------------------------------

    def _progress(self, rows: Rows, accepted: Accepted, logprobs: Many[TokenLogprobs]) -> None:
        table = self.roster.table
        if self.shapes:
            self.shapes.note(table, rows, accepted.counts, accepted.tokens)
        self._generation_tokens += len(accepted.tokens)
        view = table.view(rows)
        progress = Progress(
            view.client, view.clients, view.handles, accepted.counts, accepted.finish, view.cached, accepted.tokens
        )
        self.outbox.progress(progress)
        for block in logprobs:
            (at,) = np.nonzero(rows == block.row)
            if len(at) and accepted.counts[at[0]]:
                self._send(block, False, int(accepted.skipped[at[0]]), int(accepted.counts[at[0]]))
        if accepted.any_ended:
            for row in rows[accepted.finish > 0].tolist():
                self.roster.end(table.sequence(row))

    def _prompt_logprobs(self, block: TokenLogprobs) -> None:
        if not self.roster.table.alive[block.row]:
            return
        seq = self.roster.table.sequence(block.row)
        skip = max(seq.next_prompt_logprob - block.start, 0)
        if skip < len(block.ranks):
            self._send(block, True, skip, len(block.ranks) - skip)
            seq.next_prompt_logprob = block.start + len(block.ranks)

    def _send(self, block: TokenLogprobs, prompt: bool, skip: int, count: int) -> None:
        submit = self.roster.table.sequence(block.row).submit
        part = slice(skip, skip + count)
        message = LogprobBlock(
            handle=submit.handle,
            prompt=prompt,
            start=block.start + skip,
            width=block.ids.shape[1],
            ids=np.ascontiguousarray(block.ids[part], "<i4").tobytes(),
            values=np.ascontiguousarray(block.values[part], "<f4").tobytes(),
            ranks=np.ascontiguousarray(block.ranks[part], "<i4").tobytes(),
        )
        self.outbox.logprobs(submit.client, message)

    def _finish(self, seq: Sequence, finish: Finish) -> None:
        """End a sequence without a token."""
        self.outbox.ended(seq.submit.client, seq.submit.handle, finish, cached=seq.cached)
        self.roster.end(seq)

    def _fail(self, seq: Sequence, message: str) -> None:
        """End a sequence through no fault of its own; what it computed is not trusted."""
        submit = seq.submit
        self.outbox.ended(submit.client, submit.handle, Finish.ERROR, cached=seq.cached)
        self.outbox.failure(submit.client, Failure(handle=submit.handle, message=message))
        self.roster.end(seq, publish=False)
