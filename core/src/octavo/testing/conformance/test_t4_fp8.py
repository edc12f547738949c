"""Tier 4: linear kernels that quantize plain weights to fp8, with gates, and activations that come quantized."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.ops.activation import ACTIVATIONS
from octavo.plugin import LinearSpec
from octavo.plugin.torch import ScaledRows
from octavo.quant.online import SCHEMES, quantize_rows, round_rows
from octavo.testing.conformance.subject import Kernel, Subject

IN, OUT = 256, 192
NUM_TOKENS = (0, 1, 9, 33, 128)
ALLOWED = 0.08
"""Error as a share of the largest result: a kernel may leave activations as they are, which fp8 keeps to 1/16."""


@pytest.mark.parametrize("gate", [None, "silu"])
def test_a_linear_kernel_multiplies_in_fp8(subject: Subject, linear: Kernel, dtype: str, gate: str | None) -> None:
    kernel, packed, weight = prepared(subject, linear, dtype, gate)
    for num_tokens in NUM_TOKENS:
        x = rows(num_tokens, dtype)
        expected = gated(round_rows(x).float() @ round_rows(weight.float()).T, gate)
        got = kernel.apply(x.to(subject.device.torch_device), packed, None)
        assert (got.shape, got.dtype) == (expected.shape, x.dtype)
        if num_tokens:
            assert error(got, expected) <= ALLOWED, f"{num_tokens} tokens"


@pytest.mark.parametrize("gate", [None, "silu"])
def test_rows_that_come_quantized_give_what_plain_ones_give(
    subject: Subject, linear: Kernel, dtype: str, gate: str | None
) -> None:
    kernel, packed, _ = prepared(subject, linear, dtype, gate)
    least = getattr(kernel, "scaled_rows_from", None)
    if least is None:
        pytest.skip("takes plain rows only")
    for num_tokens in (least, 2 * least + 1):
        x = rows(num_tokens, dtype).to(subject.device.torch_device)
        plain, quantized = kernel.apply(x, packed, None), ScaledRows(*quantize_rows(x))
        assert error(kernel.apply(quantized, packed, None), plain) <= 2e-2
        if gate is not None:
            scaled = kernel.apply_scaled(quantized, packed, None)
            assert error(scaled.values.float() * scaled.scale, plain) <= ALLOWED


def prepared(subject: Subject, linear: Kernel, dtype: str, gate: str | None) -> tuple[Any, Any, torch.Tensor]:
    """(kernel, packed weight, plain weight). Skips a kernel that refuses, with a reason."""
    spec = LinearSpec(
        in_features=IN,
        out_features=OUT,
        act_dtype=dtype,
        out_dtype=dtype,
        scheme=SCHEMES["fp8"],
        max_tokens=max(NUM_TOKENS),
        gate=gate,
    )
    if gate is not None and gate not in getattr(linear.fn, "gates", ()):
        pytest.skip(f"does not apply {gate} gates; core applies them to its product")
    answer = linear.fn.supports(spec, subject.device)
    if not answer.ok:
        assert answer.reason, "a refusal must carry a reason"
        pytest.skip(f"refuses: {answer.reason}")
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(3)).to(getattr(torch, dtype))
    kernel = linear.fn()
    return kernel, kernel.prepare({"weight": weight.clone()}, spec, subject.device), weight


def rows(num_tokens: int, dtype: str) -> torch.Tensor:
    return torch.randn(num_tokens, IN, generator=torch.Generator().manual_seed(num_tokens)).to(getattr(torch, dtype))


def gated(y: torch.Tensor, gate: str | None) -> torch.Tensor:
    """y [T, N], or its gated half [T, N / 2]."""
    if gate is None:
        return y
    first, second = y.chunk(2, dim=-1)
    return ACTIVATIONS[gate](first) * second


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.cpu().float() - expected.cpu().float()).abs().max() / expected.abs().max())
