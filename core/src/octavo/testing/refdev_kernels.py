"""Kernels of the fake platform: slow, but written otherwise than core's references, and fit for capture.

Legend: T tokens, S sequences, H query heads, G kv heads, D head_dim, L context positions looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in float64."""
    wide = x.double()
    scale = wide.pow(2).mean(-1, keepdim=True).add(eps).rsqrt()
    return (wide * scale * weight.double()).to(x.dtype)


@dataclass(frozen=True)
class Plan:
    """The step's tables (persistent buffers when captured), and how many blocks of context are looked at."""

    batch: AttnBatch
    num_blocks: int


class RefAttention:
    """Paged attention over the whole padded context of every token, without a branch on any value."""

    name: ClassVar[str] = "refdev"

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Device) -> Support:
        if spec.sinks:
            return no("no attention sinks")
        if not spec.causal:
            return no("causal attention only")
        return YES

    @classmethod
    def kv_layout(cls, spec: KVSpec) -> KVLayout | None:
        return KVLayout(block_size=spec.block_size, dtype=spec.dtype, order="HBNC")

    def __init__(self, spec: AttentionSpec, limits: BatchLimits, device: Device) -> None:
        self.spec = spec
        self.max_blocks = -(-limits.max_model_len // spec.block_size)

    def plan(self, batch: AttnBatch, *, graph: bool) -> Plan:
        # A captured step is replayed with longer contexts, so it must look at the longest there can be.
        needed = self.max_blocks if graph else -(-batch.max_kv_len // self.spec.block_size)
        return Plan(batch, min(max(needed, 1), batch.block_table.shape[1]))

    def run(self, layer: AttnLayer, q: Tensor, k: Tensor, v: Tensor, kv: KVView, plan: Plan, out: Tensor) -> Tensor:
        spec, batch = self.spec, plan.batch
        block, offset = batch.slots // spec.block_size, batch.slots % spec.block_size
        kv.k[block, :, offset] = k.to(kv.k.dtype)
        kv.v[block, :, offset] = v.to(kv.v.dtype)

        num_tokens, num_seqs = q.shape[0], batch.kv_lens.shape[0]
        token = torch.arange(num_tokens, device=q.device)
        seq = torch.searchsorted(batch.q_starts[1:].long(), token, right=True).clamp(max=num_seqs - 1)  # [T]
        starts, ends = batch.q_starts.long()[seq], batch.q_starts.long()[seq + 1]
        position = batch.kv_lens.long()[seq] - ends + token  # [T]

        table = batch.block_table[:, : plan.num_blocks].long()
        # [S, blocks, G, N, D] -> [S, G, L, D]
        keys = kv.k[table].transpose(1, 2).flatten(2, 3).float()
        values = kv.v[table].transpose(1, 2).flatten(2, 3).float()
        grouped = q.float().view(num_tokens, spec.num_kv_heads, -1, spec.head_dim)  # [T, G, H/G, D]
        logits = torch.einsum("tghd,tgld->tghl", grouped, keys[seq]) * spec.scale
        if spec.softcap is not None:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)

        context = torch.arange(keys.shape[2], device=q.device)
        seen = context[None] <= position[:, None]  # [T, L]
        if spec.window is not None:
            seen &= context[None] > position[:, None] - spec.window
        # Padding tokens see nothing; let them see position 0 rather than give NaN.
        padding = (token >= ends) | (token < starts)
        seen |= padding[:, None] & (context[None] == 0)
        # Unwritten slots may hold anything: weight 0 times NaN would still be NaN.
        weights = logits.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
        result = torch.einsum("tghl,tgld->tghd", weights, torch.nan_to_num(values[seq]))
        out.copy_(result.flatten(1, 2).to(out.dtype))
        return out
