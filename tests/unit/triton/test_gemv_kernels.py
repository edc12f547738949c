"""Products of few rows, interpreted, against float32 products of the decoded weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.ops.samples import gaussian

pytest.importorskip("triton", reason="the Triton kernels need triton")

from octavo.triton import gemv
from octavo.triton.gemv import GemvConfig

DTYPES = ("float32", "float16")
SHAPES = [(40, 128, 64, 1), (40, 200, 64, 2), (33, 96, 32, 4), (70, 320, 32, 3)]
"""(N, K, BLOCK_K, SPLIT_K): outputs, columns and slices that do not divide evenly among them; one slice is empty."""


def close(ours: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    assert ours.dtype == getattr(torch, dtype)
    tolerance = {"float32": 1e-4, "float16": 2e-2}[dtype]
    torch.testing.assert_close(ours.float(), expected, atol=tolerance, rtol=tolerance)


def configs(num_rows: int, block_k: int, split_k: int) -> list[GemvConfig]:
    ways = (True, False) if num_rows == 1 else (True,)
    return [GemvConfig(block_n=16, block_k=block_k, split_k=split_k, dot=dot) for dot in ways]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_gemv_is_the_product_plus_the_bias(shape: tuple[int, int, int, int], num_rows: int, dtype: str) -> None:
    n, k, block_k, split_k = shape
    x, w = gaussian(num_rows, k, dtype=dtype, seed=1), gaussian(n, k, dtype=dtype, seed=2)
    bias = gaussian(n, dtype=dtype, seed=3)
    for config in configs(num_rows, block_k, split_k):
        close(gemv.gemv(x, w, bias, config=config), F.linear(x.float(), w.float(), bias.float()), dtype)
        close(gemv.gemv(x, w, config=config), F.linear(x.float(), w.float()), dtype)


def test_counters_are_zero_again_so_that_the_next_product_can_use_them() -> None:
    x, w = gaussian(1, 256, seed=1), gaussian(40, 256, seed=2)
    counters = gemv.make_counters(40, x.device)
    for block_n, dot in ((16, True), (gemv.MIN_BLOCK_N, False)):
        assert -(-40 // block_n) <= len(counters)
        config = GemvConfig(block_n=block_n, block_k=32, split_k=4, dot=dot)
        results = [gemv.gemv(x, w, config=config, counters=counters) for _ in range(3)]
        assert counters.count_nonzero() == 0
        assert torch.equal(results[0], results[2])
        close(results[1], F.linear(x, w), "float32")


def test_rows_of_x_and_of_the_weight_may_be_strided() -> None:
    x, w = gaussian(3, 2, 64, seed=1)[:, 1], gaussian(40, 128, seed=2)[:, 64:]
    close(gemv.gemv(x, w), F.linear(x, w), "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_fp8_weights_are_decoded_and_scaled_by_row(shape: tuple[int, int, int, int], num_rows: int, dtype: str) -> None:
    n, k, block_k, split_k = shape
    x, scale = gaussian(num_rows, k, dtype=dtype, seed=1), gaussian(n, seed=2).abs()
    codes = gaussian(n, k, seed=3).to(torch.float8_e4m3fn)
    expected = F.linear(x.float(), codes.float() * scale[:, None])
    for config in configs(num_rows, block_k, split_k):
        close(gemv.gemv_fp8(x, codes, scale, config=config), expected, dtype)
        close(gemv.gemv_fp8(x, codes, scale[:, None], config=config), expected, dtype)


def test_default_configs_cut_every_known_shape_into_slices_that_hold_work() -> None:
    for n, k in ((6144, 4096), (4096, 14336), (128256, 4096), (1024, 2048), (1024, 3072), (8, 40)):
        for num_rows in range(1, 9):
            config = gemv.default_config(n, k, num_rows)
            tiles = -(-k // config.block_k)
            assert 1 <= config.split_k <= tiles
            assert config.dot == (num_rows > 1)
            assert config.block_n & (config.block_n - 1) == 0
    assert gemv.default_config(1024, 3072, 4).split_k > gemv.default_config(128256, 4096, 4).split_k == 1
    assert gemv.default_config(1024, 3072, 1).block_n < gemv.default_config(128256, 4096, 1).block_n
