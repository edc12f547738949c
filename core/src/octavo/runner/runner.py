"""The model runner: one for all platforms. A `Batch` in, a `StepResult` out.

    launch: table <- what changed | inputs -> ids, slots -> attention plans -> model -> logits -> sampler -> table
    collect: wait for the oldest launched step and bring its tokens to the host

Where the platform captures, everything from the ids to the plain choice of tokens is one recorded step per shape; rows
that ask for more than a plain choice (filters, penalties, masks, logprobs) are sampled from its logits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.layers.context import BuildContext, StepState
from octavo.models.registry import Model
from octavo.plugin.contracts import AttnBatch, BatchKey, Event, GraphRunner, KVView
from octavo.plugin.step import Batch, KVGroup, StepResult, TokenLogprobs
from octavo.plugin.torch import HOST
from octavo.runner.buckets import Shapes
from octavo.runner.inputs import InputBuffers, RequestTable, StepInputs
from octavo.runner.scoring import PromptScorer
from octavo.sampling.sampler import OPS, Sampled, Sampler


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a step leaves on the device: hidden [T, hidden], logits float32 [N, V], tokens int64 [N] (plain choice)."""

    hidden: Tensor
    logits: Tensor
    tokens: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A launched step: what `collect` has to wait for and turn into numpy. Once done, its tokens are on the host."""

    batch: Batch
    sampled: Sampled
    prompt_logprobs: list[tuple[int, int, Tensor, Tensor, Tensor]]
    done: Event


@dataclass(frozen=True, kw_only=True)
class Captured:
    """One recorded shape: its handle, the attention batches and plans that replays reuse."""

    handle: Any
    attention: list[tuple[Tensor, Tensor]]


@dataclass
class ModelRunner:
    """Implements `octavo.plugin.ModelExecutor`.

    ctx: what the model was built with. kv: one view per layer. kv_groups: one per KV spec, in `ctx.attention` order.
    """

    model: Model
    ctx: BuildContext
    kv: Sequence[KVView]
    kv_groups: Sequence[KVGroup]
    shapes: Shapes
    graph: GraphRunner
    pending: deque[Pending] = field(default_factory=deque)

    def __post_init__(self) -> None:
        device, limits = self.ctx.device, self.shapes.limits
        self.table = RequestTable(limits, self.kv_groups, device)
        static = self.shapes.buckets is not None or bool(self.shapes.captured)
        self.buffers = InputBuffers(
            self.shapes.max_tokens,
            self.shapes.max_seqs,
            device,
            scratch_row=self.table.scratch,
            pad_samples=static,
        )
        ops: dict[str, Callable[..., Any]] = {name: self.ctx.op(name) for name in OPS}
        self.sampler = Sampler(ops, self.table.tokens, self.model.vocab_size, device.torch_device)
        self.scorer = PromptScorer(self.model, ops["topk_logprobs"], self.table.tokens)
        self.gather_tokens = self.ctx.op("gather_tokens")
        self.slot_mapping = self.ctx.op("slot_mapping")
        self.captured: dict[BatchKey, Captured] = {}
        self.max_context_blocks = [table.shape[1] for table in self.table.blocks]

    # -- the step --

    def launch(self, batch: Batch) -> None:
        """Start a step; returns as soon as its work is queued on the device."""
        assert batch.drafts is None, "no drafter is configured, yet the batch holds drafts"
        with self.ctx.device.inference():
            for row in batch.released:
                self.sampler.release(row)
                self.scorer.release(row)
            self.table.admit(batch.admits)
            self.sampler.admit(batch.admits)
            for admit in batch.admits:
                self.scorer.admit(admit)
            self.table.update(batch.blocks)
            max_context = int((batch.starts + batch.counts).max())
            key, captured = self.shapes.choose(batch.num_tokens, batch.num_seqs, max_context, int(batch.counts.max()))
            inputs = self.buffers.fill(batch, key)
            outputs = self._replay(inputs) if captured else self._compute(inputs)
            sampled = self._sample(batch, inputs, outputs)
            scored = self.scorer.score(batch, outputs.hidden)
            # Queued here, ahead of the next step: a copy that `collect` asks for would wait until that step is done.
            sampled = replace(sampled, tokens=sampled.tokens.to(HOST, non_blocking=True))
            done = self.ctx.device.event()
            done.record()
        self.pending.append(Pending(batch=batch, sampled=sampled, prompt_logprobs=scored, done=done))

    def _compute(self, inputs: StepInputs) -> Outputs:
        """The step, eagerly: block tables are cut to the longest context."""
        batches = []
        for group, table in zip(self.kv_groups, self.table.blocks, strict=True):
            width = -(-(inputs.key.max_context or inputs.max_kv_len) // group.block_size)
            slots = self.slot_mapping(table, inputs.token_rows, inputs.positions, group.block_size)
            batches.append(inputs.attention(slots, table[inputs.rows, :width]))
        return self._forward(inputs, batches, self._plan(batches, graph=False))

    def _plan(self, batches: Sequence[AttnBatch], *, graph: bool) -> list[Any]:
        attention = self.ctx.attention
        return [
            backend.plan(batches[group], graph=graph)
            for backend, group in zip(attention.backends, attention.kv_of_spec, strict=True)
        ]

    def _forward(self, inputs: StepInputs, batches: Sequence[AttnBatch], plans: Sequence[Any]) -> Outputs:
        ids = self.gather_tokens(self.table.tokens, inputs.token_rows, inputs.positions)
        slots = [batch.slots for batch in batches]
        state = StepState(positions=inputs.positions, slots=slots, plans=plans, kv=self.kv)
        hidden = self.model.forward(ids, state)
        return Outputs(hidden=hidden, logits=self.model.logits(hidden[inputs.sample_at]))

    def _sample(self, batch: Batch, inputs: StepInputs, outputs: Outputs) -> Sampled:
        """Choose tokens and write them into the table, where the next step reads them."""
        n = inputs.num_samples
        if outputs.tokens is not None and batch.bitmask is None and self.sampler.is_plain(inputs.sampled_rows_host):
            return Sampled(tokens=outputs.tokens[:n].clone())
        bitmask = batch.bitmask[batch.samples] if batch.bitmask is not None else None
        sampled = self.sampler.sample(
            outputs.logits[:n], inputs.sampled_rows_host, inputs.sampled_positions_host, bitmask
        )
        self._write(sampled.tokens, inputs.sample_rows[:n], inputs.sample_positions[:n])
        return sampled

    def _write(self, tokens: Tensor, rows: Tensor, positions: Tensor) -> None:
        self.table.tokens.index_put_((rows, positions), tokens.clamp_min(0).to(torch.int32))

    # -- capture --

    def _replay(self, inputs: StepInputs) -> Outputs:
        """The step through the graph runner: recorded at the first use of its shape, or by `warm_up`."""
        key = inputs.key
        entry = self.captured.get(key)
        if entry is None:
            entry = self.captured[key] = self._record(inputs)
        else:
            self._plan(self._static_batches(inputs, entry.attention), graph=True)
        outputs = self.graph.run(entry.handle)
        assert isinstance(outputs, Outputs)
        return outputs

    def _static_batches(self, inputs: StepInputs, tensors: Sequence[tuple[Tensor, Tensor]]) -> list[AttnBatch]:
        """What plans of a recorded step see: bounds instead of this step's sizes, as replays must not differ."""
        key = inputs.key
        return [
            replace(
                inputs.attention(slots, table),
                num_decodes=key.num_seqs if key.max_q_len == 1 else 0,
                max_q_len=key.max_q_len or key.num_tokens,
                max_kv_len=key.max_context or self.shapes.limits.max_model_len,
            )
            for slots, table in tensors
        ]

    def _record(self, inputs: StepInputs) -> Captured:
        device = self.ctx.torch_device
        key = inputs.key
        tensors = []
        for width in self._widths(key):
            slots = torch.zeros(key.num_tokens, dtype=torch.int64, device=device)
            tensors.append((slots, torch.zeros((key.num_seqs, width), dtype=torch.int32, device=device)))
        batches = self._static_batches(inputs, tensors)
        plans = self._plan(batches, graph=True)

        def step() -> Outputs:
            for (slots, table), source, group in zip(tensors, self.table.blocks, self.kv_groups, strict=True):
                slots.copy_(self.slot_mapping(source, inputs.token_rows, inputs.positions, group.block_size))
                table.copy_(source[inputs.rows, : table.shape[1]])
            outputs = self._forward(inputs, batches, plans)
            tokens = self.sampler.choose_plainly(outputs.logits, inputs.sample_rows, inputs.sample_positions)
            self._write(tokens, inputs.sample_rows, inputs.sample_positions)
            return replace(outputs, tokens=tokens)

        return Captured(handle=self.graph.prepare(key, step), attention=tensors)

    def _widths(self, key: BatchKey) -> list[int]:
        """Block-table columns of each group in a static step."""
        if not key.max_context:
            return self.max_context_blocks
        return [-(-key.max_context // group.block_size) for group in self.kv_groups]

    def warm_up(self, key: BatchKey) -> None:
        """Record a shape before the first request needs it: as many one-token sequences as it holds."""
        num_seqs = min(key.num_seqs, key.num_tokens, self.shapes.limits.max_num_seqs)
        batch = Batch(
            step=-1,
            rows=np.full(num_seqs, self.table.scratch, np.int32),
            starts=np.zeros(num_seqs, np.int32),
            counts=np.ones(num_seqs, np.int32),
            samples=np.ones(num_seqs, np.bool_),
        )
        with self.ctx.device.inference():
            self._replay(self.buffers.fill(batch, key))

    # -- results --

    def ready(self) -> bool:
        """Whether the oldest launched step is done, so that `collect` would not wait."""
        return self.pending[0].done.query()

    def collect(self) -> StepResult:
        """Wait for the oldest launched step."""
        step = self.pending.popleft()
        step.done.synchronize()
        batch, sampled = step.batch, step.sampled
        rows = batch.rows[batch.samples]
        tokens = sampled.tokens.numpy().astype(np.int32)
        errors = {
            int(row): "no token can be chosen: the logits are not finite, or every token is forbidden"
            for row in rows[tokens < 0]
        }
        return StepResult(
            step=batch.step,
            rows=rows,
            tokens=tokens[:, None],
            counts=np.ones(len(rows), np.int32),
            logprobs=self._logprobs(batch, sampled),
            prompt_logprobs=[_to_host(*entry) for entry in step.prompt_logprobs],
            errors=errors,
        )

    def _logprobs(self, batch: Batch, sampled: Sampled) -> list[TokenLogprobs]:
        if sampled.logprobs is None:
            return []
        places, *tensors = sampled.logprobs
        ids, values, ranks = (t.cpu() for t in tensors)
        rows = batch.rows[batch.samples][places]
        starts = (batch.starts + batch.counts)[batch.samples][places]
        # Each row gets the width it asked for, not the widest of the step.
        widths = self.sampler.logprobs[rows] + 1
        return [
            _to_host(int(row), int(start), ids[i : i + 1, :width], values[i : i + 1, :width], ranks[i : i + 1])
            for i, (row, start, width) in enumerate(zip(rows, starts, widths, strict=True))
        ]

    def close(self) -> None:
        """Drop recorded steps and the KV cache."""
        self.graph.close()
        self.captured.clear()
        self.kv = ()


def _to_host(row: int, start: int, ids: Tensor, values: Tensor, ranks: Tensor) -> TokenLogprobs:
    return TokenLogprobs(
        row=row,
        start=start,
        ids=ids.cpu().numpy().astype(np.int32),
        values=values.cpu().numpy().astype(np.float32),
        ranks=ranks.cpu().numpy().astype(np.int32),
    )
