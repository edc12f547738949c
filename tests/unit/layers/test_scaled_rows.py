"""Activations in fp8 between layers: the norm and the activation quantize for the product behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch

from octavo.layers.context import BuildContext
from octavo.layers.linear import NEVER
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.ops.activation import act_and_mul
from octavo.ops.bind import KernelTable
from octavo.plugin.data import YES, Support, no
from octavo.plugin.specs import LinearSpec
from octavo.plugin.torch import ScaledRows, quantize_rows
from octavo.quant.online import Online

Tensor = torch.Tensor
HIDDEN, INNER, FROM = 32, 48, 4


class QuantizingLinear:
    """A kernel for online fp8 that multiplies what fp8 keeps, and notes in which form each x came."""

    name: ClassVar[str] = "quantizing"
    gates: ClassVar[tuple[str, ...]] = ("silu",)
    seen: ClassVar[list[type]] = []

    @classmethod
    def supports(cls, spec: LinearSpec, device: Any) -> Support:
        return YES if spec.scheme is not None else no("for fp8")

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Any) -> tuple[Tensor, str | None]:
        return weights["weight"], spec.gate

    def apply(self, x: Any, w: tuple[Tensor, str | None], bias: Tensor | None) -> Tensor:
        self.seen.append(type(x))
        values, scale = x if isinstance(x, ScaledRows) else quantize_rows(x)
        y = values.float() * scale @ w[0].T
        return y if w[1] is None else act_and_mul(y, w[1])


class ScalingLinear(QuantizingLinear):
    """The same, and takes rows that are quantized already."""

    scaled_rows_from: ClassVar[int] = FROM

    def apply_scaled(self, x: Any, w: tuple[Tensor, str | None], bias: Tensor | None) -> ScaledRows:
        return ScaledRows(*quantize_rows(self.apply(x, w, bias)))


@pytest.fixture
def run(make_context: Callable[..., BuildContext], tensors: Any) -> Callable[[type, int], tuple[Tensor, list[type]]]:
    """(kernel class, tokens) -> what a norm and a feed-forward block give, and the forms of x that the kernel saw."""

    def run(cls: type[QuantizingLinear], tokens: int) -> tuple[Tensor, list[type]]:
        table = KernelTable()
        table.linear(cls)
        ctx = make_context(kernels=table, quant=Online({"method": "fp8"}).layer)
        norm = RMSNorm(ctx, "norm", HIDDEN, 1e-6)
        mlp = GatedMLP(ctx, "mlp", HIDDEN, INNER, activation="silu")
        g = torch.Generator().manual_seed(0)
        for name, slot in ctx.weights.slots.items():
            slot.load(tensors.plain(name, torch.randn(*slot.shape, generator=g)))
        x, residual = torch.randn(2, tokens, HIDDEN, generator=g)
        cls.seen.clear()
        rows, total = norm.add_before(mlp, x.clone(), residual.clone())
        torch.testing.assert_close(total, x + residual)
        return mlp(rows), list(cls.seen)

    return run


def test_products_of_many_tokens_get_rows_that_are_quantized_and_give_the_same(run: Any) -> None:
    expected, plain_forms = run(QuantizingLinear, FROM)
    got, forms = run(ScalingLinear, FROM)
    assert plain_forms == [Tensor, Tensor]
    assert forms == [ScaledRows, ScaledRows]
    torch.testing.assert_close(got, expected)


def test_products_of_few_tokens_get_plain_rows(run: Any) -> None:
    assert run(ScalingLinear, FROM - 1)[1] == [Tensor, Tensor]


def test_a_kernel_that_says_nothing_never_gets_them(make_context: Callable[..., BuildContext], tensors: Any) -> None:
    ctx = make_context()
    mlp = GatedMLP(ctx, "mlp", HIDDEN, INNER, activation="silu")
    for name, slot in ctx.weights.slots.items():
        slot.load(tensors.plain(name, torch.ones(*slot.shape)))
    assert mlp.scaled_rows_from == NEVER
