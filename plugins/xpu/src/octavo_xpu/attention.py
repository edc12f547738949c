"""Paged attention by `kernels/attention.cpp`: one kernel for prompts and decoding, any block size, any head size.

    a step with prompts   a work-group for each tile of queries and KV head; where there are matrix units, those of
                          `kernels/attention_matrix.cpp` compute it
    a decode step         and for each part of the context, so that few sequences fill the device too; then `merge`

Grids follow from bounds (tokens, sequences, longest context), never from values: a recorded step serves the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

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
from octavo_xpu.device import SyclDevice
from octavo_xpu.native import LANES, NUMBERS, Module, pitch
from octavo_xpu.small import SmallOps, last_contiguous, scale_of

Tensor = torch.Tensor

LOCAL_MEMORY = 64 << 10
"""Bytes that a work-group may have on every GPU since Gen9."""
ROWS = 8
"""Rows (tokens x heads of a group) that a work-group means to have: what shares a key once it is read."""
SUB_GROUPS = 4
MATRIX_ROWS = 8
"""Rows of a sub-group in the matrix units."""
MATRIX_HEAD = 128
"""Widest head whose queries and sums stay in a lane's registers there."""
PART = 256
"""Least positions of a part of a context: each part costs a pass over its sums."""
WANTED_GROUPS = 256
"""Work-groups that fill a large GPU (128 Xe cores, two each)."""


@dataclass(frozen=True, kw_only=True)
class SyclPlan:
    """One step for all layers, by reference. num_parts: of each context; decode: every sequence has one query or none.

    clear: there may be padding tokens, which no work-group writes.
    """

    decode: bool
    num_tiles: int
    num_parts: int
    clear: bool
    batch: AttnBatch


