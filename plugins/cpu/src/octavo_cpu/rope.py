"""Rotary embedding in four vector operations, queries and keys together.

Shapes: T tokens, H query heads, Hkv key heads, D head_dim, R rotated dimensions.
"""

from __future__ import annotations

import torch

from octavo.plugin import YES, OpContext, Support, no

Tensor = torch.Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D], cos and sin [T, 1, R / 2] -> a new tensor, dimensions past R as they are."""
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
        first, second = x[..., : 2 * half].chunk(2, dim=-1)
        first_out, second_out = out[..., : 2 * half].chunk(2, dim=-1)
    else:
        first, second = x.chunk(2, dim=-1)
        first_out, second_out = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=first_out)
    first_out.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=second_out)
    second_out.addcmul_(first, sin)
    return out


def cos_sin_at(positions: Tensor, cos_sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, 1, R / 2] of the positions."""
    cos, sin = cos_sin.index_select(0, positions).to(dtype).unsqueeze(1).chunk(2, dim=-1)
    return cos, sin


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """As the catalogue's `rope`."""
    cos, sin = cos_sin_at(positions, cos_sin, q.dtype)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def supports_qkv(context: OpContext) -> Support:
    """`qkv_norm_rope` here is for models without query and key norms; others gain from `rope` alone."""
    if context.params.get("norm") != "none" or not context.params.get("rotated"):
        return no("rotates only, without norms")
    return YES


def qkv_norm_rope(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_weight: None,
    k_weight: None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the catalogue's `qkv_norm_rope`: queries and keys lie side by side in qkv and are rotated at once."""
    num_rotated, num_all = num_heads + num_kv_heads, num_heads + 2 * num_kv_heads
    heads = qkv.view(qkv.shape[0], num_all, qkv.shape[1] // num_all)
    turned = rotate(heads[:, :num_rotated], *cos_sin_at(positions, cos_sin, qkv.dtype))
    return turned[:, :num_heads], turned[:, num_heads:], heads[:, num_rotated:]
