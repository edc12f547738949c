"""Paged attention: writing keys and values into blocks, and attending over them.

Shapes: T tokens, S sequences, H query heads, Hkv KV heads, D head_dim, B blocks, N tokens of a block.

    tokens    | seq 0: 1 | seq 1: q_len 3 | ...        q_starts = [0, 1, 4, ...]
    positions   kv_len-1   kv_len-3 .. kv_len-1        the last q_len positions of the context are the queries
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from octavo.ops.catalogue import DEFAULT_TOLERANCE, OpDef, define
from octavo.ops.samples import gaussian
from octavo.plugin.contracts import AttnBatch, AttnLayer, Device, KVView
from octavo.plugin.data import YES, Support, no
from octavo.plugin.specs import AttentionSpec, BatchLimits, KVLayout, KVSpec

Tensor = torch.Tensor


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Write token t's key and value to slot slots[t] = block * N + offset. In place; returns both caches.

    k, v [T, Hkv, D], possibly strided; caches [B, Hkv, N, D] in any stride order and dtype, of int8 as `quantized`
    says; slots int64 [T].
    """
    block_size = k_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    k_cache[blocks, :, offsets] = narrowed(k, k_cache.dtype)
    v_cache[blocks, :, offsets] = narrowed(v, v_cache.dtype)
    return k_cache, v_cache


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in the cache's dtype. What an 8-bit format cannot hold becomes its largest value, not a NaN."""
    if dtype == torch.int8:
        return quantized(x)
    if dtype.is_floating_point and dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


def quantized(x: Tensor) -> Tensor:
    """Rows x [..., D] as an int8 cache keeps them: int8 [..., D + 4], codes of -127 .. 127 and the bytes of a float32.

    A number is its code times the row's scale, which is the largest absolute number over 127.
    """
    rows = x.float()
    scale = rows.abs().amax(dim=-1, keepdim=True) / 127
    inverse = torch.where((scale > 1e-30) & scale.isfinite(), 1 / scale, 0.0)
    codes = (rows * inverse).round().nan_to_num(0.0)
    return torch.cat((codes.to(torch.int8), scale.view(torch.int8)), dim=-1)


def restored(rows: Tensor) -> Tensor:
    """What `quantized` gave, as numbers: float32 [..., D]. Rows of other dtypes are returned as they are."""
    if rows.dtype != torch.int8:
        return rows
    scales = rows[..., -4:].clone(memory_format=torch.contiguous_format)
    return rows[..., :-4].float() * scales.view(torch.float32)


def divided(x: Tensor, scale: float | Tensor) -> Tensor:
    """x [n, Hkv, D] over the scale of a cache, see `AttnLayer`: what is stored."""
    if isinstance(scale, Tensor):
        return x / scale[:, None]
    return x if scale == 1.0 else x / scale


def multiplied(x: Tensor, scale: float | Tensor) -> Tensor:
    """What `divided` gave, read back: float32 if there is a scale."""
    if isinstance(scale, Tensor):
        return x.float() * scale[:, None]
    return x if scale == 1.0 else x.float() * scale


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence's newest tokens over its whole context, already in the cache.

    q [T, H, D]; caches [B, Hkv, N, D], of int8 as `quantized` says; block_table int32 [S, M]; q_starts int32 [S + 1];
    kv_lens int32 [S], 0 for padding. A query at position p sees positions p - window + 1 .. p. sinks float32 [H]: a
    logit of each head that takes weight and gives no value. Softmax in float32. Returns a new [T, H, D] in q's dtype;
    tokens beyond q_starts[S] become zero. Blocks that no query sees are never read: they may belong to others by now.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts, lengths = q_starts.tolist(), kv_lens.tolist()
    for i, kv_len in enumerate(lengths):
        rows = slice(starts[i], starts[i + 1])
        if rows.stop > rows.start:
            k, v, first = gather_context(k_cache, v_cache, block_table[i], kv_len, rows.stop - rows.start, window)
            out[rows] = attend(q[rows], k, v, kv_len - first, scale, window=window, softcap=softcap, sinks=sinks)
    return out


def gather_context(
    k_cache: Tensor, v_cache: Tensor, table: Tensor, kv_len: int, q_len: int, window: int | None
) -> tuple[Tensor, Tensor, int]:
    """Keys and values [L, Hkv, D] of one sequence from the first position that any query sees, and that position."""
    block_size = k_cache.shape[2]
    first = max(0, kv_len - q_len - window + 1) if window is not None else 0
    position = torch.arange(first, kv_len, device=table.device)
    blocks = table[position // block_size].long()
    k, v = (restored(cache[blocks, :, position % block_size]) for cache in (k_cache, v_cache))
    return k, v, first


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_len: int,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Dense causal attention in float32: q [n, H, D], the last n of kv_len positions, over k, v [kv_len, Hkv, D]."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    # [Hkv, H / Hkv, n, D]: the query heads that share a KV head are a batch dimension, so that KV is never repeated.
    grouped = q.float().view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    keys, values = (t.float().transpose(0, 1)[:, None] for t in (k, v))
    scores = grouped @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    query = torch.arange(kv_len - num_queries, kv_len, device=q.device)[:, None]
    key = torch.arange(kv_len, device=q.device)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        extra = sinks.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, extra), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return (weights @ values).permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim).to(q.dtype)


