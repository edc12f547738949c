"""Which product runs: cuBLAS, or Triton's GEMV where the table says so."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.plugin import LinearSpec, QuantScheme
from octavo.plugin.torch import quantize_rows
from octavo_cuda.fp8 import SCHEME, Fp8Linear
from octavo_cuda.linear import CublasLinear, GemvLinear

N, K = 48, 32


class Card:
    """A device that says it is a card, over the host's memory."""

    type = "cuda"
    torch_device = torch.device("cpu")
    capability = (9, 0)


@dataclass(frozen=True)
class Cut:
    dot: bool = True
    name: str = ""


def spec(dtype: str = "bfloat16", **changes: Any) -> LinearSpec:
    fields = {"in_features": K, "out_features": N, "act_dtype": dtype, "out_dtype": dtype} | changes
    return LinearSpec(**fields)


@pytest.fixture
def gemv_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, object]]:
    """Stands in for core's Triton kernels: computes the product and notes how it was asked to."""
    calls: list[tuple[str, int, object]] = []

    def gemv(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, *, config: Any, counters: Any) -> torch.Tensor:
        calls.append(("gemv", x.shape[0], config))
        return torch.nn.functional.linear(x, weight, bias)

    def gemv_fp8(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Any = None, *, counters: Any) -> Any:
        calls.append(("gemv_fp8", x.shape[0], None))
        return torch.nn.functional.linear(x, (weight.float() * scale[:, None]).to(x.dtype), bias)

    def quantize_fp8(x: torch.Tensor, *, overlap: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_rows(x)

    module = SimpleNamespace(
        gemv=gemv, gemv_fp8=gemv_fp8, MAX_ROWS=8, make_counters=lambda n, device: torch.zeros(n // 8)
    )
    monkeypatch.setitem(sys.modules, "octavo.triton.gemv", module)
    monkeypatch.setitem(sys.modules, "octavo.triton.quantize", SimpleNamespace(quantize_fp8=quantize_fp8))
    return calls


def weight_and_input(rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(N, K, generator=g).to(dtype), torch.randn(rows, K, generator=g).to(dtype)


def test_gemv_takes_the_next_larger_measurement_and_cublas_the_rest(gemv_calls: list[tuple[str, int, object]]) -> None:
    one, four = Cut(dot=False, name="one"), Cut(name="four")
    kernel_class = GemvLinear.with_table({(N, K, 1): one, (N, K, 4): four, (7, 7, 8): Cut()})
    assert kernel_class.cuts(N, K) == (None, one, four, four, four)
    kernel = kernel_class()
    weight, x = weight_and_input(6)
    packed = kernel.prepare({"weight": weight}, spec(), Card())
    for rows in (0, 1, 3, 4, 5):
        got = kernel.apply(x[:rows], packed, None)
        torch.testing.assert_close(got, torch.nn.functional.linear(x[:rows], weight))
    assert gemv_calls == [("gemv", 1, one), ("gemv", 3, four), ("gemv", 4, four)]


def test_a_cut_for_one_row_without_the_matrix_unit_serves_no_more_rows() -> None:
    only_eight_without_dot = Cut(dot=False)
    assert GemvLinear.with_table({(N, K, 2): only_eight_without_dot}).cuts(N, K) == (
        None,
        only_eight_without_dot,
        None,
    )


def test_gemv_refuses_what_was_not_measured_and_what_it_cannot_multiply() -> None:
    measured = GemvLinear.with_table({(N, K, 1): Cut()})
    assert measured.supports(spec(), Card())
    assert "not measured" in measured.supports(spec(out_features=64), Card()).reason
    assert "not float32" in measured.supports(spec("float32"), Card()).reason
    assert "not measured" in GemvLinear.supports(spec(), Card()).reason


def test_cublas_takes_every_plain_product_on_a_card_only() -> None:
    weight, x = weight_and_input(3, torch.float32)
    kernel, bias = CublasLinear(), torch.ones(N)
    packed = kernel.prepare({"weight": weight}, spec("float32"), Card())
    torch.testing.assert_close(kernel.apply(x, packed, bias), torch.nn.functional.linear(x, weight, bias))
    assert CublasLinear.supports(spec("float16"), Card())
    host = SimpleNamespace(type="cpu")
    assert "not cpu" in CublasLinear.supports(spec(), host).reason
    assert "float64" in CublasLinear.supports(spec("float64"), Card()).reason
    assert "not float32" in CublasLinear.supports(spec(out_dtype="float32"), Card()).reason
    w8a8 = QuantScheme(weight="int8", act="int8")
    assert "int8" in CublasLinear.supports(spec(scheme=w8a8), Card()).reason


def test_quantized_weights_are_unpacked_for_cublas() -> None:
    numbers = torch.randn(N, K // 32, 1, generator=torch.Generator().manual_seed(1)).half()
    codes = torch.randint(-127, 127, (N, K // 32, 32), generator=torch.Generator().manual_seed(2), dtype=torch.int8)
    rows = torch.cat([numbers.view(torch.uint8).view(N, K // 32, 2), codes.view(torch.uint8)], dim=-1).flatten(1)
    scheme = QuantScheme(weight="int8", packing="gguf:Q8_0")
    packed = CublasLinear().prepare({"weight": rows}, spec("float32", scheme=scheme), Card())
    torch.testing.assert_close(packed, (numbers.float() * codes.float()).flatten(1))


def test_fp8_reads_few_tokens_by_gemv_and_multiplies_more_in_fp8(
    gemv_calls: list[tuple[str, int, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    products = []

    def scaled_mm(a: torch.Tensor, b: torch.Tensor, *, scale_a: Any, scale_b: Any, bias: Any, **options: Any) -> Any:
        assert a.is_contiguous()
        assert b.stride(0) == 1, "the second operand is column-major"
        assert (scale_a.shape, scale_b.shape) == ((a.shape[0], 1), (1, b.shape[1]))
        assert options == {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        products.append(a.shape[0])
        return ((a.float() @ b.float()) * scale_a * scale_b).to(torch.bfloat16)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    weight, x = weight_and_input(12)
    kernel = Fp8Linear()
    packed = kernel.prepare({"weight": weight}, spec(scheme=SCHEME), Card())
    assert packed.weight.dtype == torch.float8_e4m3fn
    for rows in (1, 8, 9, 12):
        got, expected = kernel.apply(x[:rows], packed, None), torch.nn.functional.linear(x[:rows], weight)
        assert (got - expected).float().norm() / expected.float().norm() < 0.06
    assert [rows for _, rows, _ in gemv_calls] == [1, 8]
    assert products == [9, 12]


def test_fp8_says_what_it_lacks() -> None:
    old = Card()
    old.capability = (8, 6)
    assert Fp8Linear.supports(spec(scheme=SCHEME), Card())
    assert "asked for" in Fp8Linear.supports(spec(), Card()).reason
    assert "8.9" in Fp8Linear.supports(spec(scheme=SCHEME), old).reason
    assert "float16" in Fp8Linear.supports(spec("float16", scheme=SCHEME), Card()).reason
    assert "multiples of 16" in Fp8Linear.supports(spec(scheme=SCHEME, in_features=40), Card()).reason
