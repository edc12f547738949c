"""Rotary embedding, and the composite after the QKV projection: split, optional norms of q and k, rotation.

Shapes: T tokens, H query heads, Hkv KV heads, D head_dim, R rotated dimensions (dimension i pairs with i + R / 2).
A tile is some heads of one token, read as three parts so that no pair crosses a thread:

    | first: R / 2 | second: R / 2 | rest: D - R |
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

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
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_q = head < num_heads
    kv_head = head - num_heads
    valid = head < num_heads + num_kv_heads
    source = tl.where(
        is_q, q_ptr + token * stride_qt + head * stride_qh, k_ptr + token * stride_kt + kv_head * stride_kh
    )
    target = tl.where(
        is_q,
        q_out_ptr + (token * num_heads + head) * head_dim,
        k_out_ptr + (token * num_kv_heads + kv_head) * head_dim,
    )
    pair = tl.arange(0, BLOCK_HALF)
    mask = valid[:, None] & (pair < half)[None, :]
    dtype: tl.constexpr = q_out_ptr.dtype.element_ty
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
    stride_t,
    eps,
    num_heads,
    num_kv_heads,
    half,
    head_dim,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_H)
    if NORM == "row":  # program 0 holds all query heads, program 1 all key heads
        head = tl.program_id(1) * num_heads + lane
        valid = lane < tl.where(tl.program_id(1) == 0, num_heads, num_kv_heads)
    else:
        head = tl.program_id(1) * BLOCK_H + lane
        valid = head < num_heads + num_kv_heads
    pair = tl.arange(0, BLOCK_HALF)
    at = qkv_ptr + token * stride_t + (head * head_dim)[:, None] + pair[None, :]
    mask = valid[:, None] & (pair < half)[None, :]
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    if BLOCK_REST > 0:
        column = tl.arange(0, BLOCK_REST)
        rest_at = qkv_ptr + token * stride_t + (head * head_dim + 2 * half)[:, None] + column[None, :]
        rest_mask = valid[:, None] & (column < head_dim - 2 * half)[None, :]
        rest = tl.load(rest_at, mask=rest_mask, other=0.0).to(tl.float32)

    if NORM != "none":
        is_q = (head < num_heads)[:, None]
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if BLOCK_REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        if NORM == "row":
            num_columns = tl.where(tl.program_id(1) == 0, num_heads, num_kv_heads) * head_dim
            inverse = tl.rsqrt(tl.sum(squares, axis=0) / num_columns + eps) + tl.zeros_like(squares)
            base = (tl.where(head < num_heads, head, head - num_heads) * head_dim)[:, None]
        else:
            inverse = tl.rsqrt(squares / head_dim + eps)
            base = tl.zeros([BLOCK_H, 1], dtype=tl.int32)
        first, second = first * inverse[:, None], second * inverse[:, None]
        if ROUND:
            first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        first *= _load_weight(q_weight_ptr, k_weight_ptr, is_q, base + pair[None, :], mask)
        second *= _load_weight(q_weight_ptr, k_weight_ptr, is_q, base + half + pair[None, :], mask)
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        if BLOCK_REST > 0:
            rest = rest * inverse[:, None]
            if ROUND:
                rest = rest.to(dtype).to(tl.float32)
            rest *= _load_weight(q_weight_ptr, k_weight_ptr, is_q, base + 2 * half + column[None, :], rest_mask)
            tl.store(rest_at, rest.to(dtype), mask=rest_mask)

    if ROTATE:
        cos, sin = _load_turn(cos_sin_ptr, tl.load(positions_ptr + token), half, pair, pair < half)
        first, second = first * cos - second * sin, second * cos + first * sin
    tl.store(at, first.to(dtype), mask=mask)
    tl.store(at + half, second.to(dtype), mask=mask)


def _parts(half: int, head_dim: int) -> tuple[int, int]:
    """Padded widths of a half and of the rest; 0: there is no rest."""
    rest = head_dim - 2 * half
    return triton.next_power_of_2(half), triton.next_power_of_2(rest) if rest else 0


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
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
    _rope_kernel[(num_tokens, triton.cdiv(num_heads + num_kv_heads, HEADS))](
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
        num_warps=4,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """The op `qkv_norm_rope` in one launch (none if there is nothing to do); q, k and v are views of qkv, which it
    overwrites: values stay where they are. qkv [T, (H + 2 Hkv) D], its rows possibly strided."""
    assert qkv.stride(1) == 1, "rows are read in order"
    num_tokens = qkv.shape[0]
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, head_dim))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    normed = q_weight is not None and k_weight is not None
    if num_tokens == 0 or not (normed or cos_sin is not None):
        return q, k, v
    half = cos_sin.shape[1] // 2 if cos_sin is not None else head_dim // 2
    block_half, block_rest = _parts(half, head_dim)
    norm = "none" if not normed else "head" if q_weight.shape[0] == head_dim else "row"  # type: ignore[union-attr]
    if norm == "row":
        block_h, num_blocks = triton.next_power_of_2(max(num_heads, num_kv_heads)), 2
    else:
        block_h, num_blocks = HEADS, triton.cdiv(num_heads + num_kv_heads, HEADS)
    _qkv_norm_rope_kernel[(num_tokens, num_blocks)](
        qkv,
        positions,
        cos_sin,
        q_weight,
        k_weight,
        qkv.stride(0),
        eps,
        num_heads,
        num_kv_heads,
        half,
        head_dim,
        ROTATE=cos_sin is not None,
        NORM=norm,
        ROUND=normed and q_weight.dtype == qkv.dtype,  # type: ignore[union-attr]
        BLOCK_H=block_h,
        BLOCK_HALF=block_half,
        BLOCK_REST=block_rest,
        num_warps=8 if block_h * block_half > 2048 else 4,
    )
    return q, k, v
