"""Paged attention made of one torch call for each sequence. G kv heads, L positions, N tokens of a block, D head_dim.

sequence s   |------- kv_lens[s] positions -------|
             |---- in the cache ----|- its tokens -|
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

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


class SdpaAttention:
    """Causal attention with windows. It walks the host's lengths, so that a recorded step cannot hold it."""

    name: ClassVar[str] = "sdpa"
    graph_safe: ClassVar[bool] = False

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Device) -> Support:
        if spec.sinks or spec.softcap is not None:
            return no("no sinks and no softcap: torch's function has neither")
        if not spec.causal:
            return no("causal attention only")
        return YES if spec.kv_dtype == spec.dtype else no(f"no cache of {spec.kv_dtype}")

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
        size = self._spec.block_size
        block, offset = plan.slots // size, plan.slots % size
        kv.k[block, :, offset] = k
        kv.v[block, :, offset] = v
        out.zero_()  # padding tokens run through the layers behind
        for s in range(plan.num_seqs):
            first, end, length = *plan.q_starts_host[s : s + 2].tolist(), int(plan.kv_lens_host[s])
            if end == first:
                continue
            table = plan.block_table[s, : -(-length // size)].long()
            # [blocks, G, N, D] -> [G, L, D]
            keys, values = (cache[table].transpose(0, 1).flatten(1, 2)[:, :length] for cache in (kv.k, kv.v))
            rows = scaled_dot_product_attention(
                q[first:end].transpose(0, 1)[None],
                keys[None],
                values[None],
                attn_mask=self._seen(length - (end - first), length, q.device),
                scale=self._spec.scale,
                enable_gqa=True,
            )
            out[first:end] = rows[0].transpose(0, 1)
        return out

    def _seen(self, first: int, length: int, device: torch.device) -> Tensor:
        """bool [new tokens, L]: which positions the tokens at positions first.. see."""
        query = torch.arange(first, length, device=device)[:, None]
        position = torch.arange(length, device=device)
        seen = position <= query
        return seen if self._spec.window is None else seen & (position > query - self._spec.window)