class SyclAttention:
    """Implements `octavo.plugin.AttentionBackend`."""

    name: ClassVar[str] = "sycl"
    takes_written_kv: ClassVar[bool] = True

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Device) -> Support:
        if not isinstance(device, SyclDevice):
            return no(f"needs a device with a SYCL runtime, not {device.type}")
        if spec.dtype not in NUMBERS:
            return no(f"no {spec.dtype} activations")
        if spec.kv_dtype != spec.dtype:
            return no(f"reads a cache in the activations' dtype, not in {spec.kv_dtype}")
        if not spec.causal:
            return no("only causal attention is implemented")
        group = spec.num_heads // spec.num_kv_heads
        # float32: a row of queries for each head of the group, and a step's keys and values, see the kernel.
        needed = 4 * (max(ROWS, group) * spec.head_dim + 2 * LANES * (spec.head_dim + 1))
        if needed > LOCAL_MEMORY:
            return no(f"{group} heads of {spec.head_dim} would take {needed} bytes of local memory, of {LOCAL_MEMORY}")
        return YES

    @classmethod
    def kv_layout(cls, spec: KVSpec) -> KVLayout:
        return KVLayout(block_size=spec.block_size, dtype=spec.dtype, order="BHNC")

    def __init__(self, spec: AttentionSpec, limits: BatchLimits, device: Device) -> None:
        assert isinstance(device, SyclDevice)
        self._spec, self._limits, self._device = spec, limits, device
        self._small = SmallOps(device.runtime)
        group = spec.num_heads // spec.num_kv_heads
        self._group = group
        self._matrix = self._matrix_units()
        self._tokens = max(1, (MATRIX_ROWS * SUB_GROUPS if self._matrix else ROWS) // group)
        self._decode = self._module(1)
        self._prompt = self._matrix_module() if self._matrix else self._module(0)
        # Fewer work-groups than wanted are split, so the parts are never more than twice as many.
        size = 2 * WANTED_GROUPS * group * (spec.head_dim + 2)
        self._partial = torch.empty(size, dtype=torch.float32, device=device.torch_device)

    def _module(self, decode: int) -> Module:
        spec = self._spec
        return self._device.runtime.module(
            "attention.cpp",
            NUMBER=NUMBERS[spec.dtype],
            HEAD_SIZE=spec.head_dim,
            GROUP=self._group,
            TOKENS=1 if decode else self._tokens,
            SUB_GROUPS=min(SUB_GROUPS, self._group if decode else self._group * self._tokens),
            DECODE=decode,
        )

    def _matrix_units(self) -> int:
        """MATRIX of the prompts' kernel; 0: it cannot use matrix units."""
        spec = self._spec
        if spec.head_dim % LANES or spec.head_dim > MATRIX_HEAD or self._group > MATRIX_ROWS * SUB_GROUPS:
            return 0
        return self._device.runtime.matrix(spec.dtype)

    def _matrix_module(self) -> Module:
        return self._device.runtime.module(
            "attention_matrix.cpp",
            NUMBER=NUMBERS[self._spec.dtype],
            HEAD_SIZE=self._spec.head_dim,
            GROUP=self._group,
            TOKENS=self._tokens,
            SUB_GROUPS=SUB_GROUPS,
            MATRIX=self._matrix,
        )

    def plan(self, batch: AttnBatch, *, graph: bool) -> SyclPlan:
        """References and bounds: nothing is copied to the device."""
        spec = self._spec
        decode = batch.max_q_len == 1
        num_parts = 1
        if decode:
            longest = self._limits.max_model_len if graph else batch.max_kv_len
            if spec.window is not None:
                longest = min(longest, spec.window)
            wanted = -(-WANTED_GROUPS // max(1, batch.num_seqs * spec.num_kv_heads))
            num_parts = max(1, min(wanted, -(-longest // PART)))
        return SyclPlan(
            decode=decode,
            num_tiles=batch.num_seqs if decode else batch.num_tokens // self._tokens + batch.num_seqs,
            num_parts=num_parts,
            clear=graph or int(batch.q_starts_host[-1]) < batch.num_tokens,
            batch=batch,
        )

    def run(
        self, layer: AttnLayer, q: Tensor, k: Tensor | None, v: Tensor | None, kv: KVView, plan: SyclPlan, out: Tensor
    ) -> Tensor:
        """q, out [T, H, D]; k, v [T, Hkv, D]. Fills and returns `out`; padding tokens become zero."""
        spec, batch = self._spec, plan.batch
        if k is not None and v is not None:
            self._small.write(k, v, kv.k, kv.v, batch.slots, layer.k_scale, layer.v_scale)
        if plan.clear:
            out.zero_()
        q = last_contiguous(q)
        assert out.is_contiguous()
        module = self._decode if plan.decode else self._prompt
        matrix = bool(self._matrix) and not plan.decode
        rows = self._group if plan.decode else self._group * self._tokens
        sub_groups = SUB_GROUPS if matrix else min(SUB_GROUPS, rows)
        (k_number, k_scales), (v_number, v_scales) = scale_of(layer.k_scale), scale_of(layer.v_scale)
        module["attention"](
            (plan.num_tiles, spec.num_kv_heads, plan.num_parts),
            (1, 1, sub_groups * LANES),
            *(q, kv.k, kv.v, out, *(() if matrix else (self._partial,))),
            *(batch.block_table, batch.q_starts, batch.kv_lens, layer.sinks, k_scales, v_scales),
            *(batch.num_seqs, spec.num_heads, *(() if matrix else (plan.num_parts,)), *pitch(q, 0, 1)),
            *(batch.block_table.stride(0), kv.k.shape[2], *pitch(kv.k, 0, 1, 2), *pitch(kv.v, 0, 1, 2)),
            spec.window or 0,
            *(float(spec.scale), float(spec.softcap or 0.0), k_number, v_number),
        )
        if plan.num_parts > 1:
            module["merge"](
                (batch.num_seqs, spec.num_heads, 1),
                (1, 1, LANES),
                *(self._partial, out, batch.q_starts, batch.kv_lens, layer.sinks),
                *(spec.num_heads, plan.num_parts),
            )
        return out
