"""An executor without a model: it says what a script says, and checks that the scheduler keeps the KV contract.

The token at position p is a function of the prompt and p alone, so recomputing, chunking, batching and run-ahead must
not change an answer. Memory is shadowed: each slot of a block holds the fingerprint of all tokens up to its position,
so reading a slot proves that it was computed, is the right position, and belongs to the same prefix and adapter.
Drafts are taken as the rest of what a row knows, and forgotten where the script says something else.
A step that ran ahead of a row's end computes nothing for it, as a device does that checks for stops itself.
A breach is an AssertionError that says which row and position. No torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.plugin.step import Admit, Batch, KVGroup, StepResult, TokenLogprobs

Script = Callable[[tuple[int, ...]], Sequence[int]] | Sequence[int]
DEFAULT_GROUPS = (KVGroup(block_size=16, num_blocks=256),)
PRIME = (1 << 61) - 1


@dataclass(slots=True)
class _Row:
    """What a worker keeps of a row. prints: fingerprint of each position's prefix; tables: one per group;
    done: positions computed; ended: the answer is over, which a device knows before the scheduler does."""

    admit: Admit
    script: Sequence[int]
    tokens: list[int]
    prints: list[int]
    tables: list[NDArray[np.int64]] = field(default_factory=list)
    done: int = 0
    ended: bool = False


class ScriptedExecutor:
    """Implements `ModelExecutor`.

    script: answer to every prompt, or a function of the prompt. Behind its end comes `eos` for ever.
    width: tokens a step samples for a row, or a function (step, row) -> that.
    delay: seconds that `collect` takes, as a device would.
    fail_at_step: `collect` raises RuntimeError for that step, once. fail_rows: step -> rows that fail alone in it.
    """

    def __init__(
        self,
        script: Script,
        *,
        width: int | Callable[[int, int], int] = 1,
        kv_groups: Sequence[KVGroup] = DEFAULT_GROUPS,
        vocab_size: int = 256,
        eos: int = 0,
        delay: float = 0.0,
        fail_at_step: int | None = None,
        fail_rows: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        self._script = script
        self._width = width
        self._groups = tuple(kv_groups)
        self._memory = [np.full(g.num_blocks * g.block_size, -1, np.int64) for g in self._groups]
        self._writer: list[dict[int, _Row]] = [{} for _ in self._groups]
        self.vocab_size = vocab_size
        self.eos = eos
        self.delay = delay
        self.fail_at_step = fail_at_step
        self.fail_rows = dict(fail_rows or {})
        self.batches: list[Batch] = []
        """Every batch launched, for tests to look at."""
        self._rows: dict[int, _Row] = {}
        self._results: deque[StepResult] = deque()
        self._last_step = 0
        self.closed = False

    @property
    def kv_groups(self) -> Sequence[KVGroup]:
        return self._groups

    @property
    def num_rows(self) -> int:
        """Rows that are admitted and not released."""
        return len(self._rows)

    def launch(self, batch: Batch) -> None:
        """Run the step at once; `collect` gives the result."""
        assert not self.closed, "the executor is closed"
        assert batch.step > self._last_step, f"step {batch.step} after step {self._last_step}"
        assert batch.num_seqs, f"step {batch.step} is empty"
        assert len(set(batch.rows.tolist())) == batch.num_seqs, f"step {batch.step} holds a row twice"
        assert (np.diff((batch.counts > 1).astype(int)) >= 0).all(), "sequences with one token go first"
        self._last_step = batch.step
        self.batches.append(batch)
        for row in batch.released:
            self._rows.pop(row, None)
        for admit in batch.admits:
            self._admit(admit)
        self._write_tables(batch)
        entries = list(zip(batch.rows.tolist(), batch.starts.tolist(), batch.counts.tolist(), strict=True))
        self._take_drafts(batch)
        self._compute([entry for entry in entries if not self._rows[entry[0]].ended])
        self._results.append(self._sample(batch, entries))

    def collect(self) -> StepResult:
        """The result of the oldest step launched."""
        assert self._results, "nothing was launched"
        result = self._results.popleft()
        if self.delay:
            time.sleep(self.delay)
        if result.step == self.fail_at_step:
            raise RuntimeError(f"scripted failure of step {result.step}")
        return result

    def close(self) -> None:
        self.closed = True

    def _admit(self, admit: Admit) -> None:
        assert admit.row not in self._rows, f"row {admit.row} is admitted twice"
        tokens = admit.token_ids.tolist()
        prompt = tuple(tokens[: admit.num_prompt_tokens])
        script = self._script(prompt) if callable(self._script) else self._script
        row = _Row(admit, script, tokens, [])
        for position in range(len(prompt), len(tokens)):
            expected = self._forced(row, position)
            assert tokens[position] == expected, f"row {admit.row} came back with a wrong token at {position}"
        _fingerprint(row)
        row.tables = [np.zeros(0, np.int64) for _ in self._groups]
        self._rows[admit.row] = row

    def _write_tables(self, batch: Batch) -> None:
        if not batch.blocks:
            return
        for group, (spec, update) in enumerate(zip(self._groups, batch.blocks, strict=True)):
            for number, index, block in zip(
                update.rows.tolist(), update.indices.tolist(), update.blocks.tolist(), strict=True
            ):
                assert 0 <= block < spec.num_blocks, f"block {block} of group {group} does not exist"
                tables = self._rows[number].tables
                if index >= len(tables[group]):
                    tables[group] = np.concatenate((tables[group], np.zeros(index + 8, np.int64)))
                tables[group][index] = block

    def _take_drafts(self, batch: Batch) -> None:
        """Stand drafts behind the known tokens, as if they were known."""
        lengths = _num_drafts(batch)
        kinds = np.where(np.array(lengths) > 0, 1, np.where(batch.counts > 1, 2, 0))
        assert (np.diff(kinds) >= 0).all(), "decodes, then those with drafts, then the others"
        for i, number in enumerate(batch.rows.tolist()):
            if not lengths[i]:
                continue
            assert batch.drafts is not None
            row, known = self._rows[number], int(batch.starts[i]) + 1
            assert batch.samples[i], f"row {number} has drafts, but is not sampled"
            assert len(row.tokens) == known, (
                f"row {number} has drafts behind {known} tokens, it knows {len(row.tokens)}"
            )
            assert batch.counts[i] == 1 + lengths[i], f"row {number} computes {batch.counts[i]} tokens"
            limit = row.admit.limit
            assert limit is None or known + lengths[i] < limit, f"row {number} has drafts behind its limit"
            row.tokens += batch.drafts[i, : lengths[i]].tolist()
            _fingerprint(row)

    def _compute(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Write all new positions, then read all that is visible, as layers of one forward pass do."""
        for group, (spec, memory) in enumerate(zip(self._groups, self._memory, strict=True)):
            written: dict[int, int] = {}
            for number, start, count in entries:
                row = self._rows[number]
                assert count >= 1, f"row {number} computes {count} tokens"
                assert start + count <= len(row.tokens), f"row {number} computes tokens that nobody knows yet"
                for index in range(start // spec.block_size, (start + count - 1) // spec.block_size + 1):
                    block = int(row.tables[group][index]) if index < len(row.tables[group]) else 0
                    assert block, f"row {number} has no block for position {index * spec.block_size}"
                    other = written.setdefault(block, number)
                    assert other == number, f"rows {other} and {number} write block {block} in one step"
                    self._check_owner(group, block, row)
                    self._writer[group][block] = row
                memory[_slots(row, group, spec, start, start + count)] = row.prints[start : start + count]
            for number, start, count in entries:
                row = self._rows[number]
                first = 0 if spec.window is None else max(0, start - spec.window + 1)
                seen = memory[_slots(row, group, spec, first, start + count)]
                wrong = np.flatnonzero(seen != np.array(row.prints[first : start + count]))
                assert not len(wrong), f"row {number} reads wrong memory at position {first + int(wrong[0])}"
        for number, start, count in entries:
            self._rows[number].done = start + count

    def _check_owner(self, group: int, block: int, row: _Row) -> None:
        """A block that somebody else wrote may only be written again once that row no longer needs it."""
        owner = self._writer[group].get(block)
        if owner is None or owner is row or self._rows.get(owner.admit.row) is not owner:
            return
        spec = self._groups[group]
        first = 0 if spec.window is None else max(0, owner.done - spec.window + 1)
        needed = owner.tables[group][first // spec.block_size :]
        assert block not in needed, f"row {row.admit.row} overwrites block {block}, which row {owner.admit.row} needs"

    def _sample(self, batch: Batch, entries: Sequence[tuple[int, int, int]]) -> StepResult:
        failing = {row for row in self.fail_rows.get(batch.step, ()) if row in batch.rows}
        sampled: list[tuple[int, list[int]]] = []
        logprobs, prompt_logprobs = [], []
        for (number, start, count), samples, length in zip(
            entries, batch.samples.tolist(), _num_drafts(batch), strict=True
        ):
            row, end = self._rows[number], start + count - length
            params = row.admit.params
            if params.prompt_logprobs is not None:
                scored = range(start + 1, min(end + 1, row.admit.num_prompt_tokens))
                if scored:
                    prompt_logprobs.append(self._logprobs(row, scored, params.prompt_logprobs))
            if not samples:
                continue
            width = self._width(batch.step, number) if callable(self._width) else self._width
            if length:  # as many as agree, and one more
                width = 1
                while width <= length and row.tokens[end + width - 1] == self._forced(row, end + width - 1):
                    width += 1
                del row.tokens[end:], row.prints[end:]
                row.done = start + width
            tokens = [self._forced(row, position) for position in range(end, end + width)]
            row.tokens[end : end + width] = tokens
            _fingerprint(row)
            row.ended |= number in failing or any(self._ends(row, end + i, token) for i, token in enumerate(tokens))
            sampled.append((number, tokens))
            if params.logprobs is not None:
                logprobs.append(self._logprobs(row, range(end, end + width), params.logprobs))
        widest = max((len(tokens) for _, tokens in sampled), default=1)
        return StepResult(
            step=batch.step,
            rows=np.array([number for number, _ in sampled], np.int32),
            tokens=np.array([t + [-1] * (widest - len(t)) for _, t in sampled], np.int32).reshape(-1, widest),
            counts=np.array([len(tokens) for _, tokens in sampled], np.int32),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            errors={row: f"scripted failure of row {row}" for row in failing},
        )

    def _ends(self, row: _Row, position: int, token: int) -> bool:
        """Whether a sampled token is the last of its row's answer."""
        admit = row.admit
        full = admit.limit is not None and position + 1 >= admit.limit
        return full or (token in admit.stop_ids and position >= admit.num_prompt_tokens + admit.params.min_tokens)

    def _forced(self, row: _Row, position: int) -> int:
        index = position - row.admit.num_prompt_tokens
        return int(row.script[index]) if index < len(row.script) else self.eos

    def _logprobs(self, row: _Row, positions: range, top: int) -> TokenLogprobs:
        """Made up: the actual token is the most likely one, the others follow it in id order."""
        width = self.vocab_size if top < 0 else top
        actual = np.array([row.tokens[p] for p in positions], np.int32)
        others = (actual[:, None] + np.arange(width, dtype=np.int32)) % self.vocab_size
        best = -0.1 - (np.array(positions) % 7) / 64
        values = np.concatenate((best[:, None], best[:, None] - np.arange(width)), axis=1)
        return TokenLogprobs(
            row=row.admit.row,
            start=positions[0],
            ids=np.concatenate((actual[:, None], others), axis=1).astype(np.int32),
            values=values.astype(np.float32),
            ranks=np.ones(len(positions), np.int32),
        )


def _num_drafts(batch: Batch) -> list[int]:
    """Of each sequence."""
    return [0] * batch.num_seqs if batch.drafts is None else (batch.drafts >= 0).sum(axis=1).tolist()


def _fingerprint(row: _Row) -> None:
    """Bring `prints` up to date with `tokens`."""
    last = row.prints[-1] if row.prints else 7919 * (row.admit.lora + 1)
    for token in row.tokens[len(row.prints) :]:
        last = (last * 1000003 + token + 1) % PRIME
        row.prints.append(last)


def _slots(row: _Row, group: int, spec: KVGroup, start: int, end: int) -> NDArray[np.int64]:
    """Memory slots of positions start .. end - 1."""
    positions = np.arange(start, end)
    slots: NDArray[np.int64] = row.tables[group][positions // spec.block_size] * spec.block_size
    return slots + positions % spec.block_size
