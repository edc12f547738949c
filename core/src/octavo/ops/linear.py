"""The reference matrix multiplication: runs every checkpoint on every device, by unpacking it at load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from octavo.plugin import YES, Device, LinearSpec, Support
from octavo.plugin.torch import dequantize_weight
from octavo.quant.online import round_rows


def dense_weight(weights: Mapping[str, torch.Tensor], spec: LinearSpec, device: Device) -> torch.Tensor:
    """The weight [N, K] in the activation dtype, unpacked if it is quantized, contiguous on the device.

    weights: the tensors of `spec.scheme`; for None "weight" [N, K]. No copy is made where none is needed, so the caller
    gives them away. Raises UnsupportedModelError for a scheme without `dequantize`.
    """
    dtype = getattr(torch, spec.act_dtype)
    if spec.scheme is None:
        weight = weights["weight"].to(dtype)
    else:
        weight = dequantize_weight(weights, spec.scheme, dtype)
    assert weight.shape == (spec.out_features, spec.in_features), f"{tuple(weight.shape)} for {spec}"
    return weight.to(device.torch_device).contiguous()


@dataclass(frozen=True, kw_only=True)
class DenseWeight:
    """weight [N, K] in the activation dtype, on the device. rounds: the 8-bit numbers that activations go through, one
    scale a token; None leaves them."""

    weight: torch.Tensor
    out_dtype: torch.dtype
    rounds: str | None = None


class ReferenceLinear:
    """y = x W^T + b in the activation dtype. Quantized weights are unpacked once, when they are loaded.

    Activations that the scheme wants in 8 bits are rounded to them."""

    name: ClassVar[str] = "reference"

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        """Everything: that is what a reference is for."""
        return YES

    def prepare(self, weights: Mapping[str, torch.Tensor], spec: LinearSpec, device: Device) -> DenseWeight:
        """As `dense_weight`."""
        return DenseWeight(
            weight=dense_weight(weights, spec, device),
            out_dtype=getattr(torch, spec.out_dtype),
            rounds=spec.scheme.act if spec.scheme is not None else None,
        )

    def apply(self, x: torch.Tensor, w: DenseWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] -> [T, N] in the spec's out_dtype. bias [N] in the activation dtype."""
        return F.linear(round_rows(x, w.rounds) if w.rounds else x, w.weight, bias).to(w.out_dtype)
