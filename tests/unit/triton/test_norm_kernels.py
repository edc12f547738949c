"""Triton's norms, interpreted, against the references."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from octavo.ops import norm as reference
from octavo.ops.samples import gaussian

pytest.importorskip("triton", reason="the Triton kernels need triton")

from octavo.triton import norm

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
