"""Bookkeeping ops: what a step needs before the model runs, and what it leaves behind. They work on the
device-resident request table, so that a sampled token feeds the next step without passing through the host.

R rows of the table, the last of them for padding; L positions of a row; T tokens and S sequences of a step;
G KV groups, whose block tables lie side by side in C columns:

    groups  [[0, 16], [9, 16]]      a row's blocks  | group 0: columns 0 .. 8 | group 1: columns 9 .. C - 1 |
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from octavo.ops.catalogue import OpDef, define


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the model reads in a step, in place: returns seqs, ids, positions, slots, block_table, picks.

    The request table: tokens int32 [R, L]; blocks int32 [R, C]; groups int32 [G, 2]: first column and block size;
    ended int32 [R]: not 0 where a row's answer has ended.
    The step: seqs int32 [3, S]: table row, context length after the step, whether a token is sampled behind it;
    q_starts int32 [S + 1]: first token of each sequence. The tokens of a sequence are the last of its context.

    ids int32 [T], positions int64 [T]: of each token. slots int64 [G, T]: block * size + offset of its key and value.
    block_table int32 [S, C]: the blocks of each context; columns behind a context keep what they held.
    picks int64 [3, S]: the token whose logits are sampled, and the row and position where the sampled one goes; a
    sequence that samples nothing gives its last token, the padding row and position 0.

    A sequence whose row has ended becomes a fresh one in block 0, which is nobody's: its context is its own new tokens
    and nothing is sampled. Padding tokens, q_starts[S] and behind, get id, position and slot 0.
    """
    rows, lengths, samples = seqs.to(torch.int64).unbind()
    starts = q_starts.to(torch.int64)
    num_new = starts.diff()
    over = ended[rows] != 0
    lengths = torch.where(over, num_new, lengths)

    token = torch.arange(len(ids), device=ids.device)
    real = token < starts[-1]
    seq = torch.searchsorted(starts[1:], token, right=True).clamp_max(len(rows) - 1)
    # A padding token behind the last sequence would count on from its context.
    at = torch.where(real, lengths[seq] - starts[seq + 1] + token, 0)
    ids.copy_(tokens[rows[seq], at].where(real, 0))
    positions.copy_(at)
    lost = over[seq] | ~real
    columns = torch.arange(block_table.shape[1], device=ids.device)
    live = torch.zeros_like(block_table, dtype=torch.bool)
    for (first, size), out in zip(groups.to(torch.int64), slots, strict=True):
        block = blocks[rows[seq], first + at // size].to(torch.int64).masked_fill(lost, 0)
        out.copy_(torch.where(real, block * size + at % size, 0))
        live |= (columns >= first) & (columns < first + (lengths[:, None] + size - 1) // size)
    block_table.copy_(torch.where(live, blocks[rows].masked_fill(over[:, None], 0), block_table))

    sampled = (samples != 0) & ~over
    picks[0] = (starts[1:] - 1).clamp_min(0)
    picks[1] = torch.where(sampled, rows, len(tokens) - 1)
    picks[2] = torch.where(sampled, lengths, 0)
    seqs[1] = lengths
    return seqs, ids, positions, slots, block_table, picks


def commit_tokens(
    tokens: Tensor, ended: Tensor, limits: Tensor, stops: Tensor, chosen: Tensor, picks: Tensor
) -> tuple[Tensor, Tensor]:
    """Write sampled tokens into the request table and mark the rows that they end, in place: returns tokens, ended.

    tokens int32 [R, L]; ended int32 [R]; limits int32 [R, 2]: first position at which a stop token counts, and number
    of tokens at which a row ends; stops int32 [R, E]: a row's stop tokens, -1 padded.
    chosen int64 [N]: the sampled tokens, -1 where none could be chosen, which ends a row too; picks int64 [3, N]: see
    `begin_step`.
    """
    _, rows, positions = picks
    tokens.index_put_((rows, positions), chosen.clamp_min(0).to(tokens.dtype))
    stopped = (chosen[:, None] == stops[rows]).any(dim=1) & (positions >= limits[rows, 0])
    full = positions + 1 >= limits[rows, 1]
    ended.index_put_((rows,), (stopped | full | (chosen < 0)).to(ended.dtype))
    return tokens, ended


def _steps(dtype: str) -> Iterable[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)

    def ints(*shape: int, high: int) -> Tensor:
        return torch.randint(1, high, shape, generator=generator, dtype=torch.int32)

    for groups, counts, extra, num_padding in (
        ([(0, 16)], (1, 1, 1), 0, 0),
        ([(0, 16)], (1, 1, 5, 40), 3, 2),
        ([(0, 16), (9, 4)], (1, 300), 0, 1),
        ([(0, 4)], (1,), 0, 0),
    ):
        num_rows, length = 6, 400
        widths = [-(-length // size) for _, size in groups]
        starts = [sum(widths[:g]) for g in range(len(groups))]
        num_seqs = len(counts) + num_padding
        num_new = torch.tensor((*counts, *[0] * num_padding), dtype=torch.int32)
        q_starts = torch.cat((torch.zeros(1, dtype=torch.int32), num_new.cumsum(0).int()))
        seqs = torch.zeros((3, num_seqs), dtype=torch.int32)
        seqs[0] = num_rows - 1
        seqs[0, : len(counts)] = torch.randperm(num_rows - 1, generator=generator)[: len(counts)]
        seqs[1, : len(counts)] = num_new[: len(counts)] + ints(len(counts), high=length - 301)
        seqs[2, : len(counts)] = ints(len(counts), high=3) - 1
        ended = torch.zeros(num_rows, dtype=torch.int32)
        ended[seqs[0, 0]] = len(counts) > 1
        num_tokens = int(q_starts[-1]) + extra
        yield (
            ints(num_rows, length, high=1000),
            ints(num_rows, sum(widths), high=500),
            torch.tensor([(start, size) for start, (_, size) in zip(starts, groups, strict=True)], dtype=torch.int32),
            ended,
            seqs,
            q_starts,
            ints(num_tokens, high=9),
            ints(num_tokens, high=9).long(),
            ints(len(groups), num_tokens, high=9).long(),
            ints(num_seqs, sum(widths), high=9),
            ints(3, num_seqs, high=9).long(),
        )


def _commits(dtype: str) -> Iterable[tuple[Tensor, ...]]:
    tokens = torch.zeros((7, 20), dtype=torch.int32)
    limits = torch.tensor([[0, 99], [9, 99], [0, 8], [8, 9], [0, 99], [0, 99], [0, 99]], dtype=torch.int32)
    stops = torch.tensor([[5, 6], [5, 6], [5, 6], [5, -1], [-1, -1], [5, 6], [-1, -1]], dtype=torch.int32)
    for chosen in ((6, 5, 3, 5, 5, -1), (3, 6, 6, 3, 1, 2)):
        rows = torch.arange(6)
        picks = torch.stack((rows, rows, torch.full((6,), 8)))
        ended = torch.tensor([0, 0, 0, 0, 0, 0, 0], dtype=torch.int32)
        yield tokens.clone(), ended, limits, stops, torch.tensor(chosen), picks
        yield tokens.clone(), ended.clone(), limits, stops, torch.tensor(chosen[:2]), picks[:, 1:3]


EXACT = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}

define(OpDef(name="begin_step", reference=begin_step, samples=_steps, tolerance=EXACT))
define(OpDef(name="commit_tokens", reference=commit_tokens, samples=_commits, tolerance=EXACT))
