"""What a step needs before the model runs and leaves behind, on the device-resident request table: a kernel each.

R rows of the table, T tokens, S sequences, G KV groups, C block-table columns: see `octavo.ops.bookkeeping`.

    program (s, p) of `begin_step`    tokens and columns  p, p + P, p + 2 P ...  (chunks of BLOCK) of sequence s
    program (S, p)                    the same chunks of the padding tokens
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.triton.overlap import IN_ORDER, Overlap

Tensor = torch.Tensor

BLOCK = 256
CHUNKS = 4
"""Chunks that a program of `begin_step` should have at most, within `MOST_PARTS` programs for each sequence."""
MOST_PARTS = 16


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "padding_row"])
def _begin_step_kernel(
    tokens_ptr,
    blocks_ptr,
    groups_ptr,
    ended_ptr,
    seqs_ptr,
    q_starts_ptr,
    ids_ptr,
    positions_ptr,
    slots_ptr,
    block_table_ptr,
    picks_ptr,
    num_seqs,
    num_tokens,
    padding_row,
    tokens_stride,
    blocks_stride,
    seqs_stride,
    slots_stride,
    block_table_stride,
    picks_stride,
    NUM_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    START: tl.constexpr,
):
    seq, part = tl.program_id(0), tl.program_id(1)
    lane = part * BLOCK + tl.arange(0, BLOCK)
    step = tl.num_programs(1) * BLOCK
    START()
    start = tl.load(q_starts_ptr + seq)
    if seq == num_seqs:
        for offset in range(start, num_tokens, step):
            token = offset + lane
            mask = token < num_tokens
            tl.store(ids_ptr + token, tl.zeros([BLOCK], tl.int32), mask=mask)
            tl.store(positions_ptr + token, tl.zeros([BLOCK], tl.int64), mask=mask)
            for g in tl.static_range(NUM_GROUPS):
                tl.store(slots_ptr + g * slots_stride + token, tl.zeros([BLOCK], tl.int64), mask=mask)
    else:
        num_new = tl.load(q_starts_ptr + seq + 1) - start
        row = tl.load(seqs_ptr + seq).to(tl.int64)
        over = tl.load(ended_ptr + row) != 0
        # Another program of an ended sequence may have written its length already: it is not looked at then.
        length = tl.where(over, num_new, tl.load(seqs_ptr + seqs_stride + seq))
        for offset in range(0, num_new, step):
            index = offset + lane
            mask = index < num_new
            position = length - num_new + index
            token = tl.load(tokens_ptr + row * tokens_stride + position, mask=mask, other=0)
            tl.store(ids_ptr + start + index, token, mask=mask)
            tl.store(positions_ptr + start + index, position.to(tl.int64), mask=mask)
            for g in tl.static_range(NUM_GROUPS):
                first, size = tl.load(groups_ptr + 2 * g), tl.load(groups_ptr + 2 * g + 1)
                block = tl.load(
                    blocks_ptr + row * blocks_stride + first + position // size, mask=mask & (over == 0), other=0
                )
                slot = block.to(tl.int64) * size + position % size
                tl.store(slots_ptr + g * slots_stride + start + index, slot, mask=mask)
        for g in tl.static_range(NUM_GROUPS):
            first, size = tl.load(groups_ptr + 2 * g), tl.load(groups_ptr + 2 * g + 1)
            count = (length + size - 1) // size
            for offset in range(0, count, step):
                index = offset + lane
                mask = index < count
                block = tl.load(blocks_ptr + row * blocks_stride + first + index, mask=mask & (over == 0), other=0)
                at = block_table_ptr + seq.to(tl.int64) * block_table_stride + first + index
                tl.store(at, block, mask=mask)
        if part == 0:
            samples = (tl.load(seqs_ptr + 2 * seqs_stride + seq) != 0) & (over == 0)
            tl.store(picks_ptr + seq, tl.maximum(start + num_new - 1, 0).to(tl.int64))
            tl.store(picks_ptr + picks_stride + seq, tl.where(samples, row, padding_row))
            tl.store(picks_ptr + 2 * picks_stride + seq, tl.where(samples, length, 0).to(tl.int64))
            tl.store(seqs_ptr + seqs_stride + seq, length)


def begin_step(
    tokens: Tensor,
    blocks: Tensor,
    groups: Tensor,
    ended: Tensor,
    seqs: Tensor,
    q_starts: Tensor,
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_table: Tensor,
    picks: Tensor,
    *,
    overlap: Overlap = IN_ORDER,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The op `begin_step`: the inputs of S sequences and T tokens, read from the request table."""
    num_seqs, num_tokens = seqs.shape[1], len(ids)
    longest = max(num_tokens - num_seqs + 1, block_table.shape[1])
    parts = triton.cdiv(longest, CHUNKS * BLOCK)
    overlap.launch(
        _begin_step_kernel,
        (num_seqs + 1, min(parts, MOST_PARTS)),
        tokens,
        blocks,
        groups,
        ended,
        seqs,
        q_starts,
        ids,
        positions,
        slots,
        block_table,
        picks,
        num_seqs,
        num_tokens,
        len(tokens) - 1,
        tokens.stride(0),
        blocks.stride(0),
        seqs.stride(0),
        slots.stride(0),
        block_table.stride(0),
        picks.stride(0),
        NUM_GROUPS=len(groups),
        BLOCK=BLOCK,
        START=overlap.start,
        num_warps=4,
        **overlap.options,
    )
    return seqs, ids, positions, slots, block_table, picks


