"""Gated products (`LinearSpec.gate`) out of kernels that know nothing of gates: the product, then an activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from octavo.plugin.contracts import Device
from octavo.plugin.specs import LinearSpec


def asked_of(cls: type[Any], spec: LinearSpec) -> LinearSpec:
    """What is asked of a kernel class for `spec`: all of it if the class lists the gate's kind in its `gates`; else the
    product alone."""
    if spec.gate is None or spec.gate in getattr(cls, "gates", ()):
        return spec
    return replace(spec, gate=None)


@dataclass(frozen=True)
class TwoSteps:
    """The kernel for a gated spec: `product` for the same spec without the gate, then the op `act_and_mul`."""

    name: ClassVar[str] = "product and activation"

    product: Any
    act_and_mul: Callable[[torch.Tensor, str], torch.Tensor]
    kind: str

    def prepare(self, weights: Mapping[str, torch.Tensor], spec: LinearSpec, device: Device) -> Any:
        """As the product's."""
        return self.product.prepare(weights, replace(spec, gate=None), device)

    def apply(self, x: torch.Tensor, w: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] -> [T, N / 2]."""
        return self.act_and_mul(self.product.apply(x, w, bias), self.kind)
