"""Top-k and top-p by search, interpreted, against the reference that sorts."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import sampling as reference
from octavo.ops.samples import gaussian, integers

pytest.importorskip("triton", reason="the Triton kernels need triton")

from octavo.triton import topk_topp as kernel

NAN, INF = float("nan"), float("inf")


def same(values: torch.Tensor, top_k: list[int], top_p: list[float]) -> torch.Tensor:
    """Both filters on a copy; returns which tokens stay."""
    k, p = torch.tensor(top_k), torch.tensor(top_p)
    ours = values.clone()
    assert kernel.topk_topp(ours, k, p) is ours
    expected = reference.topk_topp(values.clone(), k, p)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    return ours > -INF


@pytest.mark.parametrize("vocab", [33, 1000, 9000])
def test_random_rows_keep_what_the_sort_keeps(vocab: int) -> None:
    top_k = [0, 1, 7, 500, vocab, vocab + 5, 0, 50]
    top_p = [1.0, 1.0, 1.0, 0.9, 0.5, 0.99, 0.1, 0.7]
    kept = same(gaussian(8, vocab, seed=vocab, scale=3.0), top_k, top_p)
    assert kept[1].sum() == 1
    assert kept[2].sum() == 7
    assert kept.any(dim=1).all()


def test_no_rows_are_no_work() -> None:
    values = torch.empty(0, 50)
    assert kernel.topk_topp(values, torch.empty(0, dtype=torch.int64), torch.empty(0)) is values


def test_of_equal_logits_at_the_border_the_lower_ids_stay() -> None:
    values = integers(4, 5000, high=4, seed=1).float()
    kept = same(values, [3000, 10, 0, 2000], [1.0, 1.0, 0.4, 0.5])
    assert kept[0].sum() == 3000
    threes = (values[1] == 3).nonzero().flatten()
    assert kept[1].nonzero().flatten().tolist() == threes[:10].tolist()


def test_flat_rows_keep_their_first_tokens() -> None:
    # 64 equal probabilities are exact in binary, so that the border is one too.
    kept = same(torch.full((3, 64), -1.5), [5, 0, 16], [1.0, 0.25, 0.5])
    assert [row.nonzero().flatten().tolist() for row in kept] == [list(range(n)) for n in (5, 16, 8)]


def test_one_token_always_stays() -> None:
    values = gaussian(3, 100, seed=3)
    kept = same(values, [0, 0, 1], [0.0, 1e-9, 0.0])
    assert [row.nonzero().item() for row in kept] == values.argmax(dim=1).tolist()


def test_forbidden_tokens_stay_forbidden_and_carry_no_mass() -> None:
    values = gaussian(4, 3000, seed=4)
    values[:, 10:] = -INF
    values[3] = -INF
    kept = same(values, [0, 50, 4, 3], [0.9, 0.5, 1.0, 0.5])
    assert kept.sum(dim=1).tolist() == [int(kept[0].sum()), int(kept[1].sum()), 4, 0]
    assert not kept[:, 10:].any()


def test_rows_that_the_sampler_will_refuse_still_show_it() -> None:
    values = gaussian(2, 300, seed=5)
    values[0, 7], values[1, 9] = NAN, INF
    for top_k, top_p in (([5, 5], [1.0, 1.0]), ([0, 0], [0.5, 0.5]), ([5, 5], [0.5, 0.5])):
        ours = kernel.topk_topp(values.clone(), torch.tensor(top_k), torch.tensor(top_p))
        assert reference.greedy(ours).tolist() == [-1, -1]


def test_extreme_and_signed_values_are_ordered_like_numbers() -> None:
    values = torch.tensor([[3e38, -3e38, 0.0, -0.0, 1e-40, -1e-40, 5.0, -5.0]])
    for k in range(1, 8):
        same(values, [k], [1.0])
