"""The model runner: one for all platforms. A `Batch` in, a `StepResult` out.

    launch: table <- what changed | begin_step -> attention plans -> model -> logits -> tokens -> commit_tokens
        with drafts: logits behind each of them too, and no commit: tokens go where they stand (`speculate.places`)
    mask: of a masked batch, everything from the choice of tokens on; launch has left that out
    collect: wait for the oldest launched step; its tokens are in pinned memory by then

Where the platform captures, everything from `begin_step` to the plain choice of tokens and its commit is one recorded
step per shape; rows that ask for more than a plain choice (filters, penalties, masks, logprobs) are sampled from its
logits, and what they get is committed over it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.layers.context import BuildContext, StepState
from octavo.models.registry import Model
from octavo.plugin.contracts import AttnBatch, BatchKey, GraphRunner, KVView, start_step
from octavo.plugin.step import Batch, KVGroup, Masks, StepResult
from octavo.runner.buckets import Shapes
from octavo.runner.inputs import DeviceStep, HostStep, InputBuffers, RequestTable, Staging
from octavo.runner.results import Pending
from octavo.runner.scoring import PromptScorer
from octavo.sampling.sampler import OPS, Sampled, Sampler
from octavo.speculate.places import Places


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a step leaves on the device: hidden [T, hidden], logits [S, V] float32 or in the model's dtype,
    tokens int64 [S]: the plain choice, committed."""

    hidden: Tensor
    logits: Tensor
    tokens: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Computed:
    """A step up to its logits: tokens are still to be chosen. drafted: where, if there are drafts.
    record: its shape, if it is to be recorded."""

    drafted: Places | None
    batch: Batch
    staging: Staging
    step: DeviceStep
    outputs: Outputs
    record: BatchKey | None


@dataclass(frozen=True, kw_only=True)
class Captured:
    """One recorded shape: its handle, and the inputs and attention batches that every replay reads."""

    handle: Any
    step: DeviceStep
    attention: Sequence[AttnBatch]


