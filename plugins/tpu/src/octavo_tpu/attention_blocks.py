"""How a step's queries are cut into blocks, each of one sequence: the shape that static kernels can take.

    step     | seq 0: 1 token | seq 1: 5 tokens         | padding      T tokens
    blocks   | 0 . . .        | 1 2 3 4     | 5 . . .   | . . . .      NB blocks of `width` tokens, here 4

T and S are those of the compiled shape, so NB = T / width + S is enough for any mixture. In a decode step a block is
one token and block i is sequence i. All of it is arithmetic on the device: a compiled step runs it anew each time.

Legend: T tokens, S sequences, NB blocks of queries, W tokens of one, H query heads, G of them to a KV head, Hkv KV
heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.plugin import AttnBatch

WIDTH = 16
"""Query tokens of a block in a step with prompts. Times G they fill the rows of a matrix unit."""


@dataclass(frozen=True, kw_only=True)
class QueryBlocks:
    """seq, first, count int32 [NB]: a block's sequence, the position of its first token, and how many tokens it has.

    source int32 [NB * W]: which token of the step each place of a block holds; target int32 [T]: where each token is.
    None in a decode step, where both are the identity.
    """

    width: int
    seq: Tensor
    first: Tensor
    count: Tensor
    source: Tensor | None = None
    target: Tensor | None = None

    def cut(self, q: Tensor, num_kv_heads: int) -> Tensor:
        """q [T, H, D] as [NB, Hkv, W * G, D]: row w * G + g is query head g of token w."""
        taken = q if self.source is None else q.index_select(0, self.source)
        num_tokens, num_heads, dim = taken.shape
        group = num_heads // num_kv_heads
        heads = taken.view(num_tokens // self.width, self.width, num_kv_heads, group, dim).transpose(1, 2)
        return heads.reshape(-1, num_kv_heads, self.width * group, dim)

    def join(self, blocks: Tensor, num_heads: int) -> Tensor:
        """The reverse of `cut`: [T, H, D]. Padding tokens get what some block holds."""
        num_blocks, num_kv_heads, rows, dim = blocks.shape
        group = rows // self.width
        heads = blocks.view(num_blocks, num_kv_heads, self.width, group, dim).transpose(1, 2)
        tokens = heads.reshape(num_blocks * self.width, num_heads, dim)
        return tokens if self.target is None else tokens.index_select(0, self.target)


def cut_blocks(batch: AttnBatch, *, decode: bool) -> QueryBlocks:
    """The blocks of a step. decode: token i is the only one of sequence i."""
    starts, kv_lens = batch.q_starts.to(torch.int32), batch.kv_lens.to(torch.int32)
    q_lens = starts[1:] - starts[:-1]
    num_seqs, device = batch.num_seqs, starts.device
    if decode:
        seq = torch.arange(num_seqs, dtype=torch.int32, device=device)
        return QueryBlocks(width=1, seq=seq, first=kv_lens - q_lens, count=q_lens)
    num_blocks = batch.num_tokens // WIDTH + num_seqs
    ends = running_sum((q_lens + WIDTH - 1) // WIDTH)
    begins = ends - (q_lens + WIDTH - 1) // WIDTH
    block = torch.arange(num_blocks, dtype=torch.int32, device=device)
    seq = place_in(ends, block)
    skipped = (block - begins[seq]) * WIDTH
    count = torch.where(block < ends[-1], (q_lens[seq] - skipped).clamp(0, WIDTH), 0)
    within = torch.arange(WIDTH, dtype=torch.int32, device=device)
    source = (starts[seq] + skipped)[:, None] + within
    token = torch.arange(batch.num_tokens, dtype=torch.int32, device=device)
    owner = place_in(starts[1:], token)
    at = (token - starts[owner]).clamp_min(0)
    target = begins[owner] * WIDTH + at
    return QueryBlocks(
        width=WIDTH,
        seq=seq,
        first=kv_lens[seq] - q_lens[seq] + skipped,
        count=count,
        source=source.flatten().clamp(0, batch.num_tokens - 1),
        target=target.clamp(0, num_blocks * WIDTH - 1),
    )


def running_sum(x: Tensor) -> Tensor:
    """Inclusive prefix sums of int32 [n], as a masked sum: n is at most some hundreds, and a scan is a loop to XLA."""
    place = torch.arange(len(x), device=x.device)
    return torch.where(place[:, None] >= place, x, 0).sum(dim=1, dtype=torch.int32)


def place_in(ends: Tensor, values: Tensor) -> Tensor:
    """For each value the first i with value < ends[i], at most the last: int32, ends ascending."""
    found = (values[:, None] >= ends).sum(dim=1, dtype=torch.int32)
    return found.clamp_max(len(ends) - 1)
