"""Triton's bookkeeping, interpreted: equal to its reference, and its marks to the engine's own rules."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import octavo.ops  # noqa: F401  (fills the catalogue)
from octavo.engine.accept import accept
from octavo.engine.messages import Finish, Submit
from octavo.engine.sequence import open_sequence
from octavo.engine.table import RequestTable
from octavo.ops.catalogue import CATALOGUE
from octavo.sampling.params import SamplingParams

pytest.importorskip("triton", reason="the Triton kernels need triton")

from octavo.triton import bookkeeping

KERNELS: dict[str, Callable[..., Any]] = {
    "begin_step": bookkeeping.begin_step,
    "commit_tokens": bookkeeping.commit_tokens,
}


def copies(sample: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [t.clone() for t in sample]


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("block", [16, 256])
def test_kernels_equal_their_references(op: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookkeeping, "BLOCK", block)  # with 16, sequences and tables fall into several chunks
    monkeypatch.setattr(bookkeeping, "CHUNKS", 1)
    for sample in CATALOGUE[op].samples("float32"):
        mine, theirs = copies(sample), copies(sample)
        KERNELS[op](*mine)
        CATALOGUE[op].reference(*theirs)
        for place, (got, expected) in enumerate(zip(mine, theirs, strict=True)):
            assert torch.equal(got, expected), f"argument {place}"


def small_step() -> dict[str, torch.Tensor]:
    """Row 0 decodes position 5, row 1 position 8; row 2 pads. Blocks of 4."""
    return {
        "tokens": torch.arange(30, dtype=torch.int32).view(3, 10),
        "blocks": torch.tensor([[11, 12, 13], [21, 22, 23], [0, 0, 0]], dtype=torch.int32),
        "groups": torch.tensor([[0, 4]], dtype=torch.int32),
        "ended": torch.zeros(3, dtype=torch.int32),
        "seqs": torch.tensor([[0, 1, 2], [6, 9, 0], [1, 1, 0]], dtype=torch.int32),
        "q_starts": torch.tensor([0, 1, 2, 2], dtype=torch.int32),
        "ids": torch.full((3,), -7, dtype=torch.int32),
        "positions": torch.full((3,), -7),
        "slots": torch.full((1, 3), -7),
        "block_table": torch.full((3, 3), -7, dtype=torch.int32),
        "picks": torch.full((3, 3), -7),
    }


@pytest.mark.parametrize("begin", [bookkeeping.begin_step, CATALOGUE["begin_step"].reference], ids=["triton", "torch"])
def test_a_step_reads_tokens_and_blocks_of_its_rows(begin: Callable[..., Any]) -> None:
    step = small_step()
    begin(**step)
    assert step["ids"].tolist() == [5, 18, 0]
    assert step["positions"].tolist() == [5, 8, 0]
    assert step["slots"].tolist() == [[12 * 4 + 1, 23 * 4, 0]]
    assert step["block_table"].tolist() == [[11, 12, -7], [21, 22, 23], [-7, -7, -7]]
    assert step["picks"].tolist() == [[0, 1, 1], [0, 1, 2], [6, 9, 0]]


@pytest.mark.parametrize("begin", [bookkeeping.begin_step, CATALOGUE["begin_step"].reference], ids=["triton", "torch"])
def test_a_row_that_has_ended_touches_nobodys_block_only(begin: Callable[..., Any]) -> None:
    step = small_step()
    step["ended"][1] = 1
    begin(**step)
    assert step["slots"].tolist() == [[12 * 4 + 1, 0, 0]]
    assert step["block_table"][1].tolist() == [0, -7, -7]
    assert step["seqs"][1].tolist() == [6, 1, 0], "its context is its new token"
    assert step["picks"][1:].tolist() == [[0, 2, 2], [6, 0, 0]], "its token goes to the padding row"


@pytest.mark.parametrize(
    "commit", [bookkeeping.commit_tokens, CATALOGUE["commit_tokens"].reference], ids=["triton", "torch"]
)
@pytest.mark.parametrize("seed", range(4))
def test_marks_of_ended_rows_agree_with_the_engine(commit: Callable[..., Any], seed: int) -> None:
    rng = random.Random(seed)
    num_rows, num_stops = 70, 6
    host = RequestTable(num_rows)
    limits = torch.zeros((num_rows, 2), dtype=torch.int32)
    stops = torch.full((num_rows, num_stops), -1, dtype=torch.int32)
    for handle in range(num_rows):
        least, most = sorted((rng.randrange(6), rng.randrange(1, 8)))
        eos = tuple(rng.sample(range(12), rng.randrange(num_stops + 1)))
        prompt = np.ones(rng.randrange(1, 5), np.int32)
        params = SamplingParams(min_tokens=least, max_tokens=None)
        submit = Submit(
            handle=handle, client=0, tokens=prompt.tobytes(), params=params, max_tokens=most, seed=0, eos=eos
        )
        seq = open_sequence(submit, arrival=handle, max_model_len=10, max_prompt=None)
        row = host.admit(seq, num_cached=0)
        limits[row] = torch.tensor([len(prompt) + least, seq.limit])
        stops[row, : len(eos)] = torch.tensor(eos, dtype=torch.int32)
    tokens = torch.zeros((num_rows + 1, 16), dtype=torch.int32)
    ended = torch.zeros(num_rows + 1, dtype=torch.int32)
    limits, stops = (torch.cat((t, t[:1])) for t in (limits, stops))
    rows = np.arange(num_rows)
    seen = set()
    while len(rows):
        chosen = np.array([[rng.randrange(12)] for _ in rows], np.int32)
        at = host.known[rows]
        host.target[rows] = at + 1
        picks = torch.from_numpy(np.stack((np.arange(len(rows)), rows, at)).astype(np.int64))
        commit(tokens, ended, limits, stops, torch.from_numpy(chosen[:, 0].astype(np.int64)), picks)
        accepted = accept(host, rows, at, chosen, np.ones(len(rows), np.int32))
        seen |= set(accepted.finish.tolist())
        assert (ended[rows].numpy() != 0).tolist() == (accepted.finish != Finish.RUNNING).tolist()
        assert tokens[rows, at].tolist() == chosen[:, 0].tolist()
        rows = rows[accepted.finish == Finish.RUNNING]
    assert seen == {Finish.RUNNING, Finish.STOP, Finish.LENGTH}


def test_a_row_without_a_choice_ends_whatever_its_stop_tokens_are() -> None:
    tokens, ended = torch.zeros((3, 8), dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    limits = torch.tensor([[5, 99]] * 3, dtype=torch.int32)
    stops = torch.full((3, 2), -1, dtype=torch.int32)
    bookkeeping.commit_tokens(
        tokens, ended, limits, stops, torch.tensor([-1, 3]), torch.tensor([[0, 1], [0, 1], [4, 4]])
    )
    assert ended.tolist() == [1, 0, 0]
    assert tokens[:2, 4].tolist() == [0, 3]
