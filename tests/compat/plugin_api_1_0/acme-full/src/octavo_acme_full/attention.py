"""Paged attention by the C kernel. S sequences, T tokens, H query heads, G kv heads, D head_dim."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

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
from octavo_acme_full.kernels.library import LIBRARY, Attention, address


class AcmeAttention:
    """Causal attention with windows, soft caps and sinks, over a cache in float32."""

    name: ClassVar[str] = "acme"
    graph_safe: ClassVar[bool] = False

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Device) -> Support:
        if (spec.dtype, spec.kv_dtype) != ("float32", "float32"):
            return no(f"float32 only, not {spec.dtype} with a cache of {spec.kv_dtype}")
        return YES if spec.causal else no("causal attention only")

    @classmethod
    def kv_layout(cls, spec: KVSpec) -> KVLayout:
        return KVLayout(block_size=spec.block_size, dtype=spec.dtype, order="BHNC")

    def __init__(self, spec: AttentionSpec, limits: BatchLimits, device: Device) -> None:
        self._spec = spec

    def plan(self, batch: AttnBatch, *, graph: bool) -> AttnBatch:
        return batch

    def run(
        self, layer: AttnLayer, q: Tensor, k: Tensor, v: Tensor, kv: KVView, plan: AttnBatch, out: Tensor
    ) -> Tensor:
        spec, tables = self._spec, plan.block_table.contiguous()
        facts = Attention(
            tokens=q.shape[0],
            seqs=plan.kv_lens.shape[0],
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            dim=spec.head_dim,
            block=spec.block_size,
            blocks_per_seq=tables.shape[1],
            window=spec.window or 0,
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
        )
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        keys, values = address(kv.k), address(kv.v)
        LIBRARY.acme_write(facts, address(k), address(v), keys, values, address(plan.slots))
        LIBRARY.acme_attention(
            facts,
            address(q),
            keys,
            values,
            address(plan.q_starts),
            address(plan.kv_lens),
            address(tables),
            address(layer.sinks),
            address(out),
        )
        return out
