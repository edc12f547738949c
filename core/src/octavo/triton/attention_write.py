"""Writing a step's keys and values into the paged cache.

Shapes: T tokens, Hkv KV heads, D head_dim, N tokens of a block.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from octavo.plugin.contracts import KVView
from octavo.triton.overlap import IN_ORDER, Overlap

Tensor = torch.Tensor


@triton.jit
def narrowed(x, scale, LIMIT: tl.constexpr, dtype: tl.constexpr):
    """x / scale in the cache's number format. scale None: 1. LIMIT > 0: the format's largest number, to which values
    are cut, as a narrow format has no infinity to fall into."""
    if scale is not None:
        x = x.to(tl.float32) / scale
    if LIMIT > 0:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -LIMIT), LIMIT)
    return x.to(dtype)


@triton.jit
def kv_write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_scales,
    v_scales,
    k_in_stride_t,
    k_in_stride_h,
    v_in_stride_t,
    v_in_stride_h,
    k_stride_b,
    k_stride_h,
    k_stride_n,
    v_stride_b,
    v_stride_h,
    v_stride_n,
    LIMIT: tl.constexpr,
    HKV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    START: tl.constexpr,
):
    """Grid (T,): token t's heads go to slot slots[t] = block * N + offset. Scales float32 [Hkv], or None for 1."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_H)[:, None]
    columns = tl.arange(0, D)[None, :]
    real = heads < HKV
    k_scale = None
    v_scale = None
    if k_scales is not None:
        k_scale = tl.load(k_scales + heads, mask=real, other=1.0)
        v_scale = tl.load(v_scales + heads, mask=real, other=1.0)
    START()
    slot = tl.load(slots + token)
    block = slot // N
    offset = slot % N
    keys = tl.load(k + token * k_in_stride_t + heads * k_in_stride_h + columns, mask=real)
    values = tl.load(v + token * v_in_stride_t + heads * v_in_stride_h + columns, mask=real)
    k_at = k_cache + block * k_stride_b + offset * k_stride_n + heads * k_stride_h + columns
    v_at = v_cache + block * v_stride_b + offset * v_stride_n + heads * v_stride_h + columns
    tl.store(k_at, narrowed(keys, k_scale, LIMIT, k_cache.dtype.element_ty), mask=real)
    tl.store(v_at, narrowed(values, v_scale, LIMIT, v_cache.dtype.element_ty), mask=real)


def kv_write(
    k: Tensor,
    v: Tensor,
    kv: KVView,
    slots: Tensor,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    *,
    overlap: Overlap = IN_ORDER,
) -> None:
    """The op `kv_write` with a layer's scales, in one launch. head_dim is a power of two."""
    num_heads, head_dim = k.shape[1:]
    assert k.stride(2) == v.stride(2) == kv.k.stride(3) == kv.v.stride(3) == 1, "heads lie in order"
    overlap.launch(
        kv_write_kernel,
        (slots.shape[0],),
        k,
        v,
        kv.k,
        kv.v,
        slots,
        *head_scales(k_scale, v_scale, num_heads, k.device),
        *k.stride()[:2],
        *v.stride()[:2],
        *kv.k.stride()[:3],
        *kv.v.stride()[:3],
        LIMIT=largest(kv.k.dtype),
        HKV=num_heads,
        BLOCK_H=triton.next_power_of_2(num_heads),
        D=head_dim,
        N=kv.k.shape[2],
        START=overlap.start,
        **overlap.options,
    )


def largest(dtype: torch.dtype) -> float:
    """The largest number of an 8-bit cache; 0 for wider ones, which are not cut."""
    return torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0


def head_scales(
    k_scale: float | Tensor, v_scale: float | Tensor, num_kv_heads: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """A layer's scales as kernels take them: float32 [Hkv] each, or None for both where both are 1."""
    if isinstance(k_scale, float) and isinstance(v_scale, float) and k_scale == v_scale == 1.0:
        return None, None
    k, v = (s if isinstance(s, Tensor) else _repeated(s, num_kv_heads, device) for s in (k_scale, v_scale))
    return k, v


@cache
def _repeated(scale: float, num_kv_heads: int, device: torch.device) -> Tensor:
    """Kept, as recorded launches hold its address."""
    return torch.full((num_kv_heads,), scale, dtype=torch.float32, device=device)
