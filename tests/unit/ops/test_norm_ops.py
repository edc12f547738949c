from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from octavo.ops.norm import add_rms_norm, rms_norm


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def by_hand(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows = x.double()
    return rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 32), (0, 16)])
def test_rms_norm_divides_by_the_root_mean_square(shape):
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), by_hand(x, weight, 1e-6).float(), atol=1e-6, rtol=1e-5)


def test_eps_keeps_a_row_of_zeros_at_zero():
    assert rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).eq(0).all()


def test_a_weight_in_the_dtype_of_the_input_multiplies_the_rounded_value():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 64, generator=generator).bfloat16()
    weight = torch.randn(64, generator=generator).bfloat16()
    normed = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-6), normed * weight)


def test_a_float32_weight_rounds_only_the_product():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 64, generator=generator).bfloat16()
    weight = torch.randn(64, generator=generator)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    got = rms_norm(x, weight, 1e-6)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, (normed * weight).bfloat16())


def test_rms_norm_takes_strided_heads_of_a_packed_projection():
    packed = torch.randn(5, 6, 16)
    got = rms_norm(packed[:, 2:4], torch.ones(16), 1e-6)
    assert torch.equal(got, rms_norm(packed[:, 2:4].contiguous(), torch.ones(16), 1e-6))


def test_add_rms_norm_gives_the_sum_and_its_norm_through_the_bound_part():
    calls = []

    def bound(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        calls.append(eps)
        return rms_norm(x, weight, eps)

    x, residual, weight = torch.randn(4, 32), torch.randn(4, 32), torch.randn(32)
    normed, total = add_rms_norm(SimpleNamespace(rms_norm=bound), x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-5))
    assert calls == [1e-5]
