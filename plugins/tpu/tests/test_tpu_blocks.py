"""Queries cut into blocks: every token is in exactly one place, whatever the mixture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from octavo.plugin import AttnBatch
from octavo_tpu.attention_blocks import WIDTH, cut_blocks


def batch_of(counts: Sequence[int], contexts: Sequence[int], num_tokens: int, place: str = "cpu") -> AttnBatch:
    """A step: counts of query tokens and context lengths after it, of each sequence, and padding up to num_tokens."""
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    lengths = np.array(contexts, np.int32)
    return AttnBatch(
        num_tokens=num_tokens,
        num_seqs=len(counts),
        num_decodes=0,
        max_q_len=max(counts),
        max_kv_len=max(contexts),
        q_starts=torch.from_numpy(starts).to(place),
        kv_lens=torch.from_numpy(lengths).to(place),
        block_table=torch.zeros((len(counts), 1), dtype=torch.int32, device=place),
        slots=torch.zeros(num_tokens, dtype=torch.int64, device=place),
        q_starts_host=starts,
        kv_lens_host=lengths,
    )


CASES = [
    ((1, 1, 1, 1), (5, 6, 7, 8), 4),
    ((1, 5), (9, 5), 16),
    ((1, 33, 16, 0, 0), (100, 33, 20, 0, 0), 64),
    ((64,), (64,), 64),
    ((63, 1), (63, 1), 64),
    ((0, 17), (0, 170), 32),
]


@pytest.mark.parametrize(("counts", "contexts", "num_tokens"), CASES)
def test_every_token_has_one_place_of_its_sequence_and_position(
    place: str, counts: tuple[int, ...], contexts: tuple[int, ...], num_tokens: int
) -> None:
    batch = batch_of(counts, contexts, num_tokens, place)
    blocks = cut_blocks(batch, decode=False)
    seq, first, count = (t.cpu().tolist() for t in (blocks.seq, blocks.first, blocks.count))
    assert blocks.source is not None
    assert blocks.target is not None
    source, target = blocks.source.cpu().tolist(), blocks.target.cpu().tolist()
    places = {}
    for block, number in enumerate(count):
        for within in range(number):
            token = source[block * WIDTH + within]
            assert token not in places
            places[token] = block * WIDTH + within
            start = batch.q_starts_host[seq[block]]
            position = contexts[seq[block]] - counts[seq[block]] + token - start
            assert position == first[block] + within
    assert sorted(places) == list(range(sum(counts)))
    assert [target[token] for token in range(sum(counts))] == [places[token] for token in range(sum(counts))]


def test_joining_undoes_cutting(place: str) -> None:
    blocks = cut_blocks(batch_of((1, 33, 16), (100, 33, 20), 64, place), decode=False)
    q = torch.randn(64, 6, 8, generator=torch.Generator().manual_seed(0))
    cut = blocks.cut(q.to(place), 2)
    assert cut.shape == (64 // WIDTH + 3, 2, WIDTH * 3, 8)
    torch.testing.assert_close(blocks.join(cut, 6).cpu()[:50], q[:50], rtol=0, atol=0)


def test_a_decode_step_is_its_own_blocks(place: str) -> None:
    blocks = cut_blocks(batch_of((1, 1, 0), (9, 4, 0), 3, place), decode=True)
    assert blocks.seq.cpu().tolist() == [0, 1, 2]
    assert blocks.first.cpu().tolist()[:2] == [8, 3]
    assert blocks.count.cpu().tolist() == [1, 1, 0]
    q = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(blocks.join(blocks.cut(q.to(place), 2), 6).cpu(), q)
