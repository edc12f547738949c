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

from octavo.triton.attention_tile import LOWEST, attend_tile, clear_rest, finish


@triton.jit(do_not_specialize=["num_seqs", "clear_to", "table_stride"])
def decode_kernel(
    q,
    k_cache,
    v_cache,
    out,
    sinks,
    block_table,
    q_starts,
    kv_lens,
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
    MIN_TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    FENCE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (P,), any P. Takes every sequence of 1 .. R // G query tokens; others are the prefill kernel's.

    q, out [T, Hkv * G, D]; sums float32 [P, 2, R, D] and tops float32 [P, 2, 2, R]: slots for unfinished work;
    arrivals int32 [S * Hkv]: zero before and after. BLOCK_S: a power of two >= S. WINDOW 0, SOFTCAP 0.0: none.
    scale: on logits, k_scale included. MIN_TILES: least share of a program. CHUNK: slots added up at a time.
    FENCE: numbers of int32 [P, FENCE] `fences`, at least one for each thread; 0: the device needs none.
    clear_to: tokens behind the last sequence become zero up to this one; 0: the prefill kernel does it.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    clear_rest(
        out, o_stride_t, o_stride_h, tl.load(q_starts + num_seqs), clear_to, program, num_programs, H=HKV * G, D=D
    )

    # Every program finds its share alone: lengths are known on the device only.
    seqs = tl.arange(0, BLOCK_S)
    live = seqs < num_seqs
    all_q_lens = tl.load(q_starts + seqs + 1, mask=live, other=0) - tl.load(q_starts + seqs, mask=live, other=0)
    all_kv_lens = tl.load(kv_lens + seqs, mask=live, other=0)
    all_tiles = tl.maximum(tl.cdiv(all_kv_lens, BLOCK_L), 1)
    if WINDOW > 0:
        all_tiles -= tl.maximum(all_kv_lens - all_q_lens - WINDOW + 1, 0) // BLOCK_L
    all_tiles = tl.where((all_q_lens > 0) & (all_q_lens <= R // G), all_tiles, 0)
    ends = tl.cumsum(all_tiles, 0) * HKV
    num_tiles = tl.sum(all_tiles, 0) * HKV
    share = tl.maximum(tl.cdiv(num_tiles, num_programs), MIN_TILES)
    work = program * share
    stop = tl.minimum(work + share, num_tiles)

    rows = tl.arange(0, R)
    columns = tl.arange(0, D)
    while work < stop:
        # `work` lies in sequence `seq`, whose tiles begin at `base`.
        before = ends <= work
        seq = tl.sum(before.to(tl.int32), 0)
        base = tl.sum(tl.where(before, all_tiles, 0), 0) * HKV
        count = tl.sum(tl.where(seqs == seq, all_tiles, 0), 0)
        q_start = tl.load(q_starts + seq)
        q_len = tl.load(q_starts + seq + 1) - q_start
        kv_len = tl.load(kv_lens + seq)
        head = (work - base) // count
        tile = (work - base) % count
        num_here = tl.minimum(count - tile, stop - work)

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
        low = 0
        if WINDOW > 0:
            low = tl.maximum(kv_len - q_len - WINDOW + 1, 0)
        first_tile = low // BLOCK_L + tile
        keys = k_cache + head.to(tl.int64) * k_stride_h
        values = v_cache + head.to(tl.int64) * v_stride_h
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

        done = num_here == count
        if num_here < count:
            # A program begins inside one head at most (slot 0) and leaves one unfinished at most (slot 1).
            slot = program * 2 + (tile == 0).to(tl.int32)
            tl.store(sums + slot.to(tl.int64) * (R * D) + rows[:, None] * D + columns[None, :], acc)
            tl.store(tops + slot * (2 * R) + rows, top)
            tl.store(tops + slot * (2 * R) + R + rows, total)
            head_begin = work - tile
            first_program = head_begin // share
            last_program = (head_begin + count - 1) // share
            # The sums of all threads must lie in memory before one thread counts them in. Not every device's barrier
            # waits for that: there each thread first releases its own by an atomic that changes nothing.
            if FENCE > 0:
                tl.atomic_add(fences + program * FENCE + tl.arange(0, FENCE), 0, sem="release")
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals + seq * HKV + head, 1, sem="acq_rel")
            done = arrived == last_program - first_program
            if done:
                acc = tl.zeros([R, D], tl.float32)
                top = tl.full([R], LOWEST, tl.float32)
                total = tl.zeros([R], tl.float32)
                for p in range(first_program, last_program + 1, CHUNK):
                    programs = p + tl.arange(0, CHUNK)
                    real = programs <= last_program
                    slots = programs * 2 + (programs == first_program).to(tl.int32)
                    # Around the first-level cache, which other processors' writes do not reach.
                    at = tops + slots[:, None] * (2 * R) + rows[None, :]
                    tops_in = tl.load(at, mask=real[:, None], other=LOWEST, cache_modifier=".cg")
                    totals_in = tl.load(at + R, mask=real[:, None], other=0.0, cache_modifier=".cg")
                    places = slots.to(tl.int64)[:, None, None] * (R * D) + rows[None, :, None] * D
                    sums_in = tl.load(
                        sums + places + columns[None, None, :],
                        mask=real[:, None, None],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    new_top = tl.maximum(top, tl.max(tops_in, 0))
                    fade = tl.exp2(top - new_top)
                    weights = tl.exp2(tops_in - new_top[None, :])
                    acc = acc * fade[:, None] + tl.sum(sums_in * weights[:, :, None], 0)
                    total = total * fade + tl.sum(totals_in * weights, 0)
                    top = new_top
                tl.store(arrivals + seq * HKV + head, 0)
        if done:
            answer = finish(acc, top, total, sinks, heads, v_scale, HAS_SINKS=HAS_SINKS)
            tl.store(
                out + tokens.to(tl.int64)[:, None] * o_stride_t + heads[:, None] * o_stride_h + columns[None, :],
                answer.to(out.dtype.element_ty),
                mask=valid,
            )
        work += num_here
