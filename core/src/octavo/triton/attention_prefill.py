"""Attention of sequences with many new tokens, whose keys and values already lie in the paged cache.

Shapes: T tokens, S sequences, Hkv KV heads, R query rows of a tile (tokens x the G query heads that share a KV head),
D head_dim, L tokens of a context tile, N tokens of a block.

    row tiles     of sequence 0 | of sequence 1 | ...     times Hkv heads: the items of work, last tiles first
    programs      0 1 2 .. P-1 | P-1 .. 2 1 0 | 0 1 2 ..  each takes one item of every round

A program stays and takes items until there are none, so a captured launch fits any lengths and starts no program in
vain. Later tiles of a sequence see more context, so rounds that turn around give every program about as much.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.triton.attention_tile import LOWEST, attend_tile, clear_rest, finish, product_format


@triton.jit(do_not_specialize=["num_seqs", "clear_to", "table_stride", "short"])
def prefill_kernel(
    q,
    k_cache,
    v_cache,
    out,
    sinks,
    k_scales,
    v_scales,
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
    stride_b,
    stride_h,
    stride_n,
    scale,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_S: tl.constexpr,
    NARROW: tl.constexpr,
    UPCAST: tl.constexpr,
    START: tl.constexpr,
):
    """Grid (P,), any P. Skips sequences of at most `short` query tokens: the decode kernel has them.

    q, out [T, Hkv * G, D]. BLOCK_S: a power of two >= S. WINDOW 0, SOFTCAP 0.0: none. scale: on logits; k_scales,
    v_scales float32 [Hkv]: of the cache, or None. NARROW: the cache has 8 bits. Tokens behind the last sequence become
    zero, up to clear_to.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    seqs = tl.arange(0, BLOCK_S)
    columns = tl.arange(0, D)
    START()

    live = seqs < num_seqs
    all_q_lens = tl.load(q_starts + seqs + 1, mask=live, other=0) - tl.load(q_starts + seqs, mask=live, other=0)
    all_tiles = tl.where(all_q_lens > short, tl.cdiv(all_q_lens * G, R), 0)
    ends = tl.cumsum(all_tiles, 0)
    num_tiles = tl.sum(all_tiles, 0)
    num_items = num_tiles * HKV
    for begin in range(0, num_items, num_programs):
        # A round that is not full is not turned around: its places would begin behind the last item.
        turn = ((begin // num_programs) % 2 == 1) & (begin + num_programs <= num_items)
        item = begin + tl.where(turn, num_programs - 1 - program, program)
        if item < num_items:
            place = num_tiles - 1 - item // HKV
            head = item % HKV
            before = ends <= place
            seq = tl.sum(before.to(tl.int32), 0)
            row = (place - tl.sum(tl.where(before, all_tiles, 0), 0)) * R
            q_start = tl.load(q_starts + seq)
            q_len = tl.load(q_starts + seq + 1) - q_start
            kv_len = tl.load(kv_lens + seq)

            rows = row + tl.arange(0, R)
            tokens = (q_start + rows // G).to(tl.int64)[:, None]
            heads = head * G + rows % G
            valid = (rows < q_len * G)[:, None]
            q_at = tokens * q_stride_t + heads[:, None] * q_stride_h + columns[None, :]
            query = product_format(tl.load(q + q_at, mask=valid, other=0.0), NARROW, UPCAST)
            positions = kv_len - q_len + rows // G
            first_position = kv_len - q_len + row // G
            high = kv_len - q_len + tl.minimum((row + R - 1) // G + 1, q_len)
            logit_scale = scale
            v_scale = 1.0
            if k_scales is not None:
                logit_scale = scale * tl.load(k_scales + head)
                v_scale = tl.load(v_scales + head)
            keys = k_cache + head.to(tl.int64) * stride_h
            values = v_cache + head.to(tl.int64) * stride_h
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
                        stride_b,
                        stride_n,
                        logit_scale,
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
                    stride_b,
                    stride_n,
                    logit_scale,
                    MASKED=True,
                    WINDOW=WINDOW,
                    SOFTCAP=SOFTCAP,
                    BLOCK_L=BLOCK_L,
                    N=N,
                    D=D,
                )
            answer = finish(acc, top, total, sinks, heads, v_scale)
            o_at = tokens * o_stride_t + heads[:, None] * o_stride_h + columns[None, :]
            tl.store(out + o_at, answer.to(out.dtype.element_ty), mask=valid)

    first = tl.load(q_starts + num_seqs)
    clear_rest(out, o_stride_t, o_stride_h, first, clear_to, program, num_programs, H=HKV * G, D=D)
