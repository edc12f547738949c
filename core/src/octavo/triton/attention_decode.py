"""Attention of sequences with few new tokens: the whole cache is read once, so the work is cut by bytes, not by rows.

Shapes: S sequences, Hkv KV heads, R query rows of one KV head (tokens x the G query heads that share it), D head_dim,
L tokens of a tile, N tokens of a block.

All tiles of all sequences and KV heads lie on one line, which is cut into equal shares, one per program:

    seq 0 head 0 | seq 0 head 1 | seq 1 head 0       | seq 1 head 1       |     tiles
    program 0         | program 1         | program 2         | program 3 |     shares

so one long sequence among short ones stalls nobody, and a captured launch fits any lengths (Osama et al. 2023,
"Stream-K"). A (sequence, head) that lies in several shares is put together by the program that ends last: each leaves
its sums in its own slot and counts itself in. Nobody waits. The order of addition is fixed, so results repeat exactly.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.triton.attention_tile import LOWEST, attend_tile, clear_rest, finish, product_format


@triton.jit(do_not_specialize=["num_seqs", "clear_to", "least", "table_stride"])
def decode_kernel(
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
    sums,
    tops,
    arrivals,
    fences,
    num_seqs,
    clear_to,
    least,
    table_stride,
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
    KEPT: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr,
    FENCE: tl.constexpr,
    NARROW: tl.constexpr,
    UPCAST: tl.constexpr,
    START: tl.constexpr,
):
    """Grid (P,), any P. Takes every sequence of 1 .. KEPT // G query tokens; others are the prefill kernel's.

    q, out [T, Hkv * G, D]. R rows fill the matrix unit, the first KEPT of them can be queries. sums float32
    [P, 2, KEPT, D] and tops float32 [P, 2, 2, KEPT]: slots for unfinished work; arrivals int32 [S * Hkv]: zero before
    and after. BLOCK_S: a power of two >= S. WINDOW 0, SOFTCAP 0.0: none. scale: on logits; k_scales, v_scales float32
    [Hkv]: of the cache, or None. least: tiles of a program's share. CHUNK: slots added up at a time. FENCE: numbers
    of int32 [P, FENCE] `fences`, at least one for each thread; 0: the device needs none. NARROW: the cache has 8 bits.
    clear_to: tokens behind the last sequence become zero up to this one; 0: the prefill kernel does it.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    seqs = tl.arange(0, BLOCK_S)
    rows = tl.arange(0, R)
    columns = tl.arange(0, D)
    START()

    # Every program finds its share alone: lengths are known on the device only.
    live = seqs < num_seqs
    all_q_lens = tl.load(q_starts + seqs + 1, mask=live, other=0) - tl.load(q_starts + seqs, mask=live, other=0)
    all_kv_lens = tl.load(kv_lens + seqs, mask=live, other=0)
    all_tiles = tl.maximum(tl.cdiv(all_kv_lens, BLOCK_L), 1)
    if WINDOW > 0:
        all_tiles -= tl.maximum(all_kv_lens - all_q_lens - WINDOW + 1, 0) // BLOCK_L
    all_tiles = tl.where((all_q_lens > 0) & (all_q_lens <= KEPT // G), all_tiles, 0)
    ends = tl.cumsum(all_tiles, 0) * HKV
    num_tiles = tl.sum(all_tiles, 0) * HKV
    share = tl.maximum(tl.cdiv(num_tiles, num_programs), least)
    work = program * share
    stop = tl.minimum(work + share, num_tiles)

    while work < stop:
        # `work` lies in sequence `seq`, whose tiles begin at `base`.
        before = ends <= work
        seq = tl.sum(before.to(tl.int32), 0)
        base = tl.sum(tl.where(before, all_tiles, 0), 0) * HKV
        q_start = tl.load(q_starts + seq)
        q_len = tl.load(q_starts + seq + 1) - q_start
        kv_len = tl.load(kv_lens + seq)
        low = 0
        if WINDOW > 0:
            low = tl.maximum(kv_len - q_len - WINDOW + 1, 0)
        count = tl.maximum(tl.cdiv(kv_len, BLOCK_L), 1) - low // BLOCK_L
        head = (work - base) // count
        tile = (work - base) % count
        num_here = tl.minimum(count - tile, stop - work)

        rows_at = (q_start + rows // G).to(tl.int64) * q_stride_t + (head * G + rows % G) * q_stride_h
        query = tl.load(q + rows_at[:, None] + columns[None, :], mask=(rows < q_len * G)[:, None], other=0.0)
        query = product_format(query, NARROW, UPCAST)
        positions = kv_len - q_len + rows // G
        logit_scale = scale
        v_scale = 1.0
        if k_scales is not None:
            logit_scale = scale * tl.load(k_scales + head)
            v_scale = tl.load(v_scales + head)
        first_tile = low // BLOCK_L + tile
        keys = k_cache + head.to(tl.int64) * stride_h
        values = v_cache + head.to(tl.int64) * stride_h
        table = block_table + seq.to(tl.int64) * table_stride
        acc = tl.zeros([R, D], tl.float32)
        top = tl.full([R], LOWEST, tl.float32)
        total = tl.zeros([R], tl.float32)
        for t in range(first_tile, first_tile + num_here):
            acc, top, total = attend_tile(
                query,
                acc,
                top,
                total,
                t,
                low,
                kv_len,
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

        if num_here == count:
            store_answer(
                out, o_stride_t, o_stride_h, acc, top, total, sinks, v_scale, q_start, q_len, head, G=G, D=D, ROWS=R
            )
        else:
            # A program begins inside one head at most (slot 0) and leaves one unfinished at most (slot 1).
            slot = program * 2 + (tile == 0).to(tl.int32)
            can_be = rows < KEPT
            sums_at = slot.to(tl.int64) * (KEPT * D) + rows[:, None] * D + columns[None, :]
            tl.store(sums + sums_at, acc, mask=can_be[:, None])
            tl.store(tops + slot * (2 * KEPT) + rows, top, mask=can_be)
            tl.store(tops + slot * (2 * KEPT) + KEPT + rows, total, mask=can_be)
            head_begin = work - tile
            first_program = head_begin // share
            last_program = (head_begin + count - 1) // share
            # The sums of all threads must lie in memory before one thread counts them in. Not every device's barrier
            # waits for that: there each thread first releases its own by an atomic that changes nothing.
            if FENCE > 0:
                tl.atomic_add(fences + program * FENCE + tl.arange(0, FENCE), 0, sem="release")
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals + seq * HKV + head, 1, sem="acq_rel")
            if arrived == last_program - first_program:
                whole, whole_top, whole_total = put_together(
                    sums, tops, first_program, last_program, KEPT=KEPT, D=D, CHUNK=CHUNK
                )
                tl.store(arrivals + seq * HKV + head, 0)
                store_answer(
                    out,
                    o_stride_t,
                    o_stride_h,
                    whole,
                    whole_top,
                    whole_total,
                    sinks,
                    v_scale,
                    q_start,
                    q_len,
                    head,
                    G=G,
                    D=D,
                    ROWS=KEPT,
                )
        work += num_here

    # Last, as nothing waits for it: it begins with a load that all else would stand behind.
    if clear_to > 0:
        first = tl.load(q_starts + num_seqs)
        clear_rest(out, o_stride_t, o_stride_h, first, clear_to, program, num_programs, H=HKV * G, D=D)


@triton.jit
def put_together(sums, tops, first_program, last_program, KEPT: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr):
    """(acc [KEPT, D], top [KEPT], total [KEPT]) of the slots that these programs left, CHUNK of them at a time."""
    rows = tl.arange(0, KEPT)
    columns = tl.arange(0, D)
    acc = tl.zeros([KEPT, D], tl.float32)
    top = tl.full([KEPT], LOWEST, tl.float32)
    total = tl.zeros([KEPT], tl.float32)
    for p in range(first_program, last_program + 1, CHUNK):
        programs = p + tl.arange(0, CHUNK)
        real = programs <= last_program
        slots = programs * 2 + (programs == first_program).to(tl.int32)
        # Around the first-level cache, which other processors' writes do not reach.
        at = tops + slots[:, None] * (2 * KEPT) + rows[None, :]
        places = slots.to(tl.int64)[:, None, None] * (KEPT * D) + rows[None, :, None] * D + columns[None, None, :]
        sums_in = tl.load(sums + places, mask=real[:, None, None], other=0.0, cache_modifier=".cg")
        tops_in = tl.load(at, mask=real[:, None], other=LOWEST, cache_modifier=".cg")
        totals_in = tl.load(at + KEPT, mask=real[:, None], other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(tops_in, 0))
        fade = tl.exp2(top - new_top)
        weights = tl.exp2(tops_in - new_top[None, :])
        acc = acc * fade[:, None] + tl.sum(sums_in * weights[:, :, None], 0)
        total = total * fade + tl.sum(totals_in * weights, 0)
        top = new_top
    return acc, top, total


@triton.jit
def store_answer(
    out,
    o_stride_t,
    o_stride_h,
    acc,
    top,
    total,
    sinks,
    v_scale,
    q_start,
    q_len,
    head,
    G: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Finish the sums of a KV head's query rows and store them."""
    rows = tl.arange(0, ROWS)
    heads = head * G + rows % G
    answer = finish(acc, top, total, sinks, heads, v_scale)
    at = (q_start + rows // G).to(tl.int64) * o_stride_t + heads * o_stride_h
    real = (rows < q_len * G)[:, None]
    tl.store(out + at[:, None] + tl.arange(0, D)[None, :], answer.to(out.dtype.element_ty), mask=real)
