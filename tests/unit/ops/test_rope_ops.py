from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from octavo.ops.norm import rms_norm
from octavo.ops.rope import qkv_norm_rope, rope

OPS = SimpleNamespace(rms_norm=rms_norm, rope=rope)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def angles(num_positions: int, rotated: int) -> torch.Tensor:
    return torch.arange(num_positions)[:, None] * 100.0 ** (-torch.arange(0, rotated, 2) / rotated)


def table(num_positions: int, rotated: int) -> torch.Tensor:
    return torch.cat((angles(num_positions, rotated).cos(), angles(num_positions, rotated).sin()), dim=-1)


@pytest.mark.parametrize(("dim", "rotated"), [(16, 16), (20, 8)])
def test_rope_turns_pairs_half_a_rotation_apart_like_complex_numbers(dim, rotated):
    q, k = torch.randn(5, 3, dim), torch.randn(5, 2, dim)
    positions = torch.tensor([0, 7, 3, 3, 29])
    got_q, got_k = rope(q, k, positions, table(30, rotated))
    turn = torch.polar(torch.ones(30, rotated // 2), angles(30, rotated))[positions][:, None]
    for x, got in ((q, got_q), (k, got_k)):
        turned = torch.complex(x[..., : rotated // 2], x[..., rotated // 2 : rotated]) * turn
        want = torch.cat((turned.real, turned.imag, x[..., rotated:]), dim=-1)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_position_zero_is_not_rotated():
    q, k = torch.randn(2, 3, 8), torch.randn(2, 1, 8)
    got_q, got_k = rope(q, k, torch.zeros(2, dtype=torch.int64), table(4, 8))
    assert torch.equal(got_q, q)
    assert torch.equal(got_k, k)


def test_scores_depend_on_the_distance_of_positions_only():
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    scores = []
    for shift in (0, 11):
        rq, _ = rope(q, k, torch.tensor([5 + shift]), table(40, 16))
        _, rk = rope(q, k, torch.tensor([2 + shift]), table(40, 16))
        scores.append((rq * rk).sum())
    torch.testing.assert_close(scores[0], scores[1], atol=1e-5, rtol=1e-5)


def test_qkv_is_split_into_queries_keys_and_values_in_this_order():
    qkv = torch.arange(2 * 8 * 4, dtype=torch.float32).view(2, 32)
    q, k, v = qkv_norm_rope(OPS, qkv, torch.zeros(2, dtype=torch.int64), None, None, None, 1e-6, 4, 2)
    heads = qkv.view(2, 8, 4)
    assert torch.equal(q, heads[:, :4])
    assert torch.equal(k, heads[:, 4:6])
    assert torch.equal(v, heads[:, 6:])


@pytest.mark.parametrize("norm", ["head", "row"])
def test_queries_and_keys_are_normed_before_they_are_rotated(norm):
    num_heads, num_kv_heads, dim = 4, 2, 8
    qkv, positions, cos_sin = torch.randn(3, 64), torch.tensor([1, 4, 2]), table(8, dim)
    wide = norm == "row"
    q_weight = torch.randn(num_heads * dim if wide else dim)
    k_weight = torch.randn(num_kv_heads * dim if wide else dim)
    q, k, v = qkv_norm_rope(OPS, qkv, positions, cos_sin, q_weight, k_weight, 1e-6, num_heads, num_kv_heads)
    rows = [t.contiguous() for t in qkv.split((32, 16, 16), dim=1)]
    shape = (3, -1) if wide else (3, -1, dim)
    want_q = rms_norm(rows[0].view(shape), q_weight, 1e-6).view(3, num_heads, dim)
    want_k = rms_norm(rows[1].view(shape), k_weight, 1e-6).view(3, num_kv_heads, dim)
    want_q, want_k = rope(want_q, want_k, positions, cos_sin)
    torch.testing.assert_close((q, k, v), (want_q, want_k, rows[2].view(3, num_kv_heads, dim)))
