"""Paged attention out of portable Triton kernels, as a platform registers it.

    run:  write K and V | sequences of few new tokens: decode kernel | all others: prefill kernel

Which kernel takes a sequence is decided on the device, by its number of query tokens, so one captured launch of both
fits every step of its shape. The host only leaves out a kernel that its bounds show to be idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from octavo.plugin.contracts import AttnBatch, AttnLayer, Device, KVView
from octavo.plugin.data import YES, Support, no
from octavo.plugin.specs import AttentionSpec, BatchLimits, KVLayout, KVSpec
from octavo.plugin.torch import HOST
from octavo.triton.attention_decode import SEQ, SHARE, deal_kernel, decode_kernel
from octavo.triton.attention_prefill import prefill_kernel
from octavo.triton.attention_tuning import (
    AttentionTuning,
    DecodeCut,
    decode_tiles,
    fit,
    is_power_of_two,
    power_of_two,
    prefill_tiles,
)
from octavo.triton.attention_write import head_scales, kv_write
from octavo.triton.gemv import INTERPRETED
from octavo.triton.overlap import IN_ORDER, Overlap

Tensor = torch.Tensor

NARROW = "float8_e4m3fn"
DTYPES = ("bfloat16", "float16", "float32")
MAX_GROUP = 64
LEAST_ROWS = 16
"""Rows of the smallest product of a matrix unit."""
PREFILL_ROWS_SMALL = 64
UNROLLED = 4096
"""Numbers of a decode tile in float32, which matrix units do not take: the compiler writes its product out, and takes
minutes for four times as many."""
THREADS_OF_A_WARP = 64
"""At most, on any device."""
COMBINED = 2048
"""Numbers for each warp that a program adds up at a time when it puts shares together: what registers hold."""


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """Memory of the decode kernel: its shares of a step and unfinished work. Shared by all layers and steps of one
    stream."""

    served: Tensor
    shares: Tensor
    sums: Tensor
    tops: Tensor
    arrivals: Tensor
    fences: Tensor


@dataclass(frozen=True, kw_only=True)
class TritonPlan:
    """One step for all layers: device tensors by reference, launch sizes from bounds.

    decode_programs: 0 if no sequence can be short. least: tiles of a decode program. prefill_programs: 0 if no
    sequence can be long. deal, decode, prefill: constants and launch options of the kernels. short: the prefill kernel
    skips sequences of at most that many query tokens.
    """

    q_starts: Tensor
    kv_lens: Tensor
    block_table: Tensor
    slots: Tensor
    num_tokens: int
    num_seqs: int
    decode_programs: int
    least: int
    deal: Mapping[str, Any]
    decode: Mapping[str, Any]
    prefill_programs: int
    prefill: Mapping[str, Any]
    short: int
    scratch: Scratch


class TritonAttention:
    """`AttentionBackend` for every device that Triton compiles for. A platform sets `tuning` and `overlap`, see
    `with_tuning`.

    The cache is BHNC: one head's tokens of a block are contiguous, which is what a program reads.
    """

    name: ClassVar[str] = "triton"
    takes_written_kv: ClassVar[bool] = True
    tuning: ClassVar[AttentionTuning] = AttentionTuning()
    overlap: ClassVar[Overlap] = IN_ORDER

    @classmethod
    def with_tuning(cls, tuning: AttentionTuning, overlap: Overlap = IN_ORDER) -> type[TritonAttention]:
        """This backend with other sizes, and kernels that start as `overlap` says."""
        names = {"__module__": cls.__module__, "__doc__": cls.__doc__}
        return type(cls.__name__, (cls,), {"tuning": tuning, "overlap": overlap} | names)

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Device) -> Support:
        if device.type == HOST and not INTERPRETED:
            return no("Triton compiles nothing for the host; it can only interpret there (TRITON_INTERPRET=1)")
        if not spec.causal:
            return no("only causal attention is implemented")
        if spec.dtype not in DTYPES:
            return no(f"no {spec.dtype} activations")
        if spec.kv_dtype not in (spec.dtype, NARROW):
            return no(f"keeps the cache in the model's {spec.dtype} or in {NARROW}, not {spec.kv_dtype}")
        if not is_power_of_two(spec.head_dim) or not 16 <= spec.head_dim <= 256:
            return no(f"head_dim must be a power of two from 16 to 256, not {spec.head_dim}")
        if spec.scale <= 0:
            return no(f"the scale of logits must be positive, not {spec.scale}")
        if not is_power_of_two(spec.block_size):
            return no(f"block_size must be a power of two, not {spec.block_size}")
        if spec.num_heads % spec.num_kv_heads:
            return no(f"{spec.num_heads} query heads do not divide among {spec.num_kv_heads} kv heads")
        if spec.num_heads // spec.num_kv_heads > MAX_GROUP:
            return no(f"at most {MAX_GROUP} query heads may share a kv head")
        return YES

    @classmethod
    def kv_layout(cls, spec: KVSpec) -> KVLayout:
        return KVLayout(block_size=spec.block_size, dtype=spec.dtype, order="BHNC")

    def __init__(self, spec: AttentionSpec, limits: BatchLimits, device: Device) -> None:
        tuning = self.tuning
        self._spec = spec
        self._device = device.torch_device
        self._group = spec.num_heads // spec.num_kv_heads
        self._max_seqs = max(power_of_two(limits.max_num_seqs), 16)
        self._num_units = max(device.describe().compute_units, 1)
        # Tiles lie in memory as stored, or widened for the matrix unit: the larger counts.
        self._token_bytes = 2 * spec.head_dim * getattr(torch, spec.dtype).itemsize
        # The answers of a tile stay in registers: wide heads leave room for fewer rows.
        self._rows = min(tuning.prefill_rows, tuning.prefill_rows * 128 // spec.head_dim)
        prefill_block, prefill_stages = fit(
            tuning.prefill_block,
            tuning.prefill_stages,
            prefill_tiles,
            token_bytes=self._token_bytes,
            memory=tuning.shared_memory - self._rows * self._token_bytes // 2,
        )
        self._constants: dict[str, Any] = {
            "WINDOW": spec.window or 0,
            "SOFTCAP": spec.softcap or 0.0,
            "HKV": spec.num_kv_heads,
            "G": self._group,
            "D": spec.head_dim,
            "N": spec.block_size,
            "NARROW": spec.kv_dtype != spec.dtype,
            # The interpreter multiplies the bit patterns of bfloat16.
            "UPCAST": INTERPRETED and spec.dtype == "bfloat16",
        }
        self._prefill = self._constants | {
            "START": self.overlap.start,
            **self.overlap.options,
            "BLOCK_L": prefill_block,
            "num_warps": tuning.prefill_warps,
            "num_stages": prefill_stages,
        }
        # The cut for many sequences is the last entry: up to as many as there may be.
        self._cuts = [(n, self._fitted(cut)) for n, cut in (*tuning.decode_few, (self._max_seqs, tuning.decode))]
        self._max_programs = max(self._programs(cut) for _, cut in self._cuts)
        warps = max(cut.warps for _, cut in self._cuts)
        self._fence = power_of_two(warps * THREADS_OF_A_WARP) if tuning.decode_fence else 0
        self._scratch: dict[tuple[int, int], Scratch] = {}

    def _fitted(self, cut: DecodeCut) -> DecodeCut:
        """The cut with tiles that the device's memory holds."""
        memory, block = self.tuning.shared_memory, cut.block
        if self._spec.dtype == "float32":
            block = max(min(block, UNROLLED // self._spec.head_dim), LEAST_ROWS)
            cut = replace(cut, warps=8)
        block, stages = fit(block, cut.stages, decode_tiles, token_bytes=self._token_bytes, memory=memory)
        return replace(cut, block=block, stages=stages)

    def _programs(self, cut: DecodeCut) -> int:
        return cut.programs or cut.programs_per_unit * self._num_units

    # -- once a step --

    def plan(self, batch: AttnBatch, *, graph: bool) -> TritonPlan:
        """Launch sizes from the batch's bounds; lengths are read on the device. The same bounds give the same launches.

        With `graph` the batch's tensors and bounds are those of a recorded shape: replays need no new plan.
        """
        kept = self._decode_rows(batch.max_q_len)
        short = kept // self._group
        any_long = batch.max_q_len > short
        any_short = graph or batch.num_decodes > 0 or not any_long
        max_seqs = max(self._max_seqs, power_of_two(batch.num_seqs))
        most, cut = next((n, cut) for n, cut in (*self._cuts, (max_seqs, self._cuts[-1][1])) if batch.num_seqs <= n)
        # Programs that come early settle where there is room just then: unevenly, which costs more than it gains where
        # each has to read a large share.
        settled = any_long or cut is self._cuts[-1][1]
        early = IN_ORDER if settled and self.overlap.early else self.overlap
        prefill_rows = self._prefill_rows(batch.num_tokens)
        return TritonPlan(
            q_starts=batch.q_starts,
            kv_lens=batch.kv_lens,
            block_table=batch.block_table,
            slots=batch.slots,
            num_tokens=batch.num_tokens,
            num_seqs=batch.num_seqs,
            decode_programs=self._decode_programs(batch, cut) if any_short else 0,
            least=cut.min_tiles,
            deal={name: self._constants[name] for name in ("WINDOW", "HKV")}
            | {
                "MOST": kept // self._group,
                "BLOCK_L": cut.block,
                "BLOCK_S": max(power_of_two(most), 16),
                "START": self.overlap.start,
                **self.overlap.options,
            },
            decode=self._constants
            | {
                "BLOCK_L": cut.block,
                "R": max(kept, LEAST_ROWS),
                "KEPT": kept,
                "CHUNK": max(1, COMBINED * cut.warps // (kept * self._spec.head_dim)),
                "FENCE": self._fence,
                "START": early.start,
                "num_warps": cut.warps,
                "num_stages": cut.stages,
                **early.options,
            },
            prefill_programs=self._prefill_programs(batch, prefill_rows, short) if any_long else 0,
            prefill=self._prefill | {"BLOCK_S": max_seqs, "R": prefill_rows},
            short=short if any_short else 0,
            scratch=self._take_scratch(kept, max_seqs),
        )

    def _decode_rows(self, max_q_len: int) -> int:
        """Rows that can be queries in the decode kernel: those of short sequences (drafts), else one token's."""
        wanted = power_of_two(self._group * max_q_len)
        most = self.tuning.decode_rows * 128 // max(self._spec.head_dim, 128)
        return wanted if wanted <= most else power_of_two(self._group)

    def _decode_programs(self, batch: AttnBatch, cut: DecodeCut) -> int:
        length = batch.max_kv_len
        if self._spec.window is not None:
            length = min(length, self._spec.window + cut.block + batch.max_q_len)
        tiles = batch.num_seqs * self._spec.num_kv_heads * -(-length // cut.block)
        return max(1, min(self._programs(cut), -(-tiles // cut.min_tiles)))

    def _prefill_rows(self, num_tokens: int) -> int:
        """Rows of a tile: smaller ones where large ones would leave most of the device idle."""
        large = self._rows
        tiles = num_tokens * self._spec.num_heads // large
        return large if tiles >= self._num_units else min(PREFILL_ROWS_SMALL, large)

    def _prefill_programs(self, batch: AttnBatch, rows: int, short: int) -> int:
        """Every long sequence has one tile that is not full, at most."""
        num_long = min(batch.num_seqs, batch.num_tokens // (short + 1))
        tiles = batch.num_tokens * self._group // rows + num_long
        return min(tiles * self._spec.num_kv_heads, self.tuning.prefill_programs_per_unit * self._num_units)

    def _take_scratch(self, kept: int, max_seqs: int) -> Scratch:
        """Buffers are taken once per size and kept, since recorded launches hold their addresses."""
        scratch = self._scratch.get((kept, max_seqs))
        if scratch is None:
            spec, device = self._spec, self._device
            slots = (self._max_programs, 2)
            scratch = self._scratch[kept, max_seqs] = Scratch(
                served=torch.zeros((max_seqs + 1, SEQ.value), dtype=torch.int32, device=device),
                shares=torch.zeros((self._max_programs, SHARE.value), dtype=torch.int32, device=device),
                sums=torch.empty((*slots, kept, spec.head_dim), dtype=torch.float32, device=device),
                tops=torch.empty((*slots, 2, kept), dtype=torch.float32, device=device),
                arrivals=torch.zeros(max_seqs * spec.num_kv_heads, dtype=torch.int32, device=device),
                fences=torch.zeros(self._max_programs * max(self._fence, 1), dtype=torch.int32, device=device),
            )
        return scratch

    def start_step(self, plan: TritonPlan) -> None:
        """Deal the tiles of this step's contexts to the programs of the decode kernel, for all layers."""
        if plan.decode_programs:
            scratch = plan.scratch
            self.overlap.launch(
                deal_kernel,
                (plan.decode_programs,),
                plan.q_starts,
                plan.kv_lens,
                scratch.served,
                scratch.shares,
                plan.num_seqs,
                plan.least,
                **plan.deal,
            )

    # -- once a layer --

    def run(
        self, layer: AttnLayer, q: Tensor, k: Tensor | None, v: Tensor | None, kv: KVView, plan: TritonPlan, out: Tensor
    ) -> Tensor:
        """q, out [T, H, D]; k, v [T, Hkv, D], or None if written. Fills and returns `out`; padding tokens become zero.

        A scaled cache stores k / k_scale and v / v_scale; both are folded back in registers, head by head.
        """
        assert (layer.sinks is not None) == self._spec.sinks, "the spec and the layer disagree about sinks"
        if k is not None and v is not None:
            kv_write(in_order(k), in_order(v), kv, plan.slots, layer.k_scale, layer.v_scale, overlap=self.overlap)
        assert kv.k.stride() == kv.v.stride(), "keys and values lie alike"
        q = in_order(q)
        scratch = plan.scratch
        scales = head_scales(layer.k_scale, layer.v_scale, self._spec.num_kv_heads, q.device)
        inputs = (q, kv.k, kv.v, out, layer.sinks, *scales, plan.block_table, plan.q_starts)
        table_stride = plan.block_table.stride(0)
        strides = (*q.stride()[:2], *out.stride()[:2], *kv.k.stride()[:3])
        scale = self._spec.scale
        if plan.decode_programs:
            self.overlap.launch(
                decode_kernel,
                (plan.decode_programs,),
                *inputs,
                scratch.served,
                scratch.shares,
                scratch.sums,
                scratch.tops,
                scratch.arrivals,
                scratch.fences,
                plan.num_seqs,
                0 if plan.prefill_programs else plan.num_tokens,
                table_stride,
                *strides,
                scale,
                **plan.decode,
            )
        if plan.prefill_programs:
            self.overlap.launch(
                prefill_kernel,
                (plan.prefill_programs,),
                *inputs,
                plan.kv_lens,
                plan.num_seqs,
                plan.num_tokens,
                table_stride,
                plan.short,
                *strides,
                scale,
                **plan.prefill,
            )
        return out


def in_order(heads: Tensor) -> Tensor:
    """The same [T, heads, D], copied if the numbers of a head do not lie side by side."""
    return heads if heads.stride(2) == 1 else heads.contiguous()
