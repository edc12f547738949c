"""Matrix multiplications with plain weights: hipBLASLt, and for few tokens the HIP kernel, or Triton's without it.

With a handful of tokens a product is bound by reading its weight; a tiled library kernel leaves most of its tile, and
much of the bandwidth, unused.

Shapes: T tokens, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from octavo.plugin import YES, Device, LinearSpec, Support, no
from octavo.plugin.torch import dequantize_weight
from octavo_rocm import products, torch_ops
from octavo_rocm.kernels import MOST_TOKENS

Tensor = torch.Tensor

DTYPES = ("bfloat16", "float16", "float32")
GEMV_DTYPES = products.DTYPES
RUN = 8
"""Inputs that the HIP kernel reads at once."""


def plain_weight(weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Tensor:
    """The weight [N, K] in the activations' dtype, unpacked if it is quantized, contiguous on the device."""
    dtype = getattr(torch, spec.act_dtype)
    if spec.scheme is None:
        weight = weights["weight"].to(dtype)
    else:
        weight = dequantize_weight(weights, spec.scheme, dtype)
    assert weight.shape == (spec.out_features, spec.in_features), f"{tuple(weight.shape)} for {spec}"
    return weight.to(device.torch_device).contiguous()


def refusal(spec: LinearSpec, device: Device) -> str:
    """Why no kernel of this file takes the spec; empty if they do."""
    if device.type != "cuda":
        return f"needs an AMD card, not {device.type}"
    if spec.act_dtype not in DTYPES:
        return f"no {spec.act_dtype} activations"
    if spec.out_dtype != spec.act_dtype:
        return f"gives {spec.act_dtype}, not {spec.out_dtype}"
    if spec.scheme is not None and spec.scheme.act is not None:
        return f"does not quantize activations to {spec.scheme.act}"
    return ""


def few_tokens_refusal(spec: LinearSpec, device: Device) -> str:
    """Why no kernel of few tokens takes the spec; empty if they do."""
    if reason := refusal(spec, device):
        return reason
    if spec.act_dtype not in GEMV_DTYPES:
        return f"multiplies {' and '.join(GEMV_DTYPES)}, not {spec.act_dtype}"
    return ""


class HipblasltLinear:
    """torch's own product. Quantized weights are unpacked when they are loaded."""

    name: ClassVar[str] = "hipblaslt"

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        reason = refusal(spec, device)
        return no(reason) if reason else YES

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Tensor:
        """weights: canonical tensors of `spec.scheme`. Raises UnsupportedModelError if core cannot decode them."""
        return plain_weight(weights, spec, device)

    def apply(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N]."""
        return F.linear(x, w, bias)


class HipLinear(HipblasltLinear):
    """The HIP kernel for up to 4 tokens, hipBLASLt for more."""

    name: ClassVar[str] = "hip"

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if reason := few_tokens_refusal(spec, device):
            return no(reason)
        if spec.in_features % RUN:
            return no(f"reads {RUN} inputs at once, which do not divide {spec.in_features}")
        reason = products.objection(device, "Plain", spec.act_dtype)
        return no(reason) if reason else YES

    def apply(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N]."""
        if products.takes(x):
            return torch_ops.gemv(x, w, None, bias, "Plain")
        return F.linear(x, w, bias)


@dataclass(frozen=True, kw_only=True)
class ProductWeight:
    """weight [N, K]. cuts: how Triton runs it with 0, 1, 2, ... tokens. counters: what the programs of a split product
    meet on, see `octavo.triton.gemv.make_counters`. overlap: an `octavo.triton.overlap.Overlap`."""

    weight: Tensor
    cuts: tuple[Any, ...]
    counters: Tensor
    overlap: Any


class TritonLinear:
    """Triton's product of up to 4 tokens, and hipBLASLt for more: where the HIP kernel cannot be compiled."""

    name: ClassVar[str] = "triton"

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        reason = few_tokens_refusal(spec, device)
        return no(reason) if reason else YES

    def __init__(self) -> None:
        from octavo.triton.gemv import gemv

        self._gemv = gemv

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> ProductWeight:
        """weights: as for hipBLASLt."""
        from octavo.triton.gemv import make_counters
        from octavo_rocm.tuning import tuning_for

        tuning, weight = tuning_for(device), plain_weight(weights, spec, device)
        counts = range(1, MOST_TOKENS + 1)
        return ProductWeight(
            weight=weight,
            cuts=(None, *(tuning.gemv(spec.out_features, spec.in_features, tokens) for tokens in counts)),
            counters=make_counters(spec.out_features, device.torch_device),
            overlap=tuning.overlap,
        )

    def apply(self, x: Tensor, w: ProductWeight, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N]."""
        num_tokens = x.shape[0]
        if 0 < num_tokens < len(w.cuts):
            cut = w.cuts[num_tokens]
            return self._gemv(x, w.weight, bias, config=cut, counters=w.counters, overlap=w.overlap)
        return F.linear(x, w.weight, bias)
