"""Packed products on Intel's CPU device, against float32 products of what the packages read from the same blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from octavo.plugin import LinearSpec, QuantScheme
from octavo.plugin.torch import TorchDevice, core_scheme, dequantize_weight, int4_groups, quantize_rows
from octavo.quant.online import SCHEMES
from octavo_xpu.device import SyclDevice
from octavo_xpu.linear import (
    MOST_MATRIX_TOKENS,
    MOST_TOKENS,
    TOKENS_AT_ONCE,
    Int4Linear,
    Int8Linear,
    OneDnnLinear,
)
from octavo_xpu.linear_int8 import Int8Int8Linear

ALLOWED = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 8e-3}
"""Share of the largest result: the order of sums, and the rounding of what is stored."""

TOKENS = (0, 1, 7, 8, 9, MOST_TOKENS, MOST_TOKENS + 1, MOST_MATRIX_TOKENS + 1)
"""Around the number that a weight is read for at once, and the most that a packed product takes."""


def blocks(kind: str, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of every code and sane scales, and the float32 weight that the `gguf` package reads from them."""
    qtype = gguf.GGMLQuantizationType[kind]
    columns, size = gguf.GGML_QUANT_SIZES[qtype]
    rng = np.random.default_rng(n * 1000 + k)
    packed = rng.integers(0, 256, (n, k // columns, size), dtype=np.uint8)
    for at, value in {"Q4_1": ((0, 0.01), (2, -0.08)), "Q4_K": ((0, 0.01), (2, 0.02))}.get(kind, ((0, 0.01),)):
        numbers = value * (0.5 + rng.random((n, k // columns, 1)))
        packed[..., at : at + 2] = numbers.astype(np.float16).view(np.uint8)
    rows = packed.reshape(n, -1)
    return torch.from_numpy(rows), torch.from_numpy(gguf.dequantize(rows, qtype))


def spec_of(n: int, k: int, dtype: str, scheme: QuantScheme | None) -> LinearSpec:
    return LinearSpec(in_features=k, out_features=n, act_dtype=dtype, out_dtype=dtype, scheme=scheme)


def gaussian(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check(device: SyclDevice, kernel: type, spec: LinearSpec, weight: torch.Tensor, exact: torch.Tensor) -> None:
    assert kernel.supports(spec, device).ok
    dtype, made = getattr(torch, spec.act_dtype), kernel()
    packed = made.prepare({"weight": weight}, spec, device)
    bias = gaussian(spec.out_features, seed=7).to(dtype)
    for tokens in TOKENS:
        x = gaussian(tokens, spec.in_features, seed=tokens).to(dtype)
        for added in (None, bias):
            want = F.linear(x.float(), exact, None if added is None else added.float())
            got = made.apply(x, packed, added)
            assert got.shape == want.shape
            assert got.dtype == dtype
            if tokens:
                # Products of more tokens go through a weight that is rounded to the activations' dtype.
                allowed = ALLOWED[spec.act_dtype] * (1 if tokens <= TOKENS_AT_ONCE else 2)
                error = (got.float() - want).abs().max() / want.abs().max()
                assert error <= allowed, f"{tokens} tokens: {error:.2e}"


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q8_0"])
def test_gguf_blocks_are_multiplied_as_they_are(device: SyclDevice, kind: str, dtype: str) -> None:
    for n, k in ((37, 256), (8, 1280)):
        weight, exact = blocks(kind, n, k)
        scheme = core_scheme(f"gguf:{kind}")
        if kind == "Q4_K" and dtype != "float32":  # its scales are products of two factors, kept in float16
            exact = as_kept(weight, scheme)
        check(device, Int8Linear if kind == "Q8_0" else Int4Linear, spec_of(n, k, dtype, scheme), weight, exact)


def as_kept(weight: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """The weight with scales and offsets of float16, which must be near the exact one."""
    codes, scale, offset = int4_groups({"weight": weight}, scheme)
    kept = codes.view(*scale.shape, 32).float() * scale.half().float()[..., None] + offset.half().float()[..., None]
    exact = dequantize_weight({"weight": weight}, scheme, torch.float32)
    assert (kept.flatten(1) - exact).abs().max() <= 1e-3 * exact.abs().max()
    return kept.flatten(1)


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize(("kernel", "method"), [(Int4Linear, "int4"), (Int8Linear, "int8_per_channel_weight_only")])
def test_plain_weights_are_quantized_at_load(device: SyclDevice, kernel: type, method: str, dtype: str) -> None:
    scheme = SCHEMES[method]
    for n, k in ((33, 96), (5, 512)):
        weight = gaussian(n, k, seed=n).to(getattr(torch, dtype))
        exact = dequantize_weight({"weight": weight}, scheme, torch.float32)
        check(device, kernel, spec_of(n, k, dtype, scheme), weight, exact)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_devices_without_matrix_units_multiply_packed_weights_too(plain_device: SyclDevice, kind: str) -> None:
    weight, exact = blocks(kind, 37, 256)
    kernel = Int8Linear if kind == "Q8_0" else Int4Linear
    check(plain_device, kernel, spec_of(37, 256, "float16", core_scheme(f"gguf:{kind}")), weight, exact)


def test_the_matrix_units_multiply_few_tokens_and_no_float32(device: SyclDevice, plain_device: SyclDevice) -> None:
    scheme, weight = SCHEMES["int4"], gaussian(8, 96, seed=1)
    for on, dtype, used in ((device, "bfloat16", True), (device, "float32", False), (plain_device, "bfloat16", False)):
        packed = Int4Linear().prepare({"weight": weight}, spec_of(8, 96, dtype, scheme), on)
        assert (packed.matrix is not None) == used


@pytest.mark.parametrize("dtype", ALLOWED)
def test_int8_activations_meet_int8_weights(device: SyclDevice, dtype: str) -> None:
    """Sums of codes are exact: what is left is the rounding of the result."""
    scheme = SCHEMES["int8"]
    for n, k in ((37, 96), (150, 64)):
        of = spec_of(n, k, dtype, scheme)
        assert Int8Int8Linear.supports(of, device).ok
        weight = gaussian(n, k, seed=n).to(getattr(torch, dtype))
        bias = gaussian(n, seed=7).to(weight.dtype)
        codes, scales = quantize_rows(weight, "int8")
        packed = Int8Int8Linear().prepare({"weight": weight}, of, device)
        for tokens in (0, 1, 9, 33):
            x = gaussian(tokens, k, seed=tokens).to(weight.dtype)
            found = Int8Int8Linear().apply(x, packed, bias)
            assert found.shape == (tokens, n)
            if tokens:
                taken, by = quantize_rows(x, "int8")
                expected = F.linear(taken.float(), codes.float()) * by * scales.T + bias.float()
                error = (found.float() - expected).abs().max() / expected.abs().max()
                assert error <= {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]


def test_other_formats_are_unpacked_for_torchs_product(device: SyclDevice) -> None:
    rng = np.random.default_rng(5)
    packed = gguf.quants.quantize(rng.standard_normal((24, 256), dtype=np.float32), gguf.GGMLQuantizationType.Q5_0)
    exact = torch.from_numpy(gguf.dequantize(packed, gguf.GGMLQuantizationType.Q5_0))
    scheme = core_scheme("gguf:Q5_0")
    for kernel in (Int4Linear, Int8Linear):
        assert "Q5_0" in kernel.supports(spec_of(24, 256, "float32", scheme), device).reason
    check(device, OneDnnLinear, spec_of(24, 256, "float32", scheme), torch.from_numpy(packed), exact)


def test_refusals_say_why(device: SyclDevice, plain_device: SyclDevice) -> None:
    int8 = SCHEMES["int8"]
    assert "int8" in OneDnnLinear.supports(spec_of(8, 32, "float32", int8), device).reason
    assert "float64" in OneDnnLinear.supports(spec_of(8, 32, "float64", None), device).reason
    assert "SYCL" in OneDnnLinear.supports(spec_of(8, 32, "float32", None), TorchDevice("cpu")).reason
    assert "matrix units" in Int8Int8Linear.supports(spec_of(8, 32, "float32", int8), plain_device).reason
    assert "multiple" in Int8Int8Linear.supports(spec_of(8, 40, "float32", int8), device).reason
    weight_only = SCHEMES["int8_per_channel_weight_only"]
    assert "four" in Int8Linear.supports(spec_of(8, 34, "float32", weight_only), device).reason
