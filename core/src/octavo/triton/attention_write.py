"""Writing a step's keys and values into the paged cache.

Shapes: T tokens, Hkv KV heads, D head_dim, N tokens of a block.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kv_write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slots,
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
    k_inverse,
    v_inverse,
    LIMIT: tl.constexpr,
    HKV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
):
    """Grid (T,): token t's heads go to slot slots[t] = block * N + offset.

    LIMIT > 0: the cache's largest number; values times k_inverse, v_inverse are cut to it, as a narrow format has no
    infinity to fall into.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    block = slot // N
    offset = slot % N
    heads = tl.arange(0, BLOCK_H)[:, None]
    columns = tl.arange(0, D)[None, :]
    real = heads < HKV
    keys = tl.load(k + token * k_in_stride_t + heads * k_in_stride_h + columns, mask=real)
    values = tl.load(v + token * v_in_stride_t + heads * v_in_stride_h + columns, mask=real)
    if LIMIT > 0:
        keys = tl.minimum(tl.maximum(keys.to(tl.float32) * k_inverse, -LIMIT), LIMIT)
        values = tl.minimum(tl.maximum(values.to(tl.float32) * v_inverse, -LIMIT), LIMIT)
    k_at = k_cache + block * k_stride_b + offset * k_stride_n + heads * k_stride_h + columns
    v_at = v_cache + block * v_stride_b + offset * v_stride_n + heads * v_stride_h + columns
    tl.store(k_at, keys.to(k_cache.dtype.element_ty), mask=real)
    tl.store(v_at, values.to(v_cache.dtype.element_ty), mask=real)
