"""A gated product is made by the kernel that can, and in two steps by any other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

from octavo.ops.activation import ACTIVATIONS, act_and_mul
from octavo.ops.bind import KernelTable
from octavo.plugin import YES, Device, LinearSpec, Support, no
from octavo.plugin.torch import TorchDevice

CPU = TorchDevice("cpu")
PLAIN = LinearSpec(in_features=32, out_features=24, act_dtype="float32", out_dtype="float32")
GATED = replace(PLAIN, gate="silu")


class Whole:
    """Applies silu gates itself."""

    name: ClassVar[str] = "whole"
    gates: ClassVar[tuple[str, ...]] = ("silu",)
    widest: ClassVar[int] = 100

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        return YES if spec.out_features <= cls.widest else no("too wide")

    def prepare(self, weights: Mapping[str, torch.Tensor], spec: LinearSpec, device: Device) -> Any:
        return weights["weight"], spec.gate

    def apply(self, x: torch.Tensor, w: Any, bias: torch.Tensor | None) -> torch.Tensor:
        y = F.linear(x, w[0], bias)
        return y if w[1] is None else act_and_mul(y, w[1])


class Plain(Whole):
    """Has never heard of gates."""

    name: ClassVar[str] = "plain"
    gates: ClassVar[tuple[str, ...]] = ()

    def prepare(self, weights: Mapping[str, torch.Tensor], spec: LinearSpec, device: Device) -> Any:
        assert spec.gate is None
        return weights["weight"], None


def table_of(*classes: type[Any], **forced: str) -> KernelTable:
    """The first is preferred."""
    table = KernelTable(forced=forced)
    for i, cls in enumerate(classes):
        table.linear(cls, priority=-i)
    return table


def product(table: KernelTable, spec: LinearSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(what the table's kernel gives, x, weight)."""
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 32, generator=g), torch.randn(24, 32, generator=g)
    kernel = table.linear_kernel(spec, CPU)
    return kernel.apply(x, kernel.prepare({"weight": weight.clone()}, spec, CPU), None), x, weight


def provider_of(table: KernelTable, what: str) -> str | None:
    return next((choice.provider for choice in table.choices if choice.what == what), None)


@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
@pytest.mark.parametrize("classes", [(), (Plain,), (Whole,), (Plain, Whole)])
def test_every_table_applies_every_gate(classes: tuple[type[Any], ...], kind: str) -> None:
    y, x, weight = product(table_of(*classes), replace(PLAIN, gate=kind))
    gate, up = (x @ weight.T).chunk(2, dim=-1)
    torch.testing.assert_close(y, ACTIVATIONS[kind](gate) * up)


def test_a_kernel_that_lists_the_gate_gets_it_whole() -> None:
    table = table_of(Whole, Plain)
    product(table, GATED)
    assert provider_of(table, "linear") == "whole"
    assert provider_of(table, "act_and_mul") is None
    assert "silu-gated" in table.choices[0].context


def test_the_preferred_kernel_stays_preferred_although_it_needs_two_steps() -> None:
    table = table_of(Plain, Whole)
    table.op("act_and_mul", act_and_mul, provider="quick")
    product(table, GATED)
    assert (provider_of(table, "linear"), provider_of(table, "act_and_mul")) == ("plain", "quick")


def test_gated_and_plain_products_of_one_shape_are_kernels_of_their_own() -> None:
    table = table_of(Plain)
    assert product(table, PLAIN)[0].shape == (3, 24)
    assert product(table, GATED)[0].shape == (3, 12)


def test_a_refusal_of_a_gated_product_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Whole, "widest", 8)
    table = table_of(Whole, linear="reference")
    product(table, GATED)
    table.forced = {}
    product(table, replace(GATED, out_features=24, max_tokens=1))
    assert table.choices[-1].refused == (("whole", "too wide"),)
