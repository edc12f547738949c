"""Ranks as threads of one process: every rank builds its slice, and together they give what one rank gives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.layers.attention import share_kv_heads
from octavo.models.registry import MODELS

Tensor = torch.Tensor


class ThreadRank:
    """A `Communicator` between threads that share `board` and a barrier."""

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(board)
        self._board, self._barrier = board, barrier

    def _exchange(self, t: Tensor) -> list[Tensor]:
        self._board[self.rank] = t.clone()
        self._barrier.wait(timeout=60)
        everyone = list(self._board)
        self._barrier.wait(timeout=60)
        return everyone

    def all_reduce(self, t: Tensor) -> Tensor:
        return torch.stack(self._exchange(t)).sum(dim=0)

    def all_gather(self, t: Tensor, dim: int) -> Tensor:
        return torch.cat(self._exchange(t), dim=dim)


def on_ranks(size: int, work: Callable[[ThreadRank], list[Tensor]]) -> list[list[Tensor]]:
    board: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(ThreadRank(rank, board, barrier)), range(size)))


def worst(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    return max(float((g - w).abs().max()) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("model_type", sorted(MODELS))
def test_two_ranks_give_the_logits_of_one(model_type, tiny_folder, paged, prompts):
    folder = tiny_folder(model_type, vocab_size=383)
    prompts = [[token % 383 for token in tokens] for tokens in prompts[:3]]
    want = paged(folder).run(prompts)
    for got in on_ranks(2, lambda comm: paged(folder, comm=comm).run(prompts)):
        assert worst(got, want) < 1e-4


@pytest.mark.parametrize("model_type", ["llama", "phi3", "olmo2"])
def test_ranks_beyond_the_number_of_kv_heads_hold_copies(model_type, tiny_folder, paged, prompts):
    folder = tiny_folder(model_type)
    want = paged(folder).run(prompts[:3])
    for got in on_ranks(4, lambda comm: paged(folder, comm=comm).run(prompts[:3])):
        assert worst(got, want) < 1e-4


def test_biases_of_row_linears_are_added_once(tiny_folder, paged, prompts):
    folder = tiny_folder("llama", attention_bias=True, mlp_bias=True)
    want = paged(folder).run(prompts[:2])
    for got in on_ranks(2, lambda comm: paged(folder, comm=comm).run(prompts[:2])):
        assert worst(got, want) < 1e-4


@pytest.mark.parametrize(("size", "held"), [(1, [(0, 4)]), (2, [(0, 2), (2, 2)]), (8, [(r // 2, 1) for r in range(8)])])
def test_kv_heads_are_split_or_repeated_among_ranks(size, held):
    barrier = threading.Barrier(1)
    assert [share_kv_heads(4, ThreadRank(r, [None] * size, barrier)) for r in range(size)] == held


def test_ranks_that_do_not_divide_the_heads_are_refused_by_name(tiny_folder, paged):
    folder = tiny_folder("llama")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 3 does not divide num_attention_heads \(4\)"):
        paged(folder, comm=ThreadRank(0, [None] * 3, threading.Barrier(1)))
