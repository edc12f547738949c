"""Products in fp8: which kernel runs with how many tokens, and what it keeps of the numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from octavo.plugin import LinearSpec
from octavo.plugin.torch import ScaledRows, quantize_rows

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("the kernels are interpreted on the host's memory", allow_module_level=True)

from octavo.triton import linear_fp8
from octavo.triton.linear_fp8 import PLAIN_TOKENS, SCHEME
from octavo_cuda.fp8 import SKINNY_TOKENS, Fp8Linear

N, K = 64, 96
CARD = SimpleNamespace(type="cuda", torch_device=torch.device("cpu"), capability=(8, 9))


def spec(dtype: str = "bfloat16", **changes: Any) -> LinearSpec:
    fields = {"in_features": K, "out_features": N, "act_dtype": dtype, "out_dtype": dtype, "scheme": SCHEME}
    return LinearSpec(**fields | changes)


def kept(x: torch.Tensor) -> torch.Tensor:
    """What fp8 keeps of x."""
    values, scale = quantize_rows(x)
    return values.float() * scale


@pytest.mark.parametrize("gate", [None, "silu"])
def test_few_tokens_stay_as_they_are_and_more_are_multiplied_in_fp8(
    gate: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = []

    def scaled_mm(a: torch.Tensor, b: torch.Tensor, *, scale_a: Any, scale_b: Any, bias: Any, **options: Any) -> Any:
        assert a.is_contiguous()
        assert b.stride(0) == 1, "the second operand is column-major"
        assert (scale_a.shape, scale_b.shape) == ((a.shape[0], 1), (1, b.shape[1]))
        assert options == {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        products.append(a.shape[0])
        return ((a.float() @ b.float()) * scale_a * scale_b + bias).to(torch.bfloat16)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    # The interpreter's own fp8 rounding loses carries into the exponent.
    monkeypatch.setattr(linear_fp8, "quantize_fp8", lambda x, **options: quantize_rows(x))
    g = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(*shape, generator=g).bfloat16() for shape in ((N, K), (N,)))
    kernel = Fp8Linear()
    packed = kernel.prepare({"weight": weight}, spec(gate=gate), CARD)
    assert packed.weight.dtype == torch.float8_e4m3fn
    for tokens in (1, PLAIN_TOKENS, PLAIN_TOKENS + 1, SKINNY_TOKENS, SKINNY_TOKENS + 1, 150):
        x = torch.randn(tokens, K, generator=g).bfloat16()
        expected = F.linear(x.float() if tokens <= PLAIN_TOKENS else kept(x), kept(weight), bias.float())
        if gate is not None:
            expected = F.silu(expected[:, : N // 2]) * expected[:, N // 2 :]
        got = kernel.apply(x, packed, bias).float()
        # fp8 activations are 2 to 3 % off: the bound tells one way from the other. The interpreter cuts off bfloat16
        # instead of rounding it, and does so three times for a gate.
        assert (got - expected).norm() / expected.norm() < (8e-3 if gate is None else 2e-2)
        if tokens > PLAIN_TOKENS:
            rows = ScaledRows(*quantize_rows(x))
            assert torch.equal(kernel.apply(rows, packed, bias).float(), got), "quantized before or inside: the same"
            if gate is not None:
                again = kernel.apply_scaled(rows, packed, bias)
                assert again.values.dtype == torch.float8_e4m3fn
                assert (again.values.float() * again.scale - got).norm() / got.norm() < 0.05
    times = 2 if gate is None else 3
    assert products == [SKINNY_TOKENS + 1] * times + [150] * times


def test_fp8_says_what_it_lacks() -> None:
    old = SimpleNamespace(type="cuda", capability=(8, 6))
    assert Fp8Linear.supports(spec(), CARD)
    assert "asked for" in Fp8Linear.supports(spec(scheme=None), CARD).reason
    assert "8.9" in Fp8Linear.supports(spec(), old).reason
    assert "float16" in Fp8Linear.supports(spec("float16"), CARD).reason
    assert "multiples of 16" in Fp8Linear.supports(spec(in_features=40), CARD).reason
