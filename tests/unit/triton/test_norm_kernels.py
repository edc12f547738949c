"""Triton's norms, interpreted, against the references; also with fp8 folded in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from octavo.ops import norm as reference
from octavo.ops.samples import gaussian

pytest.importorskip("triton", reason="the Triton kernels need triton")

from octavo.triton import norm, quantize

OPS = SimpleNamespace(rms_norm=reference.rms_norm)
DTYPES = ("float32", "float16")
TOLERANCE = {"float32": 1e-5, "float16": 2e-3}


def close(ours: torch.Tensor, theirs: torch.Tensor, dtype: str) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(0, 64), (1, 96), (3, 100), (33, 1536), (2, 5000)])
def test_rms_norm_is_the_references_in_both_orders_of_rounding(tokens: int, width: int, dtype: str) -> None:
    x = gaussian(tokens, width, dtype=dtype, seed=1)
    for weight in (gaussian(width, dtype=dtype, seed=2), 1 + gaussian(width, seed=3)):
        close(norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_walks_strided_rows_without_a_copy_changing_anything(dtype: str) -> None:
    packed = gaussian(5, 8, 64, dtype=dtype, seed=5)
    weight = gaussian(64, dtype=dtype, seed=6)
    for x in (packed[:, 2:6], packed[:, 3], packed.transpose(0, 1), packed[:, :, None, :].expand(5, 8, 2, 64)):
        ours = norm.rms_norm(x, weight, 1e-5)
        assert ours.is_contiguous()
        close(ours, reference.rms_norm(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(0, 64), (1, 96), (3, 100), (33, 257)])
def test_add_rms_norm_leaves_the_sum_in_the_residual_and_the_norm_in_x(tokens: int, width: int, dtype: str) -> None:
    x, residual = gaussian(tokens, width, dtype=dtype, seed=1), gaussian(tokens, width, dtype=dtype, seed=2)
    for weight in (gaussian(width, dtype=dtype, seed=3), 1 + gaussian(width, seed=4)):
        expected, total = reference.add_rms_norm(OPS, x, residual, weight, 1e-6)
        given = x.clone(), residual.clone()
        ours = norm.add_rms_norm(*given, weight, 1e-6)
        assert [t.data_ptr() for t in ours] == [t.data_ptr() for t in given]
        close(ours[0], expected, dtype)
        assert torch.equal(ours[1], total)


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


def agrees_where_the_interpreter_rounds_well(ours: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor) -> None:
    """A code whose mantissa is zero may come from a carry, which the interpreter loses: those are left out."""
    scale = y.float().abs().amax(dim=1, keepdim=True) / 448.0
    torch.testing.assert_close(ours[1], scale, rtol=1e-5, atol=0)
    expected = (y.float() / scale).to(torch.float8_e4m3fn)
    sound = (expected.view(torch.uint8) & 7) != 0
    assert sound.float().mean() > 0.5
    # One step of a 3-bit mantissa: a value halfway between two codes may go to either.
    torch.testing.assert_close(ours[0].float()[sound], expected.float()[sound], rtol=0.13, atol=0.002)
    assert (ours[0].float() == expected.float())[sound].float().mean() > 0.97


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_quantize_what_they_would_have_returned(dtype: str) -> None:
    x, residual = gaussian(3, 200, dtype=dtype, seed=1), gaussian(3, 200, dtype=dtype, seed=2)
    weight = gaussian(200, dtype=dtype, seed=3)
    agrees_where_the_interpreter_rounds_well(
        quantize.rms_norm_fp8(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)
    )
    expected, total = reference.add_rms_norm(OPS, x, residual, weight, 1e-6)
    *ours, summed = quantize.add_rms_norm_fp8(x, residual, weight, 1e-6)
    agrees_where_the_interpreter_rounds_well(tuple(ours), expected)
    assert torch.equal(summed, total)
    assert summed.data_ptr() == residual.data_ptr()
