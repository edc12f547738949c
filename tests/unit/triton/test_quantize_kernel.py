"""Triton's row-wise fp8, alone and behind norms and activations, interpreted, against core's."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.samples import gaussian
from octavo.quant.online import quantize_rows

pytest.importorskip("triton", reason="the Triton kernels need triton")

from octavo.triton import activation, norm, quantize


def test_quantize_returns_the_codes_and_scale_that_a_row_was_made_of() -> None:
    # Codes that fp8 shows exactly: the interpreter's own fp8 rounding loses carries into the exponent.
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[torch.isfinite(codes)].view(2, -1)
    assert codes.abs().amax(dim=1).tolist() == [448.0, 448.0]
    scale = torch.tensor([[0.25], [8.0]])
    values, ours = quantize.quantize_fp8(codes * scale)
    assert torch.equal(ours, scale)
    assert torch.equal(values.float(), codes)


def test_a_row_of_zeros_quantizes_to_zeros() -> None:
    values, scale = quantize.quantize_fp8(torch.zeros(3, 70))
    assert values.float().abs().max() == 0
    assert torch.isfinite(scale).all()
    assert quantize.quantize_fp8(torch.zeros(0, 70))[1].shape == (0, 1)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("tokens", "width"), [(1, 96), (3, 200), (2, 5000)])
def test_strided_rows_are_quantized_as_the_reference_does(tokens: int, width: int, dtype: str) -> None:
    x = gaussian(tokens, 2 * width, dtype=dtype, seed=1)[:, :width]
    assert_quantized(*quantize.quantize_fp8(x), x)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("tokens", "width"), [(0, 64), (1, 96), (3, 1500)])
def test_a_norm_quantizes_what_it_would_have_given(tokens: int, width: int, dtype: str) -> None:
    x, residual = (gaussian(tokens, width, dtype=dtype, seed=seed) for seed in (1, 2))
    for weight in (gaussian(width, dtype=dtype, seed=3), 1 + gaussian(width, seed=4)):
        normed, total = norm.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
        given = residual.clone()
        values, scale, sum_ = norm.add_rms_norm_fp8(x.clone(), given, weight, 1e-6)
        assert sum_ is given
        assert torch.equal(sum_, total)
        assert_quantized(values, scale, normed)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("tokens", "width"), [(0, 64), (1, 96), (3, 1500)])
def test_an_activation_quantizes_what_it_would_have_given(tokens: int, width: int, kind: str) -> None:
    x = gaussian(tokens, 2 * width, dtype="float16", seed=1)
    assert_quantized(*activation.act_and_mul_fp8(x, kind), activation.act_and_mul(x, kind))


def assert_quantized(values: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> None:
    expected, expected_scale = quantize_rows(x)
    assert values.is_contiguous()
    torch.testing.assert_close(scale, expected_scale, rtol=1e-5, atol=0)
    if not len(x):
        return
    # A code whose mantissa is zero may come from a carry, which the interpreter's fp8 rounding loses.
    sound = (expected.view(torch.uint8) & 7) != 0
    assert sound.float().mean() > 0.5
    # One step of a 3-bit mantissa: a value halfway between two codes may go to either.
    torch.testing.assert_close(values.float()[sound], expected.float()[sound], rtol=0.13, atol=0.002)
    assert (values.float() == expected.float())[sound].float().mean() > 0.97
