"""Core's linear layers with plain weights: hipBLASLt, and for few tokens the HIP kernel, or Triton's without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F

from octavo.plugin import Device, LinearSpec
from octavo.triton import linear_plain
from octavo_rocm import products, torch_ops
from octavo_rocm.kernels import MOST_TOKENS

if TYPE_CHECKING:
    from octavo.triton.overlap import Overlap

Tensor = torch.Tensor

RUN = 8
"""Inputs that the HIP kernel reads at once."""


def device_refusal(device: Device) -> str:
    """Why no kernel of this plugin runs on the device; empty if they may."""
    return "" if device.type == "cuda" else f"needs an AMD card, not {device.type}"


def few_tokens_refusal(spec: LinearSpec, device: Device) -> str:
    """Why no kernel of few tokens takes the spec; empty if they do."""
    return device_refusal(device) or linear_plain.few_tokens_refusal(spec)


class HipblasltLinear(linear_plain.TorchLinear):
    """torch's own product, by hipBLASLt."""

    name: ClassVar[str] = "hipblaslt"

    @classmethod
    def refusal(cls, spec: LinearSpec, device: Device) -> str:
        return device_refusal(device) or linear_plain.refusal(spec)


class HipLinear(HipblasltLinear):
    """The HIP kernel for up to 4 tokens, hipBLASLt for more."""

    name: ClassVar[str] = "hip"

    @classmethod
    def refusal(cls, spec: LinearSpec, device: Device) -> str:
        if reason := few_tokens_refusal(spec, device):
            return reason
        if spec.in_features % RUN:
            return f"reads {RUN} inputs at once, which do not divide {spec.in_features}"
        return products.objection(device, "Plain", spec.act_dtype)

    def apply(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N]."""
        if products.takes(x):
            return torch_ops.gemv(x, w, None, bias, "Plain")
        return F.linear(x, w, bias)


class TritonLinear(linear_plain.TritonLinear):
    """Triton's product of up to 4 tokens, and hipBLASLt for more: where the HIP kernel cannot be compiled."""

    @classmethod
    def refusal(cls, spec: LinearSpec, device: Device) -> str:
        return few_tokens_refusal(spec, device)

    @classmethod
    def cuts(cls, spec: LinearSpec, device: Device) -> tuple[Any, ...]:
        from octavo_rocm.tuning import tuning_for

        tuning, counts = tuning_for(device), range(1, MOST_TOKENS + 1)
        return (None, *(tuning.gemv(spec.out_features, spec.in_features, tokens) for tokens in counts))

    @classmethod
    def overlap_for(cls, device: Device) -> Overlap:
        from octavo_rocm.tuning import tuning_for

        return tuning_for(device).overlap
