"""Which product runs: cuBLAS, or one of Triton's where the table says so."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from octavo.plugin import LinearSpec, QuantScheme
from octavo.plugin.torch import core_scheme
from octavo_cuda.linear import CublasLinear, TritonLinear

pytest.importorskip("triton", reason="Triton is not installed")

from octavo.triton import gemv, skinny
from octavo.triton.gemv import GemvConfig
from octavo.triton.skinny import SkinnyConfig
from octavo_cuda.tuning_products import H200

N, K = 48, 32


class Card:
    """A device that says it is a card, over the host's memory."""

    type = "cuda"
    torch_device = torch.device("cpu")
    capability = (9, 0)


def spec(dtype: str = "bfloat16", **changes: Any) -> LinearSpec:
    fields = {"in_features": K, "out_features": N, "act_dtype": dtype, "out_dtype": dtype} | changes
    return LinearSpec(**fields)


Calls = list[tuple[str, int, object]]
"""(kernel, tokens, config) of each call."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Core's Triton kernels, replaced by torch; what was asked of them."""
    activation, gemv, skinny = (
        importlib.import_module(f"octavo.triton.{name}") for name in ("activation", "gemv", "skinny")
    )
    noted: Calls = []

    def act_and_mul(y: torch.Tensor, kind: str, *, overlap: Any) -> torch.Tensor:
        noted.append((f"act_and_mul {kind}", y.shape[0], None))
        return gated(y)

    def product(name: str) -> Any:
        def run(x: torch.Tensor, w: torch.Tensor, bias: Any = None, *, gate: Any, **options: Any) -> Any:
            noted.append((name, x.shape[0], options.get("config")))
            y = F.linear(x, w, bias)
            return y if gate is None else gated(y)

        return run

    monkeypatch.setattr(activation, "act_and_mul", act_and_mul)
    monkeypatch.setattr(gemv, "gemv", product("gemv"))
    monkeypatch.setattr(skinny, "skinny", product("skinny"))
    return noted


def gated(y: torch.Tensor) -> torch.Tensor:
    return F.silu(y[:, : N // 2]) * y[:, N // 2 :]


def weight_and_input(rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(N, K, generator=g).to(dtype), torch.randn(rows, K, generator=g).to(dtype)


def test_the_next_larger_measurement_runs_and_cublas_where_it_won_and_beyond(calls: Calls) -> None:
    one, four = GemvConfig(block_n=8, block_k=32, dot=False), GemvConfig(block_n=16, block_k=32)
    sixteen = SkinnyConfig(block_n=16, block_k=32, programs=3)
    table = {(N, K, False, 1): one, (N, K, False, 4): four, (N, K, False, 8): None, (N, K, False, 16): sixteen}
    kernel_class = TritonLinear.with_table(table | {(N, K, True, 2): four, (7, 7, False, 32): sixteen})
    assert kernel_class.cuts(spec(), Card()) == (None, one, four, four, four, *4 * [None], *8 * [sixteen])
    kernel = kernel_class()
    weight, x = weight_and_input(20)
    packed = kernel.prepare({"weight": weight}, spec(), Card())
    for rows in (0, 1, 3, 4, 5, 9, 16, 17):
        torch.testing.assert_close(kernel.apply(x[:rows], packed, None), F.linear(x[:rows], weight))
    assert calls[:3] == [("gemv", 1, one), ("gemv", 3, four), ("gemv", 4, four)]
    assert calls[3:] == [("skinny", 9, sixteen), ("skinny", 16, sixteen)]


def test_a_gated_product_has_measurements_of_its_own_and_an_activation_behind_cublas(calls: Calls) -> None:
    cut = GemvConfig(block_n=16, block_k=32)
    kernel_class = TritonLinear.with_table({(N, K, True, 2): cut, (N, K, False, 8): cut})
    asked = spec(gate="silu")
    kernel = kernel_class()
    weight, x = weight_and_input(4)
    packed = kernel.prepare({"weight": weight}, asked, Card())
    for rows in (2, 4):
        torch.testing.assert_close(kernel.apply(x[:rows], packed, None), gated(F.linear(x[:rows], weight)))
    assert calls == [("gemv", 2, cut), ("act_and_mul silu", 4, None)]
    only_plain = TritonLinear.with_table({(N, K, False, 8): cut})
    assert "gated 48x32" in only_plain.supports(asked, Card()).reason


def test_a_cut_for_one_token_without_the_matrix_unit_serves_no_more() -> None:
    only_two = GemvConfig(block_n=8, block_k=32, dot=False)
    assert TritonLinear.with_table({(N, K, False, 2): only_two}).cuts(spec(), Card()) == (None, only_two, None)


def test_what_was_not_measured_or_cannot_be_multiplied_is_refused() -> None:
    measured = TritonLinear.with_table({(N, K, False, 1): GemvConfig(block_n=8, block_k=32)})
    assert measured.supports(spec(), Card())
    assert "not measured" in measured.supports(spec(out_features=64), Card()).reason
    assert "not float32" in measured.supports(spec("float32"), Card()).reason
    assert "not measured" in TritonLinear.supports(spec(), Card()).reason


def test_every_entry_of_the_h200_can_run_what_it_is_listed_for() -> None:
    for (_, num_in, gate, tokens), cut in H200.items():
        if isinstance(cut, GemvConfig):
            assert tokens == 1 or (cut.dot and tokens <= gemv.MAX_ROWS)
        elif cut is not None:
            assert tokens <= skinny.MAX_ROWS
            tile = 2 * cut.block_k * (cut.block_n + skinny.padded_rows(tokens))
            assert cut.num_stages * tile <= 227 * 1024, "tiles on their way fit Hopper's shared memory"
        if cut is not None:
            assert num_in % cut.block_k == 0, "weights are asked for ahead of time in whole tiles"
            assert not gate or cut.block_n >= 2 * gemv.MIN_BLOCK_N


def test_cublas_takes_every_plain_product_on_a_card_only() -> None:
    weight, x = weight_and_input(3, torch.float32)
    kernel, bias = CublasLinear(), torch.ones(N)
    packed = kernel.prepare({"weight": weight}, spec("float32"), Card())
    torch.testing.assert_close(kernel.apply(x, packed, bias), F.linear(x, weight, bias))
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
    scheme = core_scheme("gguf:Q8_0")
    packed = CublasLinear().prepare({"weight": rows}, spec("float32", scheme=scheme), Card())
    torch.testing.assert_close(packed, (numbers.float() * codes.float()).flatten(1))
