"""Attention of sequences with many new tokens, whose keys and values already lie in the paged cache.

Shapes: T tokens, S sequences, Hkv KV heads, R query rows of a tile (tokens x the G query heads that share a KV head),
D head_dim, L tokens of a context tile, N tokens of a block.

    grid axis 0   0 ............... | f(1) ........ | f(2) ...       f(s) = q_starts[s] * G // R + s
    row tiles     of sequence 0, -  | of sequence 1 | ...            at least as many places as the sequence has tiles

The number of places, T * G // R + S, is known without the lengths, so a captured launch fits any step of its shape.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.triton.attention_tile import LOWEST, attend_tile, clear_rest, finish


@triton.jit(do_not_specialize=["num_seqs", "clear_to", "table_stride", "short"])
def prefill_kernel(
    q,
    k_cache,
    v_cache,
    out,
    sinks,
    block_table,
    q_starts,
    kv_lens,
    num_seqs,
    clear_to,
    table_stride,
    short,
    q_stride_t,
    q_stride_h,
    o_stride_t,
    o_stride_h,
    k_stride_b,
    k_stride_h,
    k_stride_n,
    v_stride_b,
    v_stride_h,
    v_stride_n,
    scale,
    v_scale,
    HAS_SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_S: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (T * G // R + S, Hkv). Skips sequences of at most `short` query tokens: the decode kernel has them.

    q, out [T, Hkv * G, D]. BLOCK_S: a power of two >= S. WINDOW 0, SOFTCAP 0.0: none. scale: on logits, k_scale
    included. Tokens behind the last sequence become zero, up to clear_to.
    """
    num_places = tl.num_programs(0)
    # A sequence's last tiles see the most context: they start first, so that the end of the launch is short work.
    place = num_places - 1 - tl.program_id(0)
    head = tl.program_id(1)
    if head == 0:
        first = tl.load(q_starts + num_seqs)
        clear_rest(out, o_stride_t, o_stride_h, first, clear_to, place, num_places, H=HKV * G, D=D)

    seqs = tl.arange(0, BLOCK_S)
    all_starts = tl.load(q_starts + seqs, mask=seqs < num_seqs, other=0)
    begins = all_starts * G // R + seqs
    seq = tl.sum(((begins <= place) & (seqs < num_seqs)).to(tl.int32), 0) - 1
    q_start = tl.load(q_starts + seq)
    q_len = tl.load(q_starts + seq + 1) - q_start
    kv_len = tl.load(kv_lens + seq)
    row = (place - (q_start * G // R + seq)) * R
    if (row >= q_len * G) | (q_len <= short):
        return

    rows = row + tl.arange(0, R)
    columns = tl.arange(0, D)
    tokens = q_start + rows // G
    heads = head * G + rows % G
    valid = (rows < q_len * G)[:, None]
    query = tl.load(
        q + tokens.to(tl.int64)[:, None] * q_stride_t + heads[:, None] * q_stride_h + columns[None, :],
        mask=valid,
        other=0.0,
    )
    if UPCAST:
        query = query.to(tl.float32)
    positions = kv_len - q_len + rows // G
    first_position = kv_len - q_len + row // G
    high = kv_len - q_len + tl.minimum((row + R - 1) // G + 1, q_len)
    keys = k_cache + head.to(tl.int64) * k_stride_h
    values = v_cache + head.to(tl.int64) * v_stride_h
    table = block_table + seq.to(tl.int64) * table_stride
    acc = tl.zeros([R, D], tl.float32)
    top = tl.full([R], LOWEST, tl.float32)
    total = tl.zeros([R], tl.float32)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(first_position - WINDOW + 1, 0)
        edge = low // BLOCK_L
    else:
        # Tiles that all rows see whole need no mask; only those on the diagonal do.
        edge = tl.maximum(first_position + 1, 0) // BLOCK_L
        for t in range(edge):
            acc, top, total = attend_tile(
                query,
                acc,
                top,
                total,
                t,
                low,
                high,
                positions,
                table,
                keys,
                values,
                k_stride_b,
                k_stride_n,
                v_stride_b,
                v_stride_n,
                scale,
                MASKED=False,
                WINDOW=WINDOW,
                SOFTCAP=SOFTCAP,
                BLOCK_L=BLOCK_L,
                N=N,
                D=D,
            )
    for t in range(edge, tl.cdiv(high, BLOCK_L)):
        acc, top, total = attend_tile(
            query,
            acc,
            top,
            total,
            t,
            low,
            high,
            positions,
            table,
            keys,
            values,
            k_stride_b,
            k_stride_n,
            v_stride_b,
            v_stride_n,
            scale,
            MASKED=True,
            WINDOW=WINDOW,
            SOFTCAP=SOFTCAP,
            BLOCK_L=BLOCK_L,
            N=N,
            D=D,
        )
    answer = finish(acc, top, total, sinks, heads, v_scale, HAS_SINKS=HAS_SINKS)
    tl.store(
        out + tokens.to(tl.int64)[:, None] * o_stride_t + heads[:, None] * o_stride_h + columns[None, :],
        answer.to(out.dtype.element_ty),
        mask=valid,
    )