@dataclass
class ModelRunner:
    """Implements `octavo.plugin.MaskingExecutor`.

    ctx: what the model was built with. kv: one view per layer. kv_groups: one per KV spec, in `ctx.attention` order.
    processors: logits processors by name. closing: called when it is closed, while the device still serves.
    """

    model: Model
    ctx: BuildContext
    kv: Sequence[KVView]
    kv_groups: Sequence[KVGroup]
    shapes: Shapes
    graph: GraphRunner
    processors: Mapping[str, type[Any]] = field(default_factory=dict)
    closing: Callable[[], None] = lambda: None
    pending: deque[Pending] = field(default_factory=deque)

    def __post_init__(self) -> None:
        device, limits = self.ctx.device, self.shapes.limits
        self.table = RequestTable(limits, self.kv_groups, device, static=self.shapes.static)
        self.buffers = InputBuffers(self.shapes.max_tokens, self.shapes.max_seqs, self.table, device)
        ops: dict[str, Callable[..., Any]] = {name: self.ctx.op(name) for name in OPS}
        self.sampler = Sampler(
            ops,
            self.table.tokens,
            self.model.vocab_size,
            device.torch_device,
            processors=self.processors,
            static=self.shapes.static,
        )
        self.scorer = PromptScorer(self.model, ops["topk_logprobs"], self.table.tokens)
        self.begin_step = self.ctx.op("begin_step")
        self.commit_tokens = self.ctx.op("commit_tokens")
        # Rows of a table by their numbers: what an embedding does, and what every platform can record.
        self.take_rows = self.ctx.op("embedding", size=self.model.hidden_size)
        self.unmasked: Computed | None = None
        self.captured: dict[BatchKey, Captured] = {}
        self.idle: list[Staging] = []

    # -- the step --

    def launch(self, batch: Batch) -> None:
        """Start a step; returns as soon as its work is queued on the device."""
        staging = self._take_staging()
        with self.ctx.device.inference():
            if self.unmasked is not None:
                self._finish(self._take_unmasked(), None)  # the engine failed before its masks came
            for row in batch.released:
                self.sampler.release(row)
                self.scorer.release(row)
            self.sampler.upload = staging.send
            # One by one where every number of them would be a shape of its own.
            for admits in [[admit] for admit in batch.admits] if self.shapes.static else [batch.admits]:
                self.table.admit(admits, staging)
                self.sampler.admit(admits)
            for admit in batch.admits:
                self.scorer.admit(admit)
            self.table.update(batch.blocks, staging)
            drafted, at = None, None
            if batch.drafts is not None:
                self.table.write_drafts(batch, staging)
                drafted = Places.of(batch)
                at = staging.send(drafted.at)
            key, recordable = self._choose(batch)
            host = self.buffers.send(batch, key, staging)
            captured = self.captured.get(key)
            if captured is not None:
                step, outputs = captured.step, self._replay(captured, host)
                if at is not None:
                    outputs = Outputs(hidden=outputs.hidden, logits=self._logits(outputs.hidden, at))
            else:
                step = self.buffers.views(key, key.max_context or host.max_kv_len)
                outputs = self._compute(step, host, at)
            key_to_record = key if recordable and captured is None else None
            computed = Computed(
                batch=batch, staging=staging, step=step, outputs=outputs, record=key_to_record, drafted=drafted
            )
            if batch.masked:
                self.unmasked = computed
            else:
                self._finish(computed, None)

    def mask(self, masks: Masks) -> None:
        """Choose the tokens of the batch that was launched last."""
        computed = self._take_unmasked()
        assert masks.step == computed.batch.step, f"masks of step {masks.step} for step {computed.batch.step}"
        with self.ctx.device.inference():
            self._finish(computed, masks)

    def _take_unmasked(self) -> Computed:
        computed, self.unmasked = self.unmasked, None
        assert computed is not None, "no step waits for masks"
        return computed

    def _finish(self, computed: Computed, masks: Masks | None) -> None:
        """Choose tokens, and queue what `collect` will read."""
        batch, staging, outputs = computed.batch, computed.staging, computed.outputs
        self.sampler.upload = staging.send
        if computed.drafted is not None:
            places, sampled = self._sample_drafted(computed.drafted, outputs.logits, masks, staging)
        else:
            places, sampled = self._sample(batch, computed.step, outputs, masks)
        scored = self.scorer.score(batch, outputs.hidden)
        # Queued here, ahead of the next step: a copy that `collect` asks for would wait until that step is done.
        staging.tokens[: len(sampled.tokens)].copy_(sampled.tokens, non_blocking=True)
        if sampled.logprobs is not None:
            sampled = replace(sampled, logprobs=sampled.logprobs.moved(staging.receive))
        done = self.ctx.device.event()
        done.record()
        self.pending.append(
            Pending(
                batch=batch,
                staging=staging,
                places=places,
                drafted=computed.drafted,
                sampled=sampled,
                prompt_logprobs=scored,
                done=done,
            )
        )
        if computed.record is not None:
            self.record(computed.record)
            # The recording has its own memory: what the run before it took is of no use to later steps.
            self.ctx.device.empty_cache()

    def _take_staging(self) -> Staging:
        # A token may be sampled behind each one that is computed, not only behind each sequence.
        return self.idle.pop() if self.idle else Staging(self.ctx.device, self.shapes.max_tokens)

    def _choose(self, batch: Batch) -> tuple[BatchKey, bool]:
        max_context = int((batch.starts + batch.counts).max())
        return self.shapes.choose(batch.num_tokens, batch.num_seqs, max_context, int(batch.counts.max()))

    def _compute(self, step: DeviceStep, host: HostStep, at: Tensor | None) -> Outputs:
        """The step, eagerly: block tables are cut to the longest context. at: see `_forward`."""
        self._begin(step)  # first, as a plan may read what it writes
        return self._forward(step, host.key, self._plan(step.attention(host), graph=False), at)

    def _plan(self, batches: Sequence[AttnBatch], *, graph: bool) -> list[Any]:
        attention = self.ctx.attention
        return [
            backend.plan(batches[group], graph=graph)
            for backend, group in zip(attention.backends, attention.kv_of_spec, strict=True)
        ]

    def _begin(self, step: DeviceStep) -> None:
        table = self.table
        self.begin_step(
            table.tokens,
            table.blocks,
            table.groups,
            table.ended,
            step.seqs,
            step.q_starts,
            step.ids,
            step.positions,
            step.slots,
            step.block_table,
            step.picks,
        )

    def _forward(self, step: DeviceStep, key: BatchKey, plans: Sequence[Any], at: Tensor | None = None) -> Outputs:
        """at int64 [N]: the tokens behind which logits are wanted; None: the last of each sequence."""
        for backend, plan in zip(self.ctx.attention.backends, plans, strict=True):
            start_step(backend, plan)
        state = StepState(positions=step.positions, slots=step.slots.unbind(), plans=plans, kv=self.kv)
        hidden = self.model.forward(step.ids, state)
        if at is None and key.max_q_len == 1:  # in a decode step token i is the last one of sequence i already
            return Outputs(hidden=hidden, logits=self.model.logits(hidden))
        return Outputs(hidden=hidden, logits=self._logits(hidden, step.picks[0] if at is None else at))

    def _logits(self, hidden: Tensor, at: Tensor) -> Tensor:
        return self.model.logits(self.take_rows(at, hidden))

    def _sample(
        self, batch: Batch, step: DeviceStep, outputs: Outputs, masks: Masks | None
    ) -> tuple[NDArray[np.intp], Sampled]:
        """Choose tokens and commit them to the table, where the next step reads them. Returns places and tokens:
        the token of the i-th sequence that samples is tokens[places[i]]."""
        n = batch.num_seqs
        sampling = np.flatnonzero(batch.samples)
        rows = batch.rows[sampling]
        if masks is not None and not len(masks.places):
            masks = None
        if outputs.tokens is not None and masks is None and self.sampler.is_plain(rows):
            return sampling, Sampled(tokens=outputs.tokens)  # with the padding's, so that it is one copy of one shape
        if self.shapes.static and len(sampling):
            return self._sample_padded(batch, sampling, step, outputs, masks)
        if len(sampling) == n:
            logits, picks = outputs.logits[:n], step.picks[:, :n]
        else:
            index = self.sampler.upload(sampling)
            logits, picks = outputs.logits[index], step.picks[:, index]
        positions = (batch.starts + batch.counts)[sampling].astype(np.int64)
        sampled = self.sampler.sample(logits.float(), rows, positions, masks)
        self._commit(sampled.tokens, picks)
        return np.arange(len(sampling)), sampled

    def _sample_padded(
        self, batch: Batch, sampling: NDArray[np.intp], step: DeviceStep, outputs: Outputs, masks: Masks | None
    ) -> tuple[NDArray[np.intp], Sampled]:
        """As `_sample`, on as many rows as the step's shape has: behind those that sample the last one comes again."""
        order = np.arange(len(outputs.logits)).clip(max=len(sampling) - 1)
        index = self.sampler.upload(sampling[order])
        positions = (batch.starts + batch.counts)[sampling].astype(np.int64)
        logits = outputs.logits[index].float()
        sampled = self.sampler.sample(logits, batch.rows[sampling], positions, masks)
        # The same token for the same row: what was chosen behind the last one means nothing.
        sampled = replace(sampled, tokens=sampled.tokens[self.sampler.upload(order)])
        self._commit(sampled.tokens, step.picks[:, index])
        return np.arange(len(sampling)), sampled

    def _sample_drafted(
        self, drafted: Places, logits: Tensor, masks: Masks | None, staging: Staging
    ) -> tuple[NDArray[np.intp], Sampled]:
        """Choose the tokens of all places, and write them where they stand. Those behind a wrong draft are wrong too:
        the next step begins before them, so nobody reads them. Returns as `_sample`, by place."""
        if masks is not None and not len(masks.places):
            masks = None
        sampled = self.sampler.sample(logits.float(), drafted.rows, drafted.positions, masks, drafted)
        self.table.write(drafted.rows, drafted.positions, sampled.tokens.clamp_min(0), staging)
        return np.arange(len(drafted.rows)), sampled

    def _commit(self, tokens: Tensor, picks: Tensor) -> None:
        table = self.table
        self.commit_tokens(table.tokens, table.ended, table.limits, table.stops, tokens, picks)

    # -- capture --

    def _replay(self, captured: Captured, host: HostStep) -> Outputs:
        batches = [replace(b, q_starts_host=host.q_starts, kv_lens_host=host.kv_lens) for b in captured.attention]
        self._plan(batches, graph=True)
        outputs = self.graph.run(captured.handle)
        assert isinstance(outputs, Outputs)
        return outputs

    def record(self, key: BatchKey) -> None:
        """Record a shape, on as many one-token sequences of the padding row as it holds.

        At start, or behind the first step of its shape: recording runs the step too, and a request's step must not
        run twice, since the first run may end its row.
        """
        num_seqs = min(key.num_seqs, key.num_tokens, self.shapes.limits.max_num_seqs)
        batch = Batch(
            step=-1,
            rows=np.full(num_seqs, self.table.padding_row, np.int32),
            starts=np.zeros(num_seqs, np.int32),
            counts=np.ones(num_seqs, np.int32),
            samples=np.ones(num_seqs, np.bool_),
        )
        device, staging = self.ctx.device, self._take_staging()
        with device.inference():
            host = self.buffers.send(batch, key, staging)
            step = self.buffers.views(key, key.max_context)
            # Bounds instead of a step's sizes, as replays must not differ.
            bounds = replace(
                host,
                num_decodes=key.num_seqs if key.max_q_len == 1 else 0,
                max_q_len=key.max_q_len or key.num_tokens,
                max_kv_len=key.max_context or self.shapes.limits.max_model_len,
            )
            batches = step.attention(bounds)
            plans = self._plan(batches, graph=True)

            def whole_step() -> Outputs:
                self._begin(step)
                outputs = self._forward(step, key, plans)
                tokens = self.sampler.choose_plainly(outputs.logits, step.picks[1], step.picks[2])
                self._commit(tokens, step.picks)
                return replace(outputs, tokens=tokens)

            self.captured[key] = Captured(handle=self.graph.prepare(key, whole_step), step=step, attention=batches)
        device.synchronize()
        self._give_back(staging)

    def _give_back(self, staging: Staging) -> None:
        """Staging memory whose copies have all arrived."""
        staging.reset()
        self.idle.append(staging)

    # -- results --

    def ready(self) -> bool:
        """Whether the oldest launched step is done, so that `collect` would not wait."""
        return self.pending[0].done.query()

    def collect(self) -> StepResult:
        """Wait for the oldest launched step."""
        step = self.pending.popleft()
        step.done.synchronize()
        result = step.result()
        self._give_back(step.staging)
        return result

    def close(self) -> None:
        """Drop recorded steps and the KV cache."""
        self.closing()
        self.graph.close()
        self.captured.clear()
        self.kv = ()
