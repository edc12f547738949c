"""What the attention kernels share: one tile of a paged context against one tile of query rows, and the last step.

Shapes: R query rows of one KV head (tokens x the query heads that share it), L tokens of a tile, D head_dim, N tokens
of a block. The softmax runs online in base 2: `top` [R] is the largest logit so far, `total` [R] the sum of weights
relative to it, `acc` [R, D] the weighted values (Milakov and Gimelshein 2018; Dao et al. 2022).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

# Below any logit, yet finite: top - LOWEST is never inf - inf, so a row that has seen nothing keeps weight 0, not NaN.
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def attend_tile(
    q,
    acc,
    top,
    total,
    tile,
    low,
    high,
    positions,
    table,
    keys,
    values,
    stride_b,
    stride_n,
    scale,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_L: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """Fold tokens tile * BLOCK_L .. of a sequence into (acc, top, total).

    q [R, D] in the number format of the products; positions [R]: each row's position. keys, values: the cache of one
    KV head, strided alike; table: the sequence's block ids. low, high: tokens that any row sees; memory outside is not
    read. scale: positive. MASKED False promises that every row sees the whole tile.
    """
    tokens = tile * BLOCK_L + tl.arange(0, BLOCK_L)
    columns = tl.arange(0, D)
    if MASKED:
        inside = (tokens >= low) & (tokens < high)
        blocks = tl.load(table + tokens // N, mask=inside, other=0).to(tl.int64)
        at = (blocks * stride_b + (tokens % N) * stride_n)[:, None] + columns[None, :]
        k = tl.load(keys + at, mask=inside[:, None], other=0.0)
    else:
        blocks = tl.load(table + tokens // N).to(tl.int64)
        at = (blocks * stride_b + (tokens % N) * stride_n)[:, None] + columns[None, :]
        k = tl.load(keys + at)
    # Float32 inputs must not be rounded to TF32; narrower ones are not affected.
    logits = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (e^2x + 1): right at both ends, where e^2x is inf or 0.
        logits = 1.0 - 2.0 / (tl.exp2(logits * (scale * 2.0 * LOG2E / SOFTCAP)) + 1.0)
        factor = SOFTCAP * LOG2E
    else:
        factor = scale * LOG2E
    if MASKED:
        seen = inside[None, :] & (tokens[None, :] <= positions[:, None])
        if WINDOW > 0:
            seen = seen & (tokens[None, :] > positions[:, None] - WINDOW)
        logits = tl.where(seen, logits, float("-inf"))
    # The factor goes into the exponent's multiply-add: the largest stays the largest, as it is positive.
    new_top = tl.maximum(top, tl.max(logits, 1) * factor)
    weights = tl.exp2(logits * factor - new_top[:, None])
    fade = tl.exp2(top - new_top)
    if MASKED:
        v = tl.load(values + at, mask=inside[:, None], other=0.0)
    else:
        v = tl.load(values + at)
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision="ieee")
    return acc, new_top, total * fade + tl.sum(weights, 1)


@triton.jit
def product_format(query, narrow: tl.constexpr, UPCAST: tl.constexpr):
    """The query tile [R, D] in the format of the products. narrow: the cache has 8 bits, which chips widen to float16
    in one instruction and to bfloat16 in several; it holds every such number exactly."""
    if UPCAST:
        query = query.to(tl.float32)
    elif narrow and query.dtype == tl.bfloat16:
        query = tl.minimum(tl.maximum(query.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return query


@triton.jit
def finish(acc, top, total, sinks, heads, v_scale):
    """The answer [R, D] of finished sums. heads [R]: each row's query head; sinks float32 [H] or None. A row that saw
    nothing becomes zero."""
    if sinks is not None:
        sink = tl.load(sinks + heads).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        fade = tl.exp2(top - new_top)
        acc = acc * fade[:, None]
        total = total * fade + tl.exp2(sink - new_top)
    total = tl.where(total == 0.0, 1.0, total)
    return acc * (v_scale / total)[:, None]


@triton.jit
def clear_rest(out, o_stride_t, o_stride_h, first, clear_to, program, num_programs, H: tl.constexpr, D: tl.constexpr):
    """Zero the tokens first .. clear_to - 1 (padding of a step), shared out among the programs."""
    columns = tl.arange(0, D)
    for token in range(first + program, clear_to, num_programs):
        for head in range(0, H, 16):
            heads = head + tl.arange(0, 16)
            at = out + tl.cast(token, tl.int64) * o_stride_t + heads[:, None] * o_stride_h + columns[None, :]
            tl.store(at, tl.zeros([16, D], out.dtype.element_ty), mask=heads[:, None] < H)
