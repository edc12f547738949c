"""4-bit weights stay packed: Triton's product, interpreted, against the unpacked weight."""

from __future__ import annotations

import os
from importlib.util import find_spec
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("interpreting Triton would hide the card from the other tests", allow_module_level=True)
os.environ.setdefault("TRITON_INTERPRET", "1")

from octavo.plugin import LinearSpec, QuantScheme
from octavo.plugin.torch import core_scheme, dequantize_weight
from octavo.triton import int4
from octavo_cuda.int4 import Int4Linear

N, K = 48, 512
CARD = SimpleNamespace(type="cuda", torch_device=torch.device("cpu"), capability=(8, 0))


def scheme(qtype: str) -> QuantScheme:
    return core_scheme(f"gguf:{qtype}")


def spec(qtype: str | None = "Q4_1", dtype: str = "float16", gate: str | None = None) -> LinearSpec:
    quantized = scheme(qtype) if qtype else None
    return LinearSpec(in_features=K, out_features=N, act_dtype=dtype, out_dtype=dtype, scheme=quantized, gate=gate)


def packed_rows(qtype: str) -> torch.Tensor:
    weight = np.random.default_rng(0).standard_normal((N, K), dtype=np.float32)
    if qtype != "Q4_K":
        return torch.from_numpy(gguf.quantize(weight, gguf.GGMLQuantizationType[qtype]))
    rows = np.random.default_rng(1).integers(0, 256, (N, K // 256, 144), dtype=np.uint8)
    rows[..., :4] = np.array([0.02, 0.01], np.float16).view(np.uint8)  # its two factors; gguf has no Q4_K quantizer
    return torch.from_numpy(rows.reshape(N, -1))


@pytest.mark.parametrize("qtype", ["Q4_0", "Q4_1", "Q4_K"])
@pytest.mark.parametrize("tokens", [0, 1, 5, 40, int4.MAX_ROWS + 1])
def test_a_product_is_that_of_the_unpacked_weight(qtype: str, tokens: int) -> None:
    rows = packed_rows(qtype)
    kernel, wanted = Int4Linear(), spec(qtype)
    weight = dequantize_weight({"weight": rows}, scheme(qtype), torch.float32)
    w = kernel.prepare({"weight": rows}, wanted, CARD)
    g = torch.Generator().manual_seed(2)
    x, bias = torch.randn(tokens, K, generator=g).half(), torch.randn(N, generator=g).half()
    for given in (None, bias):
        expected = F.linear(x.float(), weight, None if given is None else given.float())
        got = kernel.apply(x, w, given)
        assert got.dtype == torch.float16
        assert got.shape == (tokens, N)
        assert (got.float() - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.parametrize("tokens", [1, 9, int4.MAX_ROWS + 1])
def test_a_gate_follows_the_product(tokens: int) -> None:
    rows, kernel = packed_rows("Q4_0"), Int4Linear()
    w = kernel.prepare({"weight": rows}, spec("Q4_0", gate="silu"), CARD)
    x = torch.randn(tokens, K, generator=torch.Generator().manual_seed(3)).div(16).half()
    gate, up = F.linear(x.float(), dequantize_weight({"weight": rows}, scheme("Q4_0"), torch.float32)).chunk(2, dim=1)
    expected = F.silu(gate) * up
    assert (kernel.apply(x, w, None).float() - expected).norm() <= 3e-3 * expected.norm()


def test_a_packed_weight_takes_five_bits_a_number() -> None:
    w = Int4Linear().prepare({"weight": packed_rows("Q4_1")}, spec(), CARD)
    assert sum(t.nbytes for t in (w.packed.words, w.packed.groups)) * 8 == 5 * N * K


def test_only_four_bit_weights_on_a_card_in_16_bits_are_taken() -> None:
    assert Int4Linear.supports(spec(), CARD)
    assert Int4Linear.supports(spec("Q4_K", "bfloat16"), CARD)
    assert "not gguf:Q6_K" in Int4Linear.supports(spec("Q6_K"), CARD).reason
    assert "not plain weights" in Int4Linear.supports(spec(None), CARD).reason
    assert "not float32" in Int4Linear.supports(spec(dtype="float32"), CARD).reason
    assert "not cpu" in Int4Linear.supports(spec(), SimpleNamespace(type="cpu")).reason
