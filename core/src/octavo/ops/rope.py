"""Rotary position embedding (Su et al., 2021), half-rotation style: dimension i is paired with i + R / 2.

Shapes: T tokens, H query heads, Hkv key heads, D head_dim, R rotated dimensions (R <= D), P positions in the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from octavo.ops.attention import divided
from octavo.ops.catalogue import DEFAULT_TOLERANCE, OpDef, define
from octavo.ops.samples import gaussian, integers

Tensor = torch.Tensor


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first R dimensions of every head; the other D - R pass through. Returns new contiguous tensors.

    q [T, H, D], k [T, Hkv, D], possibly strided; positions int64 [T]; cos_sin [P, R]: R / 2 cosines, then R / 2 sines.
    """
    cos, sin = cos_sin[positions].to(q.dtype)[:, None].chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if x.shape[-1] > 2 * half:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, dim=-1)


def qkv_norm_rope(
    ops: Any,
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection, norm queries and keys, rotate them. Returns q [T, H, D], k and v [T, Hkv, D].

    qkv [T, (H + 2 Hkv) D]: queries, keys, values. cos_sin as in `rope`; None: no rotation.
    q_weight, k_weight: None (no norm), [D] (each head by itself) or [H D] and [Hkv D] (a token's heads as one row).
    The results may be views of qkv (rows strided, the last dimension contiguous), which the caller gives up.
    """
    num_packed = num_heads + 2 * num_kv_heads
    head_dim = qkv.shape[1] // num_packed
    heads = qkv.view(qkv.shape[0], num_packed, head_dim)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_weight is not None and k_weight is not None:
        if q_weight.shape[0] == head_dim:
            q, k = ops.rms_norm(q, q_weight, eps), ops.rms_norm(k, k_weight, eps)
        else:
            q = ops.rms_norm(q.flatten(1), q_weight, eps).view(q.shape)
            k = ops.rms_norm(k.flatten(1), k_weight, eps).view(k.shape)
    if cos_sin is not None:
        q, k = ops.rope(q, k, positions, cos_sin)
    return q, k, v


def qkv_norm_rope_write(
    ops: Any,
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`qkv_norm_rope`, and keys and values go straight into the cache. Returns q [T, H, D] and both caches.

    The first nine arguments as there; caches and slots as in `kv_write`. k / k_scale and v / v_scale are stored; a
    scale is a number, or float32 [Hkv]. q may be a view of qkv, which the caller gives up.
    """
    q, k, v = ops.qkv_norm_rope(qkv, positions, cos_sin, q_weight, k_weight, eps, num_heads, num_kv_heads)
    return q, *ops.kv_write(divided(k, k_scale), divided(v, v_scale), k_cache, v_cache, slots)


def _table(num_positions: int, rotated: int, dtype: str) -> Tensor:
    angles = torch.arange(num_positions)[:, None] * 10000.0 ** (-torch.arange(0, rotated, 2) / rotated)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(getattr(torch, dtype))


def _rope_samples(dtype: str) -> Iterable[tuple[Any, ...]]:
    for tokens, heads, kv_heads, dim, rotated in ((1, 4, 2, 64, 64), (7, 3, 1, 80, 32), (5, 8, 8, 128, 128)):
        q, k = (
            gaussian(tokens, heads, dim, dtype=dtype, seed=1),
            gaussian(tokens, kv_heads, dim, dtype=dtype, seed=2),
        )
        yield q, k, integers(tokens, high=100, seed=3), _table(100, rotated, dtype)


def _qkv_samples(dtype: str) -> Iterable[tuple[Any, ...]]:
    for tokens, heads, kv_heads, dim, norm in (
        (1, 4, 2, 64, ""),
        (7, 6, 2, 64, "head"),
        (5, 4, 4, 32, "row"),
        (0, 4, 2, 64, "head"),
    ):
        qkv = gaussian(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype, seed=1)
        widths = {"": None, "head": (dim, dim), "row": (heads * dim, kv_heads * dim)}[norm]
        weights = [1 + gaussian(n, seed=4, scale=0.1).to(qkv.dtype) for n in widths] if widths else [None, None]
        positions = integers(tokens, high=100, seed=3)
        yield qkv, positions, _table(100, dim, dtype), *weights, 1e-6, heads, kv_heads
        yield qkv, positions, None, *weights, 1e-6, heads, kv_heads


def _written_samples(dtype: str) -> Iterable[tuple[Any, ...]]:
    for i, sample in enumerate(_qkv_samples(dtype)):
        qkv, heads, kv_heads = sample[0], *sample[6:8]
        head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
        # Either order of heads and offsets within a block; scales are powers of two, which divide exactly.
        shape = (3, kv_heads, 16, head_dim) if i % 2 else (3, 16, kv_heads, head_dim)
        caches = [torch.zeros(shape, dtype=qkv.dtype) for _ in range(2)]
        caches = caches if i % 2 else [cache.transpose(1, 2) for cache in caches]
        slots = torch.randperm(48, generator=torch.Generator().manual_seed(3))[: len(qkv)]
        by_head = 2.0 ** torch.arange(kv_heads)
        yield *sample, *caches, slots, *((0.5, 4.0), (by_head, 1 / by_head), (1.0, 1.0))[i % 3]


def _qkv_params(sample: tuple[Any, ...]) -> dict[str, object]:
    qkv, _, cos_sin, q_weight, _, _, num_heads, num_kv_heads = sample[:8]
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    norm = "none" if q_weight is None else "head" if q_weight.shape[0] == head_dim else "row"
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rotated": 0 if cos_sin is None else cos_sin.shape[1],
        "norm": norm,
    }


define(OpDef(name="rope", reference=rope, samples=_rope_samples, tolerance=DEFAULT_TOLERANCE))
define(
    OpDef(
        name="qkv_norm_rope",
        params=_qkv_params,
        reference=qkv_norm_rope,
        samples=_qkv_samples,
        tolerance=DEFAULT_TOLERANCE,
        given_up=frozenset({"qkv"}),
        parts=("rms_norm", "rope"),
    )
)
define(
    OpDef(
        name="qkv_norm_rope_write",
        params=_qkv_params,
        reference=qkv_norm_rope_write,
        samples=_written_samples,
        tolerance=DEFAULT_TOLERANCE,
        given_up=frozenset({"qkv"}),
        parts=("qkv_norm_rope", "kv_write"),
    )
)
