"""Products of a few dozen rows, interpreted, against float32 products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.ops.activation import ACTIVATIONS, act_and_mul
from octavo.ops.samples import gaussian

pytest.importorskip("triton", reason="the Triton kernels need triton")

from octavo.triton import gemv, skinny
from octavo.triton.gemv import GemvConfig
from octavo.triton.skinny import SkinnyConfig

CUTS = (
    # (N, K, BLOCK_N, BLOCK_K, programs)
    (40, 128, 16, 32, 3),  # programs end in the middle of blocks; outputs do not fill the last block
    (96, 200, 32, 64, 5),  # columns do not fill the last tile
    (64, 128, 32, 64, 1),  # one program takes all
    (32, 512, 32, 32, 7),  # one block is shared by all programs
    (48, 64, 16, 64, 99),  # more programs than tiles
)


def close(ours: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    assert ours.dtype == getattr(torch, dtype)
    tolerance = {"float32": 1e-4, "float16": 2e-2}[dtype]
    torch.testing.assert_close(ours.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("num_rows", [0, 1, 9, 33])
@pytest.mark.parametrize("cut", CUTS)
def test_skinny_is_the_product_plus_the_bias(cut: tuple[int, int, int, int, int], num_rows: int, dtype: str) -> None:
    n, k, block_n, block_k, programs = cut
    x, w = gaussian(num_rows, k, dtype=dtype, seed=1), gaussian(n, k, dtype=dtype, seed=2)
    bias = gaussian(n, dtype=dtype, seed=3)
    config = SkinnyConfig(block_n=block_n, block_k=block_k, programs=programs)
    close(skinny.skinny(x, w, bias, config=config), F.linear(x.float(), w.float(), bias.float()), dtype)
    close(skinny.skinny(x, w, config=config), F.linear(x.float(), w.float()), dtype)


@pytest.mark.parametrize("cut", CUTS)
def test_a_weight_in_fp8_counts_with_its_rows_scales(cut: tuple[int, int, int, int, int]) -> None:
    n, k, block_n, block_k, programs = cut
    x, w, scale = (
        gaussian(9, k, seed=1),
        gaussian(n, k, seed=2, scale=0.1).to(torch.float8_e4m3fn),
        gaussian(n, seed=3).abs(),
    )
    config = SkinnyConfig(block_n=block_n, block_k=block_k, programs=programs)
    for gate in (None, "silu"):
        expected = F.linear(x, w.float() * scale[:, None])
        ours = skinny.skinny(x, w, scale=scale, gate=gate, config=config)
        close(ours, expected if gate is None else act_and_mul(expected, gate), "float32")


@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("num_rows", [1, 9, 33])
@pytest.mark.parametrize("cut", CUTS)
def test_both_sides_may_be_fp8(cut: tuple[int, int, int, int, int], num_rows: int, gate: str | None) -> None:
    n, k, block_n, block_k, programs = cut
    x, w = (gaussian(rows, k, seed=rows, scale=0.2).to(torch.float8_e4m3fn) for rows in (num_rows, n))
    x_scale, scale = gaussian(num_rows, seed=3).abs(), gaussian(n, seed=4).abs()
    expected = F.linear(x.float() * x_scale[:, None], w.float() * scale[:, None])
    ours = skinny.skinny(
        x,
        w,
        scale=scale,
        x_scale=x_scale,
        out_dtype=torch.float32,
        gate=gate,
        config=SkinnyConfig(block_n=block_n, block_k=block_k, programs=programs),
    )
    close(ours, expected if gate is None else act_and_mul(expected, gate), "float32")


def test_the_default_cut_takes_up_to_128_rows_and_odd_sizes() -> None:
    for num_rows, n, k in ((128, 70, 90), (17, 33, 20)):
        x, w = gaussian(num_rows, k, seed=1), gaussian(n, k, seed=2)
        close(skinny.skinny(x, w), F.linear(x, w), "float32")


@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
@pytest.mark.parametrize("kernel", ["skinny", "skinny shared", "lanes", "dot", "dot split"])
def test_a_gate_is_what_act_and_mul_makes_of_the_product(kernel: str, kind: str) -> None:
    num_rows = 1 if kernel == "lanes" else 5
    x, w, bias = gaussian(num_rows, 128, seed=1), gaussian(2 * 27, 128, seed=2, scale=0.2), gaussian(2 * 27, seed=3)
    if kernel.startswith("skinny"):
        cut = SkinnyConfig(block_n=16, block_k=32, programs=3 if kernel == "skinny shared" else 4)
        ours = skinny.skinny(x, w, bias, gate=kind, config=cut)
    else:
        split_k = 2 if kernel == "dot split" else 1
        config = GemvConfig(block_n=16, block_k=32, split_k=split_k, dot=kernel != "lanes")
        ours = gemv.gemv(x, w, bias, gate=kind, config=config)
    close(ours, act_and_mul(F.linear(x, w, bias), kind), "float32")


def test_a_gate_rounds_like_the_product_and_the_activation_by_themselves() -> None:
    # One column and powers of two: the product is exact, so that only the roundings behind it can differ.
    x = gaussian(16, 16, dtype="float16", seed=1)
    x[:, 1:] = 0
    w = torch.zeros(64, 16, dtype=torch.float16)
    w[:, 0] = 0.5
    together = skinny.skinny(x, w, gate="silu", config=SkinnyConfig(block_n=32, block_k=16, programs=2))
    apart = act_and_mul(F.linear(x.float(), w.float()).half(), "silu")
    assert (together == apart).float().mean() > 0.95
    torch.testing.assert_close(together, apart, rtol=2e-3, atol=1e-6)


def test_counters_are_zero_again_and_results_repeat_exactly() -> None:
    x, w = gaussian(20, 256, seed=1), gaussian(96, 256, seed=2)
    counters = gemv.make_counters(96, x.device)
    config = SkinnyConfig(block_n=32, block_k=32, programs=7)
    results = [skinny.skinny(x, w, config=config, counters=counters) for _ in range(3)]
    assert counters.count_nonzero() == 0
    assert torch.equal(results[0], results[2])


def test_rows_of_x_and_of_the_weight_may_be_strided() -> None:
    x, w = gaussian(20, 2, 64, seed=1)[:, 1], gaussian(40, 128, seed=2)[:, 64:]
    close(skinny.skinny(x, w), F.linear(x, w), "float32")


def test_the_most_parts_of_a_block_are_counted_right() -> None:
    for tiles_k, blocks, programs in ((4, 3, 3), (4, 3, 5), (16, 1, 7), (5, 7, 11), (2, 9, 4)):
        tiles = tiles_k * blocks
        owners = [p for p in range(programs) for _ in range(p * tiles // programs, (p + 1) * tiles // programs)]
        shared = [len(set(owners[b * tiles_k : (b + 1) * tiles_k])) for b in range(blocks)]
        assert skinny.most_parts(tiles_k, blocks, programs) == max(shared)
