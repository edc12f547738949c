"""Attention of sequences with few new tokens: the whole cache is read once, so the work is cut by bytes, not by rows.

Shapes: S sequences, Hkv KV heads, R query rows of one KV head (tokens x the G query heads that share it), D head_dim,
L tokens of a tile, N tokens of a block, P programs.

All tiles of all sequences and KV heads lie on one line, which is cut into equal shares, one per program:

    seq 0 head 0 | seq 0 head 1 | seq 1 head 0       | seq 1 head 1       |     tiles
    program 0         | program 1         | program 2         | program 3 |     shares

so one long sequence among short ones stalls nobody, and a captured launch fits any lengths (Osama et al. 2023,
"Stream-K"). `deal_kernel` makes the cut once a step, for all layers. A program walks its share in one loop, whose loads
run ahead across the borders of heads and sequences: it never waits for the first keys of the next one.

A (sequence, head) that lies in several shares is put together by the program that ends last: each leaves its sums in
its own slot and counts itself in. Nobody waits. The order of addition is fixed, so results repeat exactly.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.triton.attention_tile import LOWEST, attend_tile, clear_rest, finish, product_format

SEQ: tl.constexpr = tl.constexpr(8)
"""Numbers of a sequence that is served here: its index, q_start, q_len, kv_len, the first token that any query sees,
tiles of one head."""
SHARE: tl.constexpr = tl.constexpr(16)
"""Numbers of a program's share: its first sequence (the six above), that one's place among those served, head, first
tile there, first and last tile of the share on the line, tiles of every share."""


@triton.jit(do_not_specialize=["num_seqs", "least"])
def deal_kernel(
    q_starts,
    kv_lens,
    served,
    shares,
    num_seqs,
    least,
    WINDOW: tl.constexpr,
    HKV: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_S: tl.constexpr,
    START: tl.constexpr,
):
    """Grid (P,): each program its own share, the first also the list of sequences of 1 .. MOST query tokens.

    served int32 [S + 1, SEQ], shares int32 [P, SHARE]: filled. BLOCK_S: a power of two >= S. least: tiles of a share.
    """
    program = tl.program_id(0)
    seqs = tl.arange(0, BLOCK_S)
    live = seqs < num_seqs
    START()
    starts = tl.load(q_starts + seqs, mask=live, other=0)
    q_lens = tl.load(q_starts + seqs + 1, mask=live, other=0) - starts
    lens = tl.load(kv_lens + seqs, mask=live, other=0)
    lows = tl.zeros_like(lens)
    if WINDOW > 0:
        lows = tl.maximum(lens - q_lens - WINDOW + 1, 0)
    mine = (q_lens > 0) & (q_lens <= MOST)
    counts = tl.where(mine, tl.maximum(tl.cdiv(lens, BLOCK_L), 1) - lows // BLOCK_L, 0)
    ends = tl.cumsum(counts, 0) * HKV
    num_tiles = tl.sum(counts, 0) * HKV
    places = tl.cumsum(mine.to(tl.int32), 0) - 1
    if program == 0:
        at = served + places * SEQ
        tl.store(at, seqs, mask=mine)
        tl.store(at + 1, starts, mask=mine)
        tl.store(at + 2, q_lens, mask=mine)
        tl.store(at + 3, lens, mask=mine)
        tl.store(at + 4, lows, mask=mine)
        tl.store(at + 5, counts, mask=mine)

    share = tl.maximum(tl.cdiv(num_tiles, tl.num_programs(0)), least)
    first = program * share
    before = ends <= first
    place = tl.sum((before & mine).to(tl.int32), 0)
    base = tl.sum(tl.where(before, counts, 0), 0) * HKV
    this = mine & (places == place)
    count = tl.maximum(tl.sum(tl.where(this, counts, 0), 0), 1)
    at = shares + program * SHARE
    tl.store(at, tl.sum(tl.where(this, seqs, 0), 0))
    tl.store(at + 1, tl.sum(tl.where(this, starts, 0), 0))
    tl.store(at + 2, tl.sum(tl.where(this, q_lens, 0), 0))
    tl.store(at + 3, tl.sum(tl.where(this, lens, 0), 0))
    tl.store(at + 4, tl.sum(tl.where(this, lows, 0), 0))
    tl.store(at + 5, count)
    tl.store(at + 6, place)
    tl.store(at + 7, (first - base) // count)
    tl.store(at + 8, (first - base) % count)
    tl.store(at + 9, first)
    tl.store(at + 10, tl.minimum(first + share, num_tiles))
    tl.store(at + 11, share)


@triton.jit(do_not_specialize=["num_seqs", "clear_to", "table_stride"])
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
    served,
    shares,
    sums,
    tops,
    arrivals,
    fences,
    num_seqs,
    clear_to,
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
    CHUNK: tl.constexpr,
    FENCE: tl.constexpr,
    NARROW: tl.constexpr,
    UPCAST: tl.constexpr,
    START: tl.constexpr,
):
    """Grid (P,), that of `deal_kernel`, whose `served` and `shares` it reads: sequences of 1 .. KEPT // G query tokens.

    q, out [T, Hkv * G, D]. R rows fill the matrix unit, the first KEPT of them can be queries. sums float32
    [P, 2, KEPT, D] and tops float32 [P, 2, 2, KEPT]: slots for unfinished work; arrivals int32 [S * Hkv]: zero before
    and after. WINDOW 0, SOFTCAP 0.0: none. scale: on logits; k_scales, v_scales float32 [Hkv]: of the cache, or None.
    CHUNK: slots added up at a time. FENCE: numbers of int32 [P, FENCE] `fences`, at least one for each thread; 0: the
    device needs none. NARROW: the cache has 8 bits.
    clear_to: tokens behind the last sequence become zero up to this one; 0: the prefill kernel does it.
    """
    program = tl.program_id(0)
    rows = tl.arange(0, R)
    columns = tl.arange(0, D)
    START()
    mine = shares + program * SHARE
    seq = tl.load(mine)
    q_start = tl.load(mine + 1)
    q_len = tl.load(mine + 2)
    kv_len = tl.load(mine + 3)
    low = tl.load(mine + 4)
    count = tl.load(mine + 5)
    place = tl.load(mine + 6)
    head = tl.load(mine + 7)
    entered = tl.load(mine + 8)  # the tile of (seq, head) at which this program enters it
    first = tl.load(mine + 9)
    stop = tl.load(mine + 10)
    share = tl.load(mine + 11)

    if first < stop:
        seq_0, head_0, q_start_0, q_len_0, count_0, entered_0 = seq, head, q_start, q_len, count, entered
        query = load_query(q, q_stride_t, q_stride_h, q_start, q_len, head, NARROW, UPCAST, G=G, D=D, R=R)
        logit_scale = scale
        if k_scales is not None:
            logit_scale = scale * tl.load(k_scales + head)
        acc = tl.zeros([R, D], tl.float32)
        top = tl.full([R], LOWEST, tl.float32)
        total = tl.zeros([R], tl.float32)
        tile = entered - 1
        for at in tl.range(first, stop):
            tile += 1
            fresh = tile == count
            if fresh:  # the next head, or the first of the next sequence
                tile = 0
                entered = 0
                head += 1
                if head == HKV:
                    head = 0
                    place += 1
                    seq = tl.load(served + place * SEQ)
                    q_start = tl.load(served + place * SEQ + 1)
                    q_len = tl.load(served + place * SEQ + 2)
                    kv_len = tl.load(served + place * SEQ + 3)
                    low = tl.load(served + place * SEQ + 4)
                    count = tl.load(served + place * SEQ + 5)
            if fresh:
                query = load_query(q, q_stride_t, q_stride_h, q_start, q_len, head, NARROW, UPCAST, G=G, D=D, R=R)
                if k_scales is not None:
                    logit_scale = scale * tl.load(k_scales + head)
            acc, top, total = attend_tile(
                query,
                tl.where(fresh, 0.0, acc),
                tl.where(fresh, LOWEST, top),
                tl.where(fresh, 0.0, total),
                low // BLOCK_L + tile,
                low,
                kv_len,
                kv_len - q_len + rows // G,
                block_table + seq.to(tl.int64) * table_stride,
                k_cache + head.to(tl.int64) * stride_h,
                v_cache + head.to(tl.int64) * stride_h,
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
            if (tile == count - 1) & (entered == 0):
                store_answer(
                    out,
                    o_stride_t,
                    o_stride_h,
                    acc,
                    top,
                    total,
                    sinks,
                    v_scales,
                    q_start,
                    q_len,
                    head,
                    G=G,
                    D=D,
                    ROWS=R,
                )
            elif (tile == count - 1) | (at == stop - 1):
                # A program enters one head behind its beginning at most (slot 0), and leaves one unfinished that it
                # began at most (slot 1).
                slot = program * 2 + (entered == 0).to(tl.int32)
                can_be = rows < KEPT
                sums_at = slot.to(tl.int64) * (KEPT * D) + rows[:, None] * D + columns[None, :]
                tl.store(sums + sums_at, acc, mask=can_be[:, None])
                tl.store(tops + slot * (2 * KEPT) + rows, top, mask=can_be)
                tl.store(tops + slot * (2 * KEPT) + KEPT + rows, total, mask=can_be)

        # The sums of all threads must lie in memory before one thread counts them in. Not every device's barrier
        # waits for that: there each thread first releases its own by an atomic that changes nothing.
        if FENCE > 0:
            tl.atomic_add(fences + program * FENCE + tl.arange(0, FENCE), 0, sem="release")
        tl.debug_barrier()
        for which in range(2):
            # The head that this program entered behind its beginning, then the one that it began and left.
            used = entered_0 > 0
            if which == 1:
                used = (entered == 0) & (tile < count - 1)
                seq_0, head_0, q_start_0, q_len_0, count_0 = seq, head, q_start, q_len, count
                first = stop - 1 - tile
                entered_0 = 0
            if used:
                begin = first - entered_0
                last_program = (begin + count_0 - 1) // share
                arrived = tl.atomic_add(arrivals + seq_0 * HKV + head_0, 1, sem="acq_rel")
                if arrived == last_program - begin // share:
                    tl.store(arrivals + seq_0 * HKV + head_0, 0)
                    whole, whole_top, whole_total = put_together(
                        sums, tops, begin // share, last_program, KEPT=KEPT, D=D, CHUNK=CHUNK
                    )
                    store_answer(
                        out,
                        o_stride_t,
                        o_stride_h,
                        whole,
                        whole_top,
                        whole_total,
                        sinks,
                        v_scales,
                        q_start_0,
                        q_len_0,
                        head_0,
                        G=G,
                        D=D,
                        ROWS=KEPT,
                    )

    # Last, as nothing waits for it: it begins with a load that all else would stand behind.
    if clear_to > 0:
        rest = tl.load(q_starts + num_seqs)
        clear_rest(out, o_stride_t, o_stride_h, rest, clear_to, program, tl.num_programs(0), H=HKV * G, D=D)


@triton.jit
def load_query(
    q,
    q_stride_t,
    q_stride_h,
    q_start,
    q_len,
    head,
    NARROW: tl.constexpr,
    UPCAST: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
):
    """The query rows [R, D] of a KV head, in the format of the products; zero beyond the last."""
    rows = tl.arange(0, R)
    at = (q_start + rows // G).to(tl.int64) * q_stride_t + (head * G + rows % G) * q_stride_h
    query = tl.load(q + at[:, None] + tl.arange(0, D)[None, :], mask=(rows < q_len * G)[:, None], other=0.0)
    return product_format(query, NARROW, UPCAST)


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
    v_scales,
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
    v_scale = 1.0
    if v_scales is not None:
        v_scale = tl.load(v_scales + head)
    answer = finish(acc, top, total, sinks, heads, v_scale)
    at = (q_start + rows // G).to(tl.int64) * o_stride_t + heads * o_stride_h
    real = (rows < q_len * G)[:, None]
    tl.store(out + at[:, None] + tl.arange(0, D)[None, :], answer.to(out.dtype.element_ty), mask=real)
