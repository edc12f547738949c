"""Triton's sampling, interpreted, against the references: tokens equal, hash equal bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.ops import sampling as reference
from octavo.ops.samples import gaussian, integers

pytest.importorskip("triton", reason="the Triton kernels need triton")

from octavo.triton import logits, sampling

NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=[1, 1024], ids=["one program a row", "split rows"])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sampling, "PROGRAMS", request.param)
    return request.param


@pytest.mark.parametrize(("rows", "vocab"), [(0, 50), (1, 33), (3, 2048), (3, 5000)])
def test_greedy_takes_the_likeliest_token(rows: int, vocab: int, programs: int) -> None:
    values = gaussian(rows, vocab, seed=1)
    assert torch.equal(sampling.greedy(values), reference.greedy(values))


@pytest.mark.parametrize("place", [0, 2047, 2048, 4999])
def test_greedy_takes_the_lowest_of_equals_wherever_rows_are_cut(place: int, programs: int) -> None:
    values = gaussian(1, 5000, seed=1).clamp_max(1.0)
    values[0, place] = values[0, 4999] = 3.0
    assert sampling.greedy(values).tolist() == [place]


def test_zero_and_minus_zero_are_equal() -> None:
    values = torch.full((2, 40), -0.0)
    values[0, 7] = 0.0
    values[1] -= 1.0
    assert sampling.greedy(values).tolist() == [0, 0]


def broken_rows() -> torch.Tensor:
    values = gaussian(7, 5000, seed=2)
    values[0, 4000] = NAN
    values[1, 3] = -NAN
    values[2] = -INF
    values[3, 2500] = INF
    values[4, :2048] = -INF
    values[5, 3:] = -INF
    return values


def test_rows_with_nan_or_no_allowed_token_give_minus_one(programs: int) -> None:
    values = broken_rows()
    greedy = sampling.greedy(values)
    assert greedy[:4].tolist() == [-1] * 4
    assert torch.equal(greedy, reference.greedy(values))
    rows = torch.arange(7)
    for temperature in (torch.full((7,), 0.8), torch.zeros(7)):
        ours = sampling.sample(values, temperature, rows, rows)
        assert torch.equal(ours, reference.sample(values, temperature, rows, rows))


@pytest.mark.parametrize(("rows", "vocab"), [(0, 50), (1, 33), (3, 2048), (33, 4500)])
def test_sample_draws_the_references_tokens(rows: int, vocab: int, programs: int) -> None:
    values = gaussian(rows, vocab, seed=1, scale=2.0)
    temperature = torch.linspace(0, 2, rows)
    seeds = integers(rows, high=2**62, seed=2) * torch.where(torch.arange(rows) % 2 == 0, 1, -1)
    positions = integers(rows, high=2**20, seed=3)
    ours = sampling.sample(values, temperature, seeds, positions)
    assert torch.equal(ours, reference.sample(values, temperature, seeds, positions))


def test_flat_logits_leave_the_choice_to_the_noise_alone() -> None:
    values, rows = torch.zeros(16, 3000), torch.arange(16)
    ours = sampling.sample(values, torch.ones(16), rows * 7919 - 3, rows)
    assert torch.equal(ours, reference.sample(values, torch.ones(16), rows * 7919 - 3, rows))
    assert len(set(ours.tolist())) > 12


@pytest.mark.parametrize(("rows", "vocab"), [(0, 50), (1, 33), (3, 2500)])
def test_penalties_are_the_references(rows: int, vocab: int) -> None:
    values = gaussian(rows, vocab, seed=1, scale=4.0)
    counts = integers(rows, vocab, high=3, dtype="int32", seed=2)
    in_prompt = integers(rows, vocab, high=5, seed=3) == 0
    for scale in (1.0, 0.0):
        presence, frequency = torch.linspace(-1, 2, rows) * scale, torch.linspace(0.5, -0.3, rows) * scale
        repetition = 1 + torch.linspace(0.1, 0.9, rows) * scale
        expected = reference.penalties(values.clone(), counts, in_prompt, presence, frequency, repetition)
        ours = values.clone()
        assert logits.penalties(ours, counts, in_prompt, presence, frequency, repetition) is ours
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rows", "vocab"), [(0, 50), (1, 33), (3, 2500)])
def test_apply_bitmask_forbids_exactly_the_clear_bits(rows: int, vocab: int) -> None:
    values = gaussian(rows, vocab, seed=1)
    words = (integers(rows, -(-vocab // 32), high=2**32, seed=2) - 2**31).to(torch.int32)
    expected = reference.apply_bitmask(values.clone(), words)
    assert rows == 0 or expected.isinf().any()
    assert torch.equal(logits.apply_bitmask(values, words), expected)


def test_apply_bitmask_touches_only_the_rows_it_is_given() -> None:
    values = gaussian(5, 2500, seed=1)
    words = (integers(2, -(-2500 // 32), high=2**32, seed=2) - 2**31).to(torch.int32)
    rows = torch.tensor([4, 1])
    expected = reference.apply_bitmask(values.clone(), words, rows)
    assert torch.equal(expected[0], values[0])
    assert torch.equal(logits.apply_bitmask(values, words, rows), expected)


@pytest.mark.parametrize(("rows", "vocab"), [(0, 50), (1, 33), (5, 2500)])
def test_min_p_removes_what_the_reference_removes(rows: int, vocab: int) -> None:
    values = gaussian(rows, vocab, seed=1, scale=2.0)
    threshold = torch.linspace(0.0, 0.9, rows)
    expected = reference.min_p(values.clone(), threshold)
    assert torch.equal(logits.min_p(values, threshold), expected)


def test_min_p_leaves_rows_of_threshold_zero_and_rows_without_tokens() -> None:
    values = torch.tensor([[1.0, -INF, 0.0], [-INF, -INF, -INF], [2.0, 2.0 + math.log(0.4), 2.0 + math.log(0.6)]])
    ours = logits.min_p(values.clone(), torch.tensor([0.0, 0.5, 0.5]))
    assert torch.equal(ours[:2], values[:2])
    assert ours[2].isinf().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_choose_what_their_float32_copies_do(dtype: torch.dtype, programs: int) -> None:
    values = gaussian(5, 5000, seed=3, scale=4.0).to(dtype)
    temperature, seeds, positions = torch.tensor([0.0, 0.5, 1.0, 2.0, 0.0]), torch.arange(5) - 2, torch.arange(5)
    assert torch.equal(sampling.greedy(values), sampling.greedy(values.float()))
    ours = sampling.sample(values, temperature, seeds, positions)
    assert torch.equal(ours, sampling.sample(values.float(), temperature, seeds, positions))


def test_temperature_and_seed_come_from_the_rows_of_a_table(programs: int) -> None:
    values = gaussian(4, 5000, seed=4, scale=2.0)
    temperature, seeds = torch.linspace(0.0, 2.0, 9), torch.arange(9) * 7919
    rows, positions = torch.tensor([8, 0, 3, 3]), torch.tensor([5, 6, 7, 8])
    ours = sampling.sample(values, temperature, seeds, positions, rows)
    assert torch.equal(ours, sampling.sample(values, temperature[rows], seeds[rows], positions))
    assert torch.equal(ours, reference.sample(values, temperature, seeds, positions, rows))
