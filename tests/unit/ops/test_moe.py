from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.ops.moe import ReferenceMoE
from octavo.plugin.specs import MoESpec
from octavo.plugin.torch import TorchDevice

CPU = TorchDevice("cpu")


def spec(activation: str = "silu") -> MoESpec:
    return MoESpec(
        num_experts=4, top_k=2, hidden_size=16, intermediate_size=24, activation=activation, act_dtype="float32"
    )


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"gate_up": torch.randn(4, 48, 16), "down": torch.randn(4, 16, 24)}


def want(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for expert, share in zip(ids[t].tolist(), shares[t], strict=True):
            if expert >= 0:
                gate, up = (w["gate_up"][expert] @ x[t]).chunk(2)
                out[t] += share * (w["down"][expert] @ (F.silu(gate) * up))
    return out


def test_each_token_is_the_weighted_sum_of_its_experts():
    w = weights()
    kernel = ReferenceMoE()
    x, ids = torch.randn(5, 16), torch.tensor([[0, 1], [1, 3], [3, 0], [2, 1], [2, 3]])
    shares = torch.rand(5, 2)
    got = kernel.apply(x, ids, shares, kernel.prepare(w, spec(), CPU), None)
    torch.testing.assert_close(got, want(x, ids, shares, w), atol=1e-4, rtol=1e-4)


def test_a_rank_with_some_of_the_experts_gives_its_part_of_the_sum():
    w = weights()
    kernel = ReferenceMoE()
    x, ids, shares = torch.randn(5, 16), torch.randint(4, (5, 2)), torch.rand(5, 2)
    parts = []
    for held in ((0, 2), (1, 3)):
        local = {name: weight[list(held)] for name, weight in w.items()}
        places = torch.full((4,), -1)
        places[list(held)] = torch.arange(2)
        parts.append(kernel.apply(x, ids, shares, kernel.prepare(local, spec(), CPU), places))
    torch.testing.assert_close(parts[0] + parts[1], want(x, ids, shares, w), atol=1e-4, rtol=1e-4)


def test_an_unknown_activation_is_refused_with_the_known_ones():
    answer = ReferenceMoE.supports(spec("relu7"), CPU)
    assert not answer.ok
    assert "silu" in answer.reason


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_steps_of_no_or_one_token_work(num_tokens):
    kernel = ReferenceMoE()
    packed = kernel.prepare(weights(), spec(), CPU)
    x = torch.randn(num_tokens, 16)
    got = kernel.apply(x, torch.zeros(num_tokens, 2).long(), torch.ones(num_tokens, 2), packed, None)
    assert got.shape == x.shape