@dataclass(frozen=True, kw_only=True)
class ReferencePlan:
    """A step as the reference walks it. spans: (sequence, first token, past the last, kv_len), none of them empty."""

    spans: Sequence[tuple[int, int, int, int]]
    num_tokens: int
    block_table: Tensor
    slots: Tensor


class ReferenceAttention:
    """The attention of a platform that brings none: `kv_write` and `paged_attention`, one sequence after another."""

    name: ClassVar[str] = "reference"

    @classmethod
    def supports(cls, spec: AttentionSpec, device: Device) -> Support:
        return YES if spec.causal else no("only causal attention is implemented")

    @classmethod
    def kv_layout(cls, spec: KVSpec) -> KVLayout | None:
        return None

    def __init__(self, spec: AttentionSpec, limits: BatchLimits, device: Device) -> None:
        self._spec = spec

    def plan(self, batch: AttnBatch, *, graph: bool) -> ReferencePlan:
        starts, lengths = batch.q_starts_host.tolist(), batch.kv_lens_host.tolist()
        spans = [(i, starts[i], starts[i + 1], kv_len) for i, kv_len in enumerate(lengths) if starts[i + 1] > starts[i]]
        return ReferencePlan(
            spans=spans,
            num_tokens=spans[-1][2] if spans else 0,
            block_table=batch.block_table,
            slots=batch.slots,
        )

    def run(
        self, layer: AttnLayer, q: Tensor, k: Tensor, v: Tensor, kv: KVView, plan: ReferencePlan, out: Tensor
    ) -> Tensor:
        """q, out [T, H, D]; k, v [T, Hkv, D]. Fills and returns `out`; padding tokens become zero.

        A scaled cache stores k / k_scale and v / v_scale.
        """
        spec = self._spec
        kv_write(divided(k, layer.k_scale), divided(v, layer.v_scale), kv.k, kv.v, plan.slots)
        for i, start, stop, kv_len in plan.spans:
            keys, values, first = gather_context(kv.k, kv.v, plan.block_table[i], kv_len, stop - start, spec.window)
            out[start:stop] = attend(
                q[start:stop],
                multiplied(keys, layer.k_scale),
                multiplied(values, layer.v_scale),
                kv_len - first,
                spec.scale,
                window=spec.window,
                softcap=spec.softcap,
                sinks=layer.sinks,
            )
        out[plan.num_tokens :] = 0
        return out


def _kv_write_samples(dtype: str) -> Iterable[tuple[Any, ...]]:
    for tokens, heads, dim, block_size in ((1, 2, 64, 16), (9, 1, 80, 16), (0, 2, 64, 16), (20, 4, 128, 32)):
        k, v = (
            gaussian(tokens, heads, dim, dtype=dtype, seed=1),
            gaussian(tokens, heads, dim, dtype=dtype, seed=2),
        )
        caches = [torch.zeros(4, heads, block_size, dim, dtype=k.dtype) for _ in range(2)]
        slots = torch.randperm(4 * block_size, generator=torch.Generator().manual_seed(3))[:tokens]
        yield k, v, *caches, slots


def _paged_samples(dtype: str) -> Iterable[tuple[Any, ...]]:
    for window, softcap, with_sinks in (
        (None, None, False),
        (8, None, False),
        (None, 20.0, False),
        (8, None, True),
    ):
        for num_heads, num_kv_heads, dim in ((4, 2, 64), (3, 1, 80), (8, 8, 32)):
            q_lens, kv_lens = (1, 1, 5, 17, 0), (9, 33, 5, 40, 0)
            table = 1 + torch.randperm(20, generator=torch.Generator().manual_seed(4)).view(5, 4).int()
            starts = torch.tensor((0, *q_lens)).cumsum(0).int()
            caches = [gaussian(21, num_kv_heads, 16, dim, dtype=dtype, seed=s) for s in (1, 2)]
            q = gaussian(int(starts[-1]) + 2, num_heads, dim, dtype=dtype, seed=3)
            sinks = gaussian(num_heads, seed=5) if with_sinks else None
            scale = dim**-0.5
            yield q, *caches, table, starts, torch.tensor(kv_lens).int(), scale, window, softcap, sinks


define(OpDef(name="kv_write", reference=kv_write, samples=_kv_write_samples, tolerance=DEFAULT_TOLERANCE))
define(OpDef(name="paged_attention", reference=paged_attention, samples=_paged_samples, tolerance=DEFAULT_TOLERANCE))
