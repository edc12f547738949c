"""Triton's products with 4-bit weights, interpreted, against the product with the unpacked weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.ops.activation import act_and_mul
from octavo.ops.samples import gaussian

pytest.importorskip("triton", reason="the Triton kernels need triton")

from octavo.triton import int4
from octavo.triton.int4 import Int4Config, Int4Weight


def weight_of(num_out: int, num_in: int) -> tuple[torch.Tensor, Int4Weight]:
    """(float32 [N, K], the same packed)."""
    g = torch.Generator().manual_seed(num_out + num_in)
    codes = torch.randint(16, (num_out, num_in), generator=g, dtype=torch.uint8)
    scale = (torch.rand(num_out, num_in // 32, generator=g) * 0.05).half()
    offset = torch.randn(num_out, num_in // 32, generator=g).mul(0.2).half()
    plain = codes.view(num_out, -1, 32).float() * scale.float()[:, :, None] + offset.float()[:, :, None]
    return plain.flatten(1), int4.pack(codes, scale, offset)


@pytest.mark.parametrize(("num_out", "num_in"), [(40, 256), (33, 96), (8, 800)])
def test_unpacking_gives_the_weight_back(num_out: int, num_in: int) -> None:
    plain, packed = weight_of(num_out, num_in)
    assert packed.words.shape == (num_out, -(-num_in // 256) * 32)
    torch.testing.assert_close(int4.unpack(packed, torch.float32), plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 16, 40])
@pytest.mark.parametrize(("num_out", "num_in"), [(40, 256), (96, 96), (24, 1056)])
def test_a_product_is_that_of_the_unpacked_weight(rows: int, num_out: int, num_in: int) -> None:
    plain, packed = weight_of(num_out, num_in)
    x, bias = gaussian(rows, 2 * num_in, seed=1)[:, :num_in], gaussian(num_out, seed=2)
    for given in (None, bias):
        torch.testing.assert_close(int4.product(x, packed, given), F.linear(x, plain, given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("split_k", [1, 3])
def test_every_cut_gives_the_same_product_and_leaves_its_counters_zero(rows: int, split_k: int) -> None:
    plain, packed = weight_of(40, 1056)
    x, counters = gaussian(rows, 1056, seed=1), torch.zeros(10, dtype=torch.int32)
    config = Int4Config(block_n=16, split_k=split_k, dot=rows > 1)
    for gate in (None, "silu"):
        expected = F.linear(x, plain) if gate is None else act_and_mul(F.linear(x, plain), gate)
        got = int4.product(x, packed, gate=gate, config=config, counters=counters)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert not counters.any()


def test_more_rows_than_one_tile_holds_are_cut() -> None:
    plain, packed = weight_of(24, 288)
    x = gaussian(150, 288, seed=1)
    torch.testing.assert_close(int4.product(x, packed), F.linear(x, plain), rtol=1e-4, atol=1e-4)
    gated = int4.product(x, packed, gate="gelu")
    torch.testing.assert_close(gated, act_and_mul(F.linear(x, plain), "gelu"), rtol=1e-4, atol=1e-4)
    assert int4.product(x[:0], packed).shape == (0, 24)


def test_default_cuts_fit_what_the_kernel_takes() -> None:
    for num_out, num_in in ((576, 576), (4096, 14336), (128256, 4096)):
        for rows in (1, 2, 16, 17, 64, 256):
            config = int4.default_config(num_out, num_in, rows)
            assert config.split_k == 1 or rows <= 64
            assert config.num_warps in (2, 4, 8)
            assert config.dot == (rows > 1)
