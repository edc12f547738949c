"""Matrix products with weights that stay packed in the chip's memory: integers, with a scale for each row or group.

A compiled step turns the integers into numbers where it multiplies, so that what is read from memory is the packed
weight. All of it is plain operators of torch, which XLA fuses as it sees fit.

Legend: T tokens, N out_features, K in_features, G groups of 32 columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.plugin import YES, Device, LinearSpec, Support, no
from octavo.plugin.torch import has_int4_groups, int4_groups, quantize_rows

GROUP = 32
PLAIN = "plain weights are torch's own product"


@dataclass(frozen=True, kw_only=True)
class FourBits:
    """codes uint8 [N, K / 2]: column k in the low half of byte k, column K / 2 + k in its high half. A weight is
    code * scale + offset; both [N, G] in the activation dtype."""

    codes: Tensor
    scale: Tensor
    offset: Tensor

    def weight(self) -> Tensor:
        """[N, K] in the activation dtype."""
        codes = torch.cat((self.codes & 15, self.codes >> 4), dim=1).view(*self.scale.shape, GROUP)
        return (codes.to(self.scale.dtype) * self.scale[..., None] + self.offset[..., None]).flatten(1)


class Int4Linear:
    """Weights of 4-bit codes in groups of 32, whatever format they came in: GGUF Q4_0, Q4_1 and Q4_K, `--quantization
    int4`, and those of extensions that give `int4_groups`.

    Codes are exact; scales and offsets are rounded to the activation dtype.
    """

    name: ClassVar[str] = "int4"

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if spec.scheme is None:
            return no(PLAIN)
        if not has_int4_groups(spec.scheme):
            return no(f"{spec.scheme.packing} is not 4-bit codes in groups of {GROUP}")
        if spec.scheme.act is not None:
            return no(f"does not round activations to {spec.scheme.act}")
        if spec.in_features % (2 * GROUP):
            return no(f"needs in_features in multiples of {2 * GROUP}, not {spec.in_features}")
        return fits(spec)

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> FourBits:
        """weights: the canonical tensors of the scheme."""
        assert spec.scheme is not None
        dtype, target = getattr(torch, spec.act_dtype), device.torch_device
        codes, scale, offset = int4_groups(weights, spec.scheme)
        low, high = codes.chunk(2, dim=1)
        return FourBits(
            codes=(low | high << 4).to(target), scale=scale.to(dtype).to(target), offset=offset.to(dtype).to(target)
        )

    def apply(self, x: Tensor, w: FourBits, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N]."""
        return F.linear(x, w.weight(), bias)


@dataclass(frozen=True, kw_only=True)
class EightBits:
    """codes int8 [N, K]; scale [N, 1] or [N, G] in the activation dtype. rounds: activations go through int8 too."""

    codes: Tensor
    scale: Tensor
    rounds: bool = False


class Int8Linear:
    """Weights of 8-bit codes: with a scale for each row (`--quantization int8_per_channel_weight_only`, and `int8`,
    which rounds activations too) or for each 32 columns (GGUF Q8_0).

    The product is one of floating-point numbers, which hold all codes exactly: the runtime has none of integers.
    """

    name: ClassVar[str] = "int8"
    packings: ClassVar[tuple[str, ...]] = ("online:int8", "online:int8_per_channel_weight_only", "gguf:Q8_0")

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if spec.scheme is None:
            return no(PLAIN)
        if spec.scheme.packing not in cls.packings:
            return no(f"reads {', '.join(cls.packings)}, not {spec.scheme.packing}")
        return fits(spec)

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> EightBits:
        """weights: "weight", plain [N, K] to be quantized, or GGUF blocks uint8 [N, bytes of a row]."""
        assert spec.scheme is not None
        dtype, target = getattr(torch, spec.act_dtype), device.torch_device
        weight = weights["weight"]
        if spec.scheme.packing == "gguf:Q8_0":
            # A block: a float16 scale and 32 codes.
            blocks = weight.reshape(len(weight), -1, 2 + GROUP)
            scale = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
            codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
        else:
            codes, scale = quantize_rows(weight, "int8")
        return EightBits(codes=codes.to(target), scale=scale.to(dtype).to(target), rounds=spec.scheme.act == "int8")

    def apply(self, x: Tensor, w: EightBits, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N]."""
        if w.scale.shape[1] > 1:
            groups = w.codes.view(*w.scale.shape, GROUP).to(x.dtype)
            return F.linear(x, (groups * w.scale[..., None]).flatten(1), bias)
        if w.rounds:
            codes, scale = quantize_rows(x, "int8")
            y = F.linear(codes.to(x.dtype), w.codes.to(x.dtype)) * scale.to(x.dtype)
        else:
            y = F.linear(x, w.codes.to(x.dtype))
        y = y * w.scale[:, 0]
        return y if bias is None else y + bias


def fits(spec: LinearSpec) -> Support:
    """What both kernels need."""
    if spec.out_dtype != spec.act_dtype:
        return no(f"gives {spec.act_dtype}, not {spec.out_dtype}")
    if spec.gate is not None:
        return no(f"no {spec.gate} gates")
    return YES
