"""FlashInfer over the paged cache, where its package is installed and works.

FlashInfer (Ye et al. 2025) plans every step on the host, from its lengths, into buffers that its kernels read; a
recorded step therefore keeps one wrapper, whose buffers stay where they are, and is planned anew before each replay.

    sequences  | 0 | 1 | ... | S - 1 | padding tokens |    one more than the step has, over block 0, so that every
    q_starts   0   n0  ...           N                T    token has a place in the plan whatever the padding

One wrapper serves prompts and decoding: FlashInfer's decoding on matrix units runs the same kernels.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from octavo.plugin import (
    YES,
    AttentionSpec,
    AttnBatch,
    AttnLayer,
    BatchLimits,
    Device,
    KVLayout,
    KVSpec,
    KVView,
    Support,
    no,
)
from octavo.plugin.recording import MIXED_TOKENS
from octavo_cuda.attention import HOPPER, load_write
from octavo_cuda.attention_check import objection

Tensor = torch.Tensor

MODULE = "flashinfer"
SINCE = (8, 0)
HEAD_DIMS = (64, 128, 256)
LAYOUT = "NHD"
SHORT = 64
"""Query tokens of a sequence up to which FlashInfer's own choice on Hopper is its FlashAttention 2 kernel, which packs
the heads of a group into one tile."""
LARGEST_TILE = 128
SLACK = 1 << 20
"""Bytes of a workspace beyond what was counted."""
PAGES_AT_ONCE = 128


@triton.jit
def flat_pages_kernel(pages, page_starts, table, table_stride, num_seqs, BLOCK: tl.constexpr):
    """pages[page_starts[s] + i] = table[s, i], a program a sequence; the one behind the last has block 0 throughout."""
    seq = tl.program_id(0)
    start = tl.load(page_starts + seq)
    count = tl.load(page_starts + seq + 1) - start
    for first in range(0, count, BLOCK):
        i = first + tl.arange(0, BLOCK)
        page = tl.load(table + seq * table_stride + i, mask=(i < count) & (seq < num_seqs), other=0)
        tl.store(pages + start + i, page, mask=i < count)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A step as FlashInfer counts it, on the host: see the drawing above. pages: how many all sequences have."""

    q_starts: Tensor
    page_starts: Tensor
    last_page_lens: Tensor
    pages: int

    @classmethod
    def of(cls, batch: AttnBatch, page_size: int) -> Geometry:
        """Sequences without context have no pages."""
        padding = batch.num_tokens - int(batch.q_starts_host[-1])
        lens = np.append(batch.kv_lens_host, padding)
        counts = -(-lens // page_size)
        page_starts = np.append(0, np.cumsum(counts))
        return cls(
            q_starts=int32(np.append(batch.q_starts_host, batch.num_tokens)),
            page_starts=int32(page_starts),
            last_page_lens=int32(lens - np.maximum(counts - 1, 0) * page_size),
            pages=int(page_starts[-1]),
        )


def int32(values: NDArray[Any]) -> Tensor:
    """A host tensor of them."""
    return torch.from_numpy(values.astype(np.int32))


@dataclass(frozen=True, kw_only=True)
class Planner:
    """A wrapper. page_starts: where it keeps those of a recorded step on the device.

    copied: FlashInfer's pinned plan has left for the device; the next one may overwrite it only then.
    """

    wrapper: Any
    page_starts: Tensor
    copied: Any


@dataclass(frozen=True, kw_only=True)
class FlashInferPlan:
    """One step for all layers. page_starts: where each sequence's pages begin in the list of all of them."""

    wrapper: Any
    page_starts: Tensor
    block_table: Tensor
    slots: Tensor


class FlashInferAttention:
    """Implements `octavo.plugin.AttentionBackend`."""

    name: ClassVar[str] = "flashinfer"
    takes_written_kv: ClassVar[bool] = True

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Device) -> Support:
        capability = getattr(device, "capability", (0, 0))
        if capability < SINCE:
            return no(f"runs from compute capability 8.0 on, not on {capability[0]}.{capability[1]}")
        if spec.dtype not in ("bfloat16", "float16"):
            return no(f"no {spec.dtype} activations")
        if spec.kv_dtype != spec.dtype:
            return no(f"a cache in {spec.kv_dtype} is not implemented here")
        if spec.head_dim not in HEAD_DIMS:
            return no(f"head_dim must be one of {HEAD_DIMS}, not {spec.head_dim}")
        if not spec.causal:
            return no("only causal attention is implemented")
        if spec.sinks:
            return no("sinks would need a kernel of their own, which is not implemented here")
        reason = objection(cls, spec, device)  # type: ignore[arg-type]
        return no(reason) if reason else YES

    @staticmethod
    def load() -> Any:
        """FlashInfer's wrapper class. Raises what importing FlashInfer raises."""
        return import_module(MODULE).BatchPrefillWithPagedKVCacheWrapper

    @staticmethod
    def version() -> str:
        return str(import_module(MODULE).__version__)

    @classmethod
    def kv_layout(cls, spec: KVSpec) -> KVLayout:
        return KVLayout(block_size=spec.block_size, dtype=spec.dtype, order="BNHC")

    def __init__(self, spec: AttentionSpec, limits: BatchLimits, device: Device) -> None:
        self._wrapper_class = self.load()
        self._write = load_write()
        self._spec = spec
        self._device = device
        self._hopper = getattr(device, "capability", (0, 0))[0] == HOPPER
        dtype = getattr(torch, spec.dtype)
        self._options: dict[str, Any] = {
            "num_qo_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim_qk": spec.head_dim,
            "page_size": spec.block_size,
            "causal": True,
            "sm_scale": spec.scale,
            "window_left": -1 if spec.window is None else spec.window - 1,
            "logits_soft_cap": spec.softcap or 0.0,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        # Every step is planned right before it runs, in the order of one stream: all share what a plan and its kernels
        # write. It is taken here, before core counts what is left for the cache.
        longest = SHORT if self._hopper else min(limits.max_num_tokens, MIXED_TOKENS[-1])
        units = max(device.describe().compute_units, 1)
        self._partial = self._empty(partial_bytes(spec, units, limits.max_num_seqs, longest), torch.uint8)
        self._ints = self._empty(plan_bytes(spec, limits), torch.uint8)
        self._pages = self._empty(num_pages(spec, limits), torch.int32)
        self._recorded: dict[tuple[int, ...], Planner] = {}
        self._eager: dict[str, Planner] = {}
        self._first_layer: int | None = None

    def _empty(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self._device.torch_device)

    # -- once a step --

    def plan(self, batch: AttnBatch, *, graph: bool) -> FlashInferPlan:
        """Plans on the host. A recorded step must be planned before each replay: its plan lies at fixed addresses."""
        step = Geometry.of(batch, self._spec.block_size)
        if graph:
            planner = self._recorded_planner(batch)
            page_starts = planner.page_starts
        else:
            planner = self._eager_planner(batch)
            page_starts = step.page_starts.to(self._device.torch_device)
        planner.copied.synchronize()
        planner.wrapper.plan(
            qo_indptr=step.q_starts,
            paged_kv_indptr=step.page_starts,
            paged_kv_indices=self._pages[: step.pages],
            paged_kv_last_page_len=step.last_page_lens,
            **self._options,
        )
        planner.copied.record()
        return FlashInferPlan(
            wrapper=planner.wrapper,
            page_starts=page_starts,
            block_table=batch.block_table,
            slots=batch.slots,
        )

    def _kernel(self, max_q_len: int) -> str:
        return "fa3" if self._hopper and max_q_len > SHORT else "fa2"

    def _recorded_planner(self, batch: AttnBatch) -> Planner:
        table = batch.block_table
        key = (batch.num_tokens, batch.num_seqs, batch.max_q_len, table.data_ptr())
        if key not in self._recorded:
            num_seqs, kernel = batch.num_seqs + 1, self._kernel(batch.max_q_len)
            page_starts = self._empty(num_seqs + 1, torch.int32)
            wrapper = self._wrapper_class(
                self._partial,
                LAYOUT,
                use_cuda_graph=True,
                qo_indptr_buf=self._empty(num_seqs + 1, torch.int32),
                paged_kv_indptr_buf=page_starts,
                paged_kv_indices_buf=self._pages,
                paged_kv_last_page_len_buf=self._empty(num_seqs, torch.int32),
                backend=kernel,
                max_total_num_rows=batch.num_tokens,
            )
            wrapper.reset_workspace_buffer(self._partial, self._ints)
            self._recorded[key] = Planner(wrapper=wrapper, page_starts=page_starts, copied=self._device.event())
        return self._recorded[key]

    def _eager_planner(self, batch: AttnBatch) -> Planner:
        kernel = self._kernel(batch.max_q_len)
        if kernel not in self._eager:
            wrapper = self._wrapper_class(self._partial, LAYOUT, backend=kernel)
            wrapper.reset_workspace_buffer(self._partial, self._ints)
            none = self._empty(0, torch.int32)
            self._eager[kernel] = Planner(wrapper=wrapper, page_starts=none, copied=self._device.event())
        return self._eager[kernel]

    # -- once a layer --

    def run(
        self,
        layer: AttnLayer,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        kv: KVView,
        plan: FlashInferPlan,
        out: Tensor,
    ) -> Tensor:
        """q, out [T, H, D]; k, v [T, Hkv, D]. Fills and returns `out`; padding tokens see each other's keys only."""
        if k is not None and v is not None:
            self._write(k, v, kv, plan.slots)
        if self._first_layer is None:
            self._first_layer = layer.index
        if layer.index == self._first_layer:
            self._flatten(plan)
        # FlashInfer's pages are [blocks, tokens of a block, heads, D].
        plan.wrapper.run(q, (kv.k.transpose(1, 2), kv.v.transpose(1, 2)), out=out)
        return out

    def _flatten(self, plan: FlashInferPlan) -> None:
        num_seqs = plan.block_table.shape[0]
        flat_pages_kernel[(num_seqs + 1,)](
            self._pages, plan.page_starts, plan.block_table, plan.block_table.stride(0), num_seqs, BLOCK=PAGES_AT_ONCE
        )


def partial_bytes(spec: AttentionSpec, units: int, max_num_seqs: int, longest: int) -> int:
    """What a plan of FlashInfer's FlashAttention 2 kernel may take for partial answers, in bytes.

    longest: query tokens of the largest recorded step with prompts that it serves. Source: `PrefillPlanImpl` in
    FlashInfer's scheduler.cuh: a float32 row of answers and its sum for each row of each tile; two tiles for each unit,
    or all that a recorded shape may have.
    """
    group = spec.num_heads // spec.num_kv_heads
    least = 2 * units // spec.num_kv_heads
    rows = 0
    for tokens, tile in ((max_num_seqs, 16 if group <= 16 else 64), (longest, LARGEST_TILE)):
        tiles = -(-tokens * group // tile) + min(max_num_seqs, tokens) + 1
        rows = max(rows, -(-max(tiles, least) * tile // group))
    return SLACK + 4 * spec.num_heads * rows * (spec.head_dim + 1)


def plan_bytes(spec: AttentionSpec, limits: BatchLimits) -> int:
    """What the plan of any step may take. Source: `PrefillSM90Plan`, six int32 for each head of each tile."""
    tiles = -(-limits.max_num_tokens // LARGEST_TILE) + limits.max_num_seqs + 1
    return SLACK + 4 * 6 * spec.num_heads * tiles


def num_pages(spec: AttentionSpec, limits: BatchLimits) -> int:
    """Pages of all sequences of a step and its padding at most. Sequences may share pages: each counts its own."""
    longest = -(-limits.max_model_len // spec.block_size) + 1
    return limits.max_num_seqs * longest + -(-limits.max_num_tokens // spec.block_size)