@triton.jit(do_not_specialize=["num_picks"])
def _commit_tokens_kernel(
    tokens_ptr,
    ended_ptr,
    limits_ptr,
    stops_ptr,
    chosen_ptr,
    picks_ptr,
    num_picks,
    tokens_stride,
    picks_stride,
    NUM_STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    START: tl.constexpr,
):
    START()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_picks
    row = tl.load(picks_ptr + picks_stride + at, mask=mask, other=0)
    position = tl.load(picks_ptr + 2 * picks_stride + at, mask=mask, other=0)
    chosen = tl.load(chosen_ptr + at, mask=mask, other=0).to(tl.int32)
    tl.store(tokens_ptr + row * tokens_stride + position, tl.maximum(chosen, 0), mask=mask)
    stops_from = tl.load(limits_ptr + 2 * row, mask=mask, other=0)
    limit = tl.load(limits_ptr + 2 * row + 1, mask=mask, other=0)
    entry = tl.arange(0, BLOCK_E)
    stops = tl.load(
        stops_ptr + row[:, None] * NUM_STOPS + entry[None, :],
        mask=mask[:, None] & (entry < NUM_STOPS)[None, :],
        other=-1,
    )
    stopped = (tl.max((stops == chosen[:, None]).to(tl.int32), 1) > 0) & (position >= stops_from)
    over = stopped | (position + 1 >= limit) | (chosen < 0)
    tl.store(ended_ptr + row, over.to(tl.int32), mask=mask)


def commit_tokens(
    tokens: Tensor,
    ended: Tensor,
    limits: Tensor,
    stops: Tensor,
    chosen: Tensor,
    picks: Tensor,
    *,
    overlap: Overlap = IN_ORDER,
) -> tuple[Tensor, Tensor]:
    """The op `commit_tokens`: N sampled tokens into the request table, with marks on the rows that they end."""
    num_picks, num_stops = len(chosen), stops.shape[1]
    if num_picks:
        block = 64
        overlap.launch(
            _commit_tokens_kernel,
            (triton.cdiv(num_picks, block),),
            tokens,
            ended,
            limits,
            stops,
            chosen,
            picks,
            num_picks,
            tokens.stride(0),
            picks.stride(0),
            NUM_STOPS=num_stops,
            BLOCK=block,
            BLOCK_E=triton.next_power_of_2(num_stops),
            START=overlap.start,
            num_warps=2,
            **overlap.options,
        )
    return tokens, ended
