"""Products of int8 with int8 in the matrix units: `--quantization int8`, activations rounded token by token.

Shapes: T tokens, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from octavo.plugin import YES, Device, LinearSpec, Support, no
from octavo.plugin.torch import quantize_rows
from octavo_xpu.device import SyclDevice
from octavo_xpu.linear import GROUP, matrix_groups
from octavo_xpu.native import NUMBERS, Module

Tensor = torch.Tensor

PACKING = "online:int8"


@dataclass(frozen=True, kw_only=True)
class Int8Weight:
    """codes int8 [N, K], scales float32 [N, 1]."""

    module: Module
    codes: Tensor
    scales: Tensor


class Int8Int8Linear:
    """Exact sums of codes, times a scale for each token and each row. Without matrix units for int8 core's reference
    does it."""

    name: ClassVar[str] = "int8_int8"

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if spec.scheme is None or spec.scheme.packing != PACKING:
            return no(f"multiplies int8 with int8, not {spec.scheme.packing if spec.scheme else 'plain weights'}")
        if not isinstance(device, SyclDevice):
            return no(f"needs a device with a SYCL runtime, not {device.type}")
        if spec.act_dtype not in NUMBERS:
            return no(f"no {spec.act_dtype} activations")
        if spec.out_dtype != spec.act_dtype:
            return no(f"gives {spec.act_dtype}, not {spec.out_dtype}")
        if spec.in_features % GROUP:
            return no(f"reads {GROUP} columns at once, and {spec.in_features} is no multiple")
        return YES if device.runtime.matrix("int8") else no("the device has no matrix units for int8")

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Int8Weight:
        """weights: canonical tensors of `spec.scheme`."""
        assert isinstance(device, SyclDevice)
        codes, scales = quantize_rows(weights["weight"].to(device.torch_device), "int8")
        matrix = device.runtime.matrix("int8")
        module = device.runtime.module("linear_matrix.cpp", NUMBER=NUMBERS[spec.act_dtype], MATRIX=matrix)
        return Int8Weight(module=module, codes=codes.contiguous(), scales=scales.contiguous())

    def apply(self, x: Tensor, w: Int8Weight, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N]."""
        (tokens, in_features), out_features = x.shape, w.codes.shape[0]
        y = x.new_empty(tokens, out_features)
        if tokens == 0:
            return y
        codes, scales = quantize_rows(x, "int8")
        groups, local = matrix_groups(tokens, out_features)
        sizes = (tokens, in_features, out_features)
        w.module["int8_int8"](groups, local, codes.contiguous(), scales, w.codes, w.scales, bias, y, *sizes)
        return y
