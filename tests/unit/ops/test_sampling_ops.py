"""Sampling ops against plain definitions of what they mean."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.ops import sampling as ops


def logits_of(num_rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_draws_follow_the_softmax() -> None:
    row = torch.tensor([0.0, 1.0, 2.0, -1.0])
    n = 100_000
    positions = torch.arange(n)
    tokens = ops.sample(row.repeat(n, 1), torch.full((n,), 1.0), torch.full((n,), 12345), positions)
    frequencies = torch.bincount(tokens, minlength=4) / n
    assert torch.allclose(frequencies, row.softmax(0), atol=4 * math.sqrt(0.25 / n))


def test_draws_of_neighbouring_seeds_and_positions_are_independent() -> None:
    n, vocab = 20_000, 8
    row = torch.zeros(n, vocab)
    ones = torch.ones(n)
    a = ops.sample(row, ones, torch.zeros(n, dtype=torch.int64), torch.arange(n))
    b = ops.sample(row, ones, torch.ones(n, dtype=torch.int64), torch.arange(n))
    c = ops.sample(row, ones, torch.zeros(n, dtype=torch.int64), torch.arange(n) + 1)
    for other in (b, c):
        joint = torch.bincount(a * vocab + other, minlength=vocab * vocab) / n
        assert torch.allclose(joint, torch.full_like(joint, 1 / vocab**2), atol=0.006)


def test_a_row_draws_the_same_token_alone_and_in_any_batch() -> None:
    logits = logits_of(16, 1000)
    temperature, seeds = torch.linspace(0.3, 2, 16), torch.arange(16) * 7 - 3
    positions = torch.arange(16) + 100
    together = ops.sample(logits, temperature, seeds, positions)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ops.sample(logits[order], temperature[order], seeds[order], positions[order]), together[order])
    alone = [ops.sample(logits[i : i + 1], *(t[i : i + 1] for t in (temperature, seeds, positions))) for i in range(16)]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-5, 1e-4])
def test_tiny_temperatures_give_the_greedy_token(temperature: float) -> None:
    logits = logits_of(8, 500)
    n = torch.arange(8)
    assert torch.equal(ops.sample(logits, torch.full((8,), temperature), n, n), logits.argmax(-1))


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_row_without_a_possible_token_is_marked_and_others_go_on(bad: float) -> None:
    logits = logits_of(3, 50)
    logits[1] = bad
    ones, n = torch.ones(3), torch.arange(3)
    for tokens in (ops.sample(logits, ones, n, n), ops.greedy(logits)):
        assert tokens[1] == -1
        assert (tokens[[0, 2]] >= 0).all()


def test_repetition_penalty_sees_the_prompt_and_the_others_do_not() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 1.0]])
    counts = torch.tensor([[0, 0, 3, 0]], dtype=torch.int32)
    prompt = torch.tensor([[True, True, False, False]])
    zero, one = torch.zeros(1), torch.ones(1)
    repetition = ops.penalties(logits.clone(), counts, prompt, zero, zero, torch.tensor([2.0]))
    assert repetition.tolist() == [[1.0, -4.0, 0.5, 1.0]]
    presence = ops.penalties(logits.clone(), counts, prompt, torch.tensor([0.5]), zero, one)
    assert presence.tolist() == [[2.0, -2.0, 0.5, 1.0]]
    frequency = ops.penalties(logits.clone(), counts, prompt, zero, torch.tensor([0.5]), one)
    assert frequency.tolist() == [[2.0, -2.0, -0.5, 1.0]]


def test_min_p_keeps_what_is_likely_enough_relative_to_the_best() -> None:
    logits = logits_of(4, 200)
    threshold = torch.tensor([0.0, 0.05, 0.3, 1.0])
    kept = torch.isfinite(ops.min_p(logits.clone(), threshold))
    probs = logits.softmax(-1)
    expected = probs >= threshold[:, None] * probs.amax(-1, keepdim=True) * (1 - 1e-6)
    assert torch.equal(kept, expected)
    assert kept[3].sum() == 1


@pytest.mark.parametrize("top_k", [0, 1, 5, 199, 200])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 1.0])
def test_topk_topp_keeps_the_nucleus(top_k: int, top_p: float) -> None:
    logits = logits_of(3, 200)
    kept = torch.isfinite(ops.topk_topp(logits.clone(), torch.full((3,), top_k), torch.full((3,), top_p)))
    for row, keep in zip(logits, kept, strict=True):
        order = row.argsort(descending=True)[: top_k or None]
        probs = row[order].softmax(0)
        total, expected = 0.0, set()
        for token, p in zip(order.tolist(), probs.tolist(), strict=True):
            if expected and total >= top_p and top_p < 1.0:
                break
            expected.add(token)
            total += p
        assert set(keep.nonzero().flatten().tolist()) == expected


def test_bitmask_forbids_exactly_the_clear_bits() -> None:
    allowed = torch.rand(3, 77, generator=torch.Generator().manual_seed(0)) < 0.5
    padded = torch.nn.functional.pad(allowed, (0, 96 - 77)).view(3, 3, 32).to(torch.int64)
    words = (padded << torch.arange(32)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    masked = ops.apply_bitmask(logits_of(3, 77), words)
    assert torch.equal(torch.isfinite(masked), allowed)


def test_bad_word_is_forbidden_only_after_the_rest_of_it() -> None:
    history = torch.tensor([[-1, 3, 4], [7, 8, 9]])
    prefixes = torch.tensor([[-1, -1, 4], [-1, 8, 8]])
    masked = ops.bad_words(
        torch.zeros(2, 10), torch.tensor([0, 1]), history, prefixes, torch.tensor([1, 2]), torch.tensor([5, 6])
    )
    assert masked[0, 5] == -math.inf
    assert masked[1, 6] == 0


def test_logprobs_hold_the_chosen_token_then_the_best_with_its_rank() -> None:
    logits = logits_of(4, 50)
    tokens = torch.tensor([0, 7, 49, int(logits[3].argmax())])
    ids, values, ranks = ops.topk_logprobs(logits, tokens, 3)
    expected = logits.log_softmax(-1)
    assert torch.equal(ids[:, 0], tokens)
    assert torch.equal(ids[:, 1:], logits.topk(3).indices)
    assert torch.allclose(values, expected.gather(-1, ids))
    assert ranks[3] == 1
    assert all(ranks[i] == (expected[i] >= expected[i, t]).sum() for i, t in enumerate(tokens))
