"""Rotary embedding, and the composites after the QKV projection: split, optional norms of q and k, rotation, and the
write of keys and values into the paged cache.

Shapes: T tokens, H query heads, Hkv KV heads, D head_dim, R rotated dimensions (dimension i pairs with i + R / 2).
A tile is some heads of one token, read as three parts so that no pair crosses a thread:

    | first: R / 2 | second: R / 2 | rest: D - R |
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from octavo.triton.attention_write import head_scales, largest, narrowed
from octavo.triton.overlap import IN_ORDER, Overlap

Tensor = torch.Tensor

HEADS = 8
"""Heads of a program's tile: few, so that one decoded token already fills several programs."""


@triton.jit
def _load_turn(cos_sin_ptr, position, half, pair, mask):
    at = cos_sin_ptr + position * (2 * half) + pair
    cos = tl.load(at, mask=mask, other=1.0).to(tl.float32)
    return cos, tl.load(at + half, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rope_kernel(
    q_ptr,
    k_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_out_ptr,
    k_out_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    num_heads,
    num_kv_heads,
    half,
    head_dim,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    START: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    # A program has query heads or key heads: not every compiler can choose between two tensors head by head.
    tile = tl.program_id(1)
    q_tiles = tl.cdiv(num_heads, BLOCK_H)
    is_q = tile < q_tiles
    head = tl.where(is_q, tile, tile - q_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
    valid = head < tl.where(is_q, num_heads, num_kv_heads)
    if is_q:
        source = q_ptr + token * stride_qt + head * stride_qh
        target = q_out_ptr + (token * num_heads + head) * head_dim
    else:
        source = k_ptr + token * stride_kt + head * stride_kh
        target = k_out_ptr + (token * num_kv_heads + head) * head_dim
    pair = tl.arange(0, BLOCK_HALF)
    mask = valid[:, None] & (pair < half)[None, :]
    dtype: tl.constexpr = q_out_ptr.dtype.element_ty
    START()
    cos, sin = _load_turn(cos_sin_ptr, tl.load(positions_ptr + token), half, pair, pair < half)
    first = tl.load(source[:, None] + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source[:, None] + half + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(target[:, None] + pair[None, :], (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(target[:, None] + half + pair[None, :], (second * cos + first * sin).to(dtype), mask=mask)
    if BLOCK_REST > 0:
        column = 2 * half + tl.arange(0, BLOCK_REST)
        mask = valid[:, None] & (column < head_dim)[None, :]
        rest = tl.load(source[:, None] + column[None, :], mask=mask, other=0.0)
        tl.store(target[:, None] + column[None, :], rest, mask=mask)


@triton.jit
def _load_weight(q_weight_ptr, k_weight_ptr, is_q, column, mask):
    """The weights of each head's columns: a tile of the query norm's where is_q, else of the key norm's."""
    q_weight = tl.load(q_weight_ptr + column, mask=mask & is_q, other=0.0).to(tl.float32)
    return q_weight + tl.load(k_weight_ptr + column, mask=mask & (is_q == 0), other=0.0).to(tl.float32)


@triton.jit
def _qkv_norm_rope_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_scales_ptr,
    v_scales_ptr,
    stride_t,
    k_stride_b,
    k_stride_h,
    k_stride_n,
    k_stride_d,
    v_stride_b,
    v_stride_h,
    v_stride_n,
    v_stride_d,
    eps,
    num_heads,
    num_kv_heads,
    half,
    head_dim,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
    ROUND: tl.constexpr,
    WRITE: tl.constexpr,
    LIMIT: tl.constexpr,
    N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    START: tl.constexpr,
):
    """WRITE: keys and values go to slot slots[t] = block * N + offset of the caches instead of back into qkv."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_H)
    num_turned = num_heads + num_kv_heads
    if NORM == "row":  # program 0 holds all query heads, program 1 all key heads, program 2 all value heads
        part = tl.program_id(1)
        num_here = tl.where(part == 0, num_heads, num_kv_heads)
        head = tl.where(part == 0, 0, num_heads + (part - 1) * num_kv_heads) + lane
        valid = lane < num_here
    else:
        head = tl.program_id(1) * BLOCK_H + lane
        valid = head < num_turned + (num_kv_heads if WRITE else 0)
    is_q = (head < num_heads)[:, None]
    turned = (head < num_turned)[:, None]
    pair = tl.arange(0, BLOCK_HALF)
    column = tl.arange(0, BLOCK_REST if BLOCK_REST > 0 else 1)
    mask = valid[:, None] & (pair < half)[None, :]
    rest_mask = valid[:, None] & (column < head_dim - 2 * half)[None, :]
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    if NORM != "none":
        base = tl.zeros([BLOCK_H, 1], dtype=tl.int32)
        if NORM == "row":
            base += (tl.where(head < num_heads, head, head - num_heads) * head_dim)[:, None]
        first_weight = _load_weight(q_weight_ptr, k_weight_ptr, is_q, base + pair[None, :], mask & turned)
        second_weight = _load_weight(q_weight_ptr, k_weight_ptr, is_q, base + half + pair[None, :], mask & turned)
        if BLOCK_REST > 0:
            at = base + 2 * half + column[None, :]
            rest_weight = _load_weight(q_weight_ptr, k_weight_ptr, is_q, at, rest_mask & turned)

    START()
    at = qkv_ptr + token * stride_t + (head * head_dim)[:, None] + pair[None, :]
    rest_at = qkv_ptr + token * stride_t + (head * head_dim + 2 * half)[:, None] + column[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    if BLOCK_REST > 0:
        rest = tl.load(rest_at, mask=rest_mask, other=0.0).to(tl.float32)

    if NORM != "none":
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if BLOCK_REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        if NORM == "row":
            inverse = tl.rsqrt(tl.sum(squares, axis=0) / (num_here * head_dim) + eps) + tl.zeros_like(squares)
        else:
            inverse = tl.rsqrt(squares / head_dim + eps)
        first = tl.where(turned, _normed(first, inverse, first_weight, ROUND, dtype), first)
        second = tl.where(turned, _normed(second, inverse, second_weight, ROUND, dtype), second)
        if BLOCK_REST > 0:
            rest = tl.where(turned, _normed(rest, inverse, rest_weight, ROUND, dtype), rest)

    if ROTATE:
        cos, sin = _load_turn(cos_sin_ptr, tl.load(positions_ptr + token), half, pair, pair < half)
        first, second = (
            tl.where(turned, first * cos - second * sin, first),
            tl.where(turned, second * cos + first * sin, second),
        )
    first, second = first.to(dtype), second.to(dtype)
    if WRITE:
        slot = tl.load(slots_ptr + token)
        block, offset = slot // N, slot % N
        new = valid & (head >= num_heads)
        kv_head = tl.where(turned, head[:, None] - num_heads, head[:, None] - num_turned)
        k_at = k_cache_ptr + block * k_stride_b + offset * k_stride_n + kv_head * k_stride_h
        v_at = v_cache_ptr + block * v_stride_b + offset * v_stride_n + kv_head * v_stride_h
        keys, values = new[:, None] & turned, new[:, None] & (turned == 0)
        scale = None
        if k_scales_ptr is not None:
            k_scale = tl.load(k_scales_ptr + kv_head, mask=keys, other=1.0)
            scale = tl.where(turned, k_scale, tl.load(v_scales_ptr + kv_head, mask=values, other=1.0))
        kind: tl.constexpr = k_cache_ptr.dtype.element_ty
        first_new, second_new = narrowed(first, scale, LIMIT, kind), narrowed(second, scale, LIMIT, kind)
        # Not every compiler can choose between two tensors head by head: each has stores of its own.
        tl.store(k_at + pair[None, :] * k_stride_d, first_new, mask=mask & keys)
        tl.store(v_at + pair[None, :] * v_stride_d, first_new, mask=mask & values)
        tl.store(k_at + (half + pair[None, :]) * k_stride_d, second_new, mask=mask & keys)
        tl.store(v_at + (half + pair[None, :]) * v_stride_d, second_new, mask=mask & values)
        if BLOCK_REST > 0:
            rest_new = narrowed(rest.to(dtype), scale, LIMIT, kind)
            rest_column = 2 * half + column[None, :]
            tl.store(k_at + rest_column * k_stride_d, rest_new, mask=rest_mask & keys)
            tl.store(v_at + rest_column * v_stride_d, rest_new, mask=rest_mask & values)
            rest_mask = rest_mask & is_q
        mask = mask & is_q
    tl.store(at, first, mask=mask)
    tl.store(at + half, second, mask=mask)
    if BLOCK_REST > 0 and NORM != "none":
        tl.store(rest_at, rest.to(dtype), mask=rest_mask)


@triton.jit
def _normed(x, inverse, weight, ROUND: tl.constexpr, dtype: tl.constexpr):
    """A tile of heads over their root mean squares, times the weight, as `rms_norm` rounds it."""
    x *= inverse[:, None]
    if ROUND:
        x = x.to(dtype).to(tl.float32)
    return (x * weight).to(dtype).to(tl.float32)


def _parts(half: int, head_dim: int) -> tuple[int, int]:
    """Padded widths of a half and of the rest; 0: there is no rest."""
    rest = head_dim - 2 * half
    return triton.next_power_of_2(half), triton.next_power_of_2(rest) if rest else 0


def rope(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, overlap: Overlap = IN_ORDER
) -> tuple[Tensor, Tensor]:
    """The op `rope`: q [T, H, D], k [T, Hkv, D], rows possibly strided; both in one launch, new contiguous tensors."""
    assert q.stride(2) == k.stride(2) == 1, "heads are read in order"
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if num_tokens == 0:
        return q_out, k_out
    half = cos_sin.shape[1] // 2
    block_half, block_rest = _parts(half, head_dim)
    overlap.launch(
        _rope_kernel,
        (num_tokens, triton.cdiv(num_heads, HEADS) + triton.cdiv(num_kv_heads, HEADS)),
        q,
        k,
        positions,
        cos_sin,
        q_out,
        k_out,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        num_heads,
        num_kv_heads,
        half,
        head_dim,
        BLOCK_H=HEADS,
        BLOCK_HALF=block_half,
        BLOCK_REST=block_rest,
        START=overlap.start,
        num_warps=4,
        **overlap.options,
    )
    return q_out, k_out


def qkv_norm_rope(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    *,
    overlap: Overlap = IN_ORDER,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op `qkv_norm_rope` in one launch (none if there is nothing to do); q, k and v are views of qkv, which it
    overwrites: values stay where they are. qkv [T, (H + 2 Hkv) D], its rows possibly strided."""
    q, k, v = split(qkv, num_heads, num_kv_heads)
    if cos_sin is not None or q_weight is not None:
        no_caches = (None,) * 5, (0,) * 8
        _launch(qkv, positions, cos_sin, q_weight, k_weight, eps, num_heads, num_kv_heads, *no_caches, {}, overlap)
    return q, k, v


def qkv_norm_rope_write(
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
    *,
    overlap: Overlap = IN_ORDER,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op `qkv_norm_rope_write` in one launch; q is a view of qkv, whose keys and values stay as they were."""
    assert k_cache.dtype == v_cache.dtype, "both caches hold one kind of numbers"
    scales = head_scales(k_scale, v_scale, num_kv_heads, qkv.device)
    caches = (k_cache, v_cache, slots, *scales), (*k_cache.stride(), *v_cache.stride())
    write = {"WRITE": True, "LIMIT": largest(k_cache.dtype), "N": k_cache.shape[2]}
    _launch(qkv, positions, cos_sin, q_weight, k_weight, eps, num_heads, num_kv_heads, *caches, write, overlap)
    return split(qkv, num_heads, num_kv_heads)[0], k_cache, v_cache


def split(qkv: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, D], k and v [T, Hkv, D]: views of qkv [T, (H + 2 Hkv) D]."""
    assert qkv.stride(1) == 1, "rows are read in order"
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return q, k, v


def _launch(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    caches: tuple[Tensor | None, ...],
    strides: tuple[int, ...],
    write: Mapping[str, Any],
    overlap: Overlap,
) -> None:
    num_tokens = qkv.shape[0]
    if num_tokens == 0:
        return
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    half = cos_sin.shape[1] // 2 if cos_sin is not None else head_dim // 2
    block_half, block_rest = _parts(half, head_dim)
    norm = "none" if q_weight is None else "head" if q_weight.shape[0] == head_dim else "row"
    num_written = num_kv_heads if write else 0
    if norm == "row":
        block_h, num_blocks = triton.next_power_of_2(max(num_heads, num_kv_heads)), 3 if write else 2
    else:
        block_h, num_blocks = HEADS, triton.cdiv(num_heads + num_kv_heads + num_written, HEADS)
    overlap.launch(
        _qkv_norm_rope_kernel,
        (num_tokens, num_blocks),
        qkv,
        positions,
        cos_sin,
        q_weight,
        k_weight,
        *caches,
        qkv.stride(0),
        *strides,
        eps,
        num_heads,
        num_kv_heads,
        half,
        head_dim,
        **({"WRITE": False, "LIMIT": 0.0, "N": 1} | dict(write)),
        ROTATE=cos_sin is not None,
        NORM=norm,
        ROUND=q_weight is not None and q_weight.dtype == qkv.dtype,
        BLOCK_H=block_h,
        BLOCK_HALF=block_half,
        BLOCK_REST=block_rest,
        START=overlap.start,
        num_warps=8 if block_h * block_half > 2048 else 4,
        **overlap.options,
    )
