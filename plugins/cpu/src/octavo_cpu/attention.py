"""Paged attention out of torch's own CPU operators.

Every layer runs the step's plan (`attention_plan.py`): a few buckets of decodes and pieces of prompts, each of which
ends in one call of scaled_dot_product_attention. The cache is stored BNHC, so that writing is one copy of whole token
rows and a gathered sequence is contiguous; blocks that happen to lie side by side are read in place.

Shapes: T tokens, n rows of a bucket, t new tokens of each, L context length (padded), H kv heads, G query heads per
kv head, D head_dim, B blocks, N tokens of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

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
from octavo_cpu.attention_plan import Pick, Plan, Planner


@dataclass(frozen=True, kw_only=True)
class Caches:
    """One layer's cache as stored: blocks [B, N, H, D] to read, rows [B * N, H, D] to write."""

    source: KVView
    keys: torch.Tensor
    values: torch.Tensor
    key_rows: torch.Tensor
    value_rows: torch.Tensor

    @classmethod
    def of(cls, kv: KVView) -> Caches:
        """Of a view [B, H, N, D] with BNHC strides; a view, so that writing reaches the cache."""
        keys, values = kv.k.transpose(1, 2), kv.v.transpose(1, 2)
        rows = (-1, *keys.shape[2:])
        return cls(source=kv, keys=keys, values=values, key_rows=keys.view(rows), value_rows=values.view(rows))


class PagedAttention:
    """`AttentionBackend` for CPUs. Model dtype in, out and in the cache."""

    name: ClassVar[str] = "cpu_paged"
    graph_safe: ClassVar[bool] = False

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Device) -> Support:
        if device.type != "cpu":
            return no(f"needs a cpu device, not {device.type}")
        if spec.dtype not in ("bfloat16", "float16", "float32"):
            return no(f"no {spec.dtype} activations")
        if spec.kv_dtype != spec.dtype:
            return no(f"keeps the cache in the model's {spec.dtype}, not {spec.kv_dtype}")
        if spec.num_heads % spec.num_kv_heads:
            return no(f"{spec.num_heads} query heads do not divide among {spec.num_kv_heads} kv heads")
        if spec.window is not None and not spec.causal:
            return no("a sliding window needs causal attention")
        return YES

    @classmethod
    def kv_layout(cls, spec: KVSpec) -> KVLayout:
        return KVLayout(block_size=spec.block_size, dtype=spec.dtype, order="BNHC")

    def __init__(self, spec: AttentionSpec, limits: BatchLimits, device: Device) -> None:
        self.spec = spec
        self._planner = Planner(spec)
        self._by_hand = self._planner.by_hand
        self._heads = spec.num_kv_heads
        self._group = spec.num_heads // spec.num_kv_heads
        self._caches: dict[int, Caches] = {}

    def plan(self, batch: AttnBatch, *, graph: bool) -> Plan:
        """The step's work; `graph` changes nothing, as no recorded step runs on this kernel."""
        return self._planner.plan(batch)

    def run(
        self,
        layer: AttnLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: KVView,
        plan: Plan,
        out: torch.Tensor,
    ) -> torch.Tensor:
        heads, group, dim = self._heads, self._group, self.spec.head_dim
        caches = self._caches.get(layer.index)
        if caches is None or caches.source is not kv:
            caches = self._caches[layer.index] = Caches.of(kv)
        caches.key_rows.index_copy_(0, plan.slots, k)
        caches.value_rows.index_copy_(0, plan.slots, v)
        for work in plan.rows:
            n, t = work.num_rows, work.num_new
            context_k, context_v = work.context.read(caches.keys, caches.values)
            queries = take(q, work.tokens)
            if t == 1:
                answer = self._attend(layer, queries.view(n, heads, group, dim), context_k, context_v, work.mask, t)
            else:
                folded = queries.view(n, t, heads, group, dim).transpose(1, 2).reshape(n, heads, t * group, dim)
                answer = self._attend(layer, folded, context_k, context_v, work.mask, t)
                answer = answer.view(n, heads, t, group, dim).transpose(1, 2)
            put(out, work.tokens, answer)
        for piece in plan.pieces:
            if isinstance(piece.keys, slice):
                context_k, context_v = k[piece.keys].transpose(0, 1), v[piece.keys].transpose(0, 1)
            else:
                context_k, context_v = (c[0] for c in piece.keys.read(caches.keys, caches.values))
            # Kv heads become the batch and their query heads share one key by stride 0: nothing is expanded.
            t = piece.tokens.stop - piece.tokens.start
            grouped = q[piece.tokens].view(t, heads, group, dim).permute(1, 2, 0, 3)
            shape = (heads, group, context_k.shape[1], dim)
            answer = self._attend(
                layer, grouped, context_k[:, None].expand(shape), context_v[:, None].expand(shape), piece.mask, 0
            )
            out[piece.tokens].view(t, heads, group, dim).copy_(answer.permute(2, 0, 1, 3))
        if plan.num_used < len(out):
            out[plan.num_used :].zero_()
        return out

    def _attend(
        self,
        layer: AttnLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        num_new: int,
    ) -> torch.Tensor:
        """q [X, Y, R, D]; k, v [X, Y, L, D]; mask broadcast to [X, Y, R, L]. num_new: t of rows, 0 for a piece."""
        spec = self.spec
        if not self._by_hand:
            causal = num_new == 0 and mask is None and spec.causal
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=spec.scale)
        # torch has no operator with a cap or sinks: the plain formula, in float32.
        scores = torch.matmul(q.float() * spec.scale, k.float().transpose(-1, -2))
        if spec.softcap is not None:
            scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
        if mask is not None:
            scores += mask
        if spec.sinks:
            assert layer.sinks is not None, "the spec has sinks, the layer brings none"
            sinks = layer.sinks.float().view(self._heads, 1, self._group)
            if num_new:
                column = sinks.expand(-1, num_new, -1).reshape(1, self._heads, -1, 1)
            else:
                column = sinks.view(self._heads, self._group, 1, 1)
            scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], dim=-1)
            weights = scores.softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        return torch.matmul(weights, v.float()).to(q.dtype)


def take(source: torch.Tensor, where: Pick) -> torch.Tensor:
    """source[where] without the general indexing machinery."""
    return source[where] if isinstance(where, slice) else source.index_select(0, where)


def put(out: torch.Tensor, where: Pick, values: torch.Tensor) -> None:
    """out[where] = values: out [T, H, D], values [n, heads, G, D] or [n, t, heads, G, D] of any strides."""
    if isinstance(where, slice):
        out[where].view(values.shape).copy_(values)
    else:
        out.index_copy_(0, where, values.reshape(-1, *out.shape[1:]))
