"""Tier 2: every linear kernel against a float32 product, for plain weights and for every GGUF block format it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from octavo.ops.activation import ACTIVATIONS
from octavo.plugin import LinearSpec, QuantScheme
from octavo.testing.conformance.subject import Kernel, Subject

ALLOWED = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}
"""Error by dtype, as a share of the largest result."""

SHAPES = ((64, 96, False), (256, 128, True), (512, 256, False))
"""(in_features, out_features, bias)."""

NUM_TOKENS = (0, 1, 3, 16, 33, 128)
FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def plain_cases(dtype: str) -> Iterator[tuple[LinearSpec, dict[str, torch.Tensor], torch.Tensor]]:
    """(spec, canonical weights, the weight in float32) of unquantized layers."""
    for in_features, out_features, bias in SHAPES:
        generator = torch.Generator().manual_seed(in_features)
        weight = torch.randn(out_features, in_features, generator=generator).to(getattr(torch, dtype))
        spec = LinearSpec(
            in_features=in_features,
            out_features=out_features,
            act_dtype=dtype,
            out_dtype=dtype,
            bias=bias,
            max_tokens=max(NUM_TOKENS),
        )
        yield spec, {"weight": weight}, weight.float()


def quantized_case(dtype: str, fmt: str) -> tuple[LinearSpec, dict[str, torch.Tensor], torch.Tensor]:
    """A layer whose weight is packed as in a GGUF file."""
    kind = gguf.GGMLQuantizationType[fmt]
    values = np.random.default_rng(5).standard_normal((96, 256), dtype=np.float32)
    packed = gguf.quants.quantize(values, kind)
    scheme = QuantScheme(
        weight="int8" if fmt == "Q8_0" else f"uint{fmt[1]}",
        granularity="group",
        group=(1, 32),
        symmetric=fmt.endswith("_0"),
        packing=f"gguf:{fmt}",
    )
    spec = LinearSpec(
        in_features=256,
        out_features=96,
        act_dtype=dtype,
        out_dtype=dtype,
        scheme=scheme,
        max_tokens=max(NUM_TOKENS),
    )
    return spec, {"weight": torch.from_numpy(packed)}, torch.from_numpy(gguf.quants.dequantize(packed, kind))


def test_a_linear_kernel_multiplies(subject: Subject, linear: Kernel, dtype: str) -> None:
    ran = [check(subject, linear, *case) for case in plain_cases(dtype)]
    if not any(ran):
        pytest.skip("refuses plain weights in this dtype")


@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
def test_a_linear_kernel_applies_the_gates_that_it_lists(
    subject: Subject, linear: Kernel, dtype: str, kind: str
) -> None:
    if kind not in getattr(linear.fn, "gates", ()):
        pytest.skip(f"does not apply {kind} gates; core applies them to its product")
    cases = [(replace(spec, gate=kind), weights, exact) for spec, weights, exact in plain_cases(dtype)]
    ran = [check(subject, linear, *case) for case in cases]
    if not any(ran):
        pytest.skip("refuses gated products of plain weights in this dtype")


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_linear_kernel_multiplies_packed_weights(subject: Subject, linear: Kernel, dtype: str, fmt: str) -> None:
    if not check(subject, linear, *quantized_case(dtype, fmt)):
        pytest.skip(f"refuses {fmt}")


def check(
    subject: Subject, linear: Kernel, spec: LinearSpec, weights: dict[str, torch.Tensor], exact: torch.Tensor
) -> bool:
    """Compare products of several sizes. False if the kernel refuses the spec, with a reason."""
    device = subject.device
    answer = linear.fn.supports(spec, device)
    if not answer.ok:
        assert answer.reason, "a refusal must carry a reason"
        return False
    allowed = subject.settings.error("linear", spec.act_dtype, ALLOWED[spec.act_dtype])
    dtype = getattr(torch, spec.act_dtype)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(spec.out_features, generator=generator).to(dtype) if spec.bias else None
    target = device.torch_device
    with device.inference():
        kernel = linear.fn()
        given = {name: tensor.clone() for name, tensor in weights.items()}
        packed = kernel.prepare(given, spec, device)
        for num_tokens in NUM_TOKENS:
            x = torch.randn(num_tokens, spec.in_features, generator=generator).to(dtype)
            expected = torch.nn.functional.linear(x.float(), exact, bias.float() if bias is not None else None)
            if spec.gate is not None:
                gate, up = expected.chunk(2, dim=-1)
                expected = ACTIVATIONS[spec.gate](gate) * up
            got = kernel.apply(x.to(target), packed, None if bias is None else bias.to(target))
            assert got.shape == expected.shape
            assert got.dtype == getattr(torch, spec.out_dtype)
            if num_tokens:
                error = (got.cpu().float() - expected).abs().max() / expected.abs().max()
                assert error <= allowed, f"{spec}: error {error:.2e} of the largest result at {num_tokens} tokens"
    return True
