"""Matrix multiplications: torch's own (oneDNN), and products of few tokens with weights that stay packed.

    up to 8 tokens    `kernels/linear.cpp`: codes are decoded in registers; reading them is the cost
    up to 128         the same in the matrix units, `kernels/linear_matrix.cpp`; up to 32 without where there are none
    more              unpacked into a temporary, then torch's product, which runs in the matrix units too

Shapes: T tokens, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from octavo.plugin import YES, Device, LinearSpec, Support, no
from octavo.plugin.torch import has_int4_groups, int4_groups, quantize_rows
from octavo.triton import linear_plain
from octavo_xpu.device import SyclDevice
from octavo_xpu.native import LANES, NUMBERS, Groups, Module

Tensor = torch.Tensor

MOST_TOKENS = 32
"""Tokens that a packed product takes: it reads its weight once for every eight of them."""
TOKENS_AT_ONCE = 8
MOST_MATRIX_TOKENS = 128
"""In the matrix units, which have the weight once for every 32 of them."""
MATRIX_TOKENS_AT_ONCE = 32
ROWS_AT_ONCE = 8
"""Rows of the weight that a work-group has, a sub-group each."""
UNPACK_ITEMS = 256
GROUP = 32
"""Columns of one scale: of GGUF's Q8_0, and of all that `int4_groups` reads."""
INT8_PACKINGS = ("gguf:Q8_0", "online:int8_per_channel_weight_only")


def refusal(spec: LinearSpec, device: Device) -> str:
    """Why no kernel of this file takes the spec; empty if they do."""
    if not isinstance(device, SyclDevice):
        return f"needs a device with a SYCL runtime, not {device.type}"
    return linear_plain.refusal(spec)


class OneDnnLinear(linear_plain.TorchLinear):
    """torch's own product, by oneDNN."""

    name: ClassVar[str] = "onednn"

    @classmethod
    def refusal(cls, spec: LinearSpec, device: Device) -> str:
        return refusal(spec, device)


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """codes: 4 or 8 bits of [N, K], see `kernels/linear.cpp`. offsets: None for 8 bits. group: columns of a scale.
    matrix: None where there are no matrix units for it."""

    module: Module
    matrix: Module | None
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    group: int
    out_features: int
    in_features: int


def product(name: str, x: Tensor, w: PackedWeight, bias: Tensor | None) -> Tensor:
    """x [T, K] -> [T, N] by the kernel of that name, or by torch's for many tokens."""
    tokens = x.shape[0]
    parts = (w.codes, w.scales) if w.offsets is None else (w.codes, w.scales, w.offsets)
    per_group = (w.group,) if w.offsets is None else ()
    if w.matrix and TOKENS_AT_ONCE < tokens <= MOST_MATRIX_TOKENS:
        y = x.new_empty(tokens, w.out_features)
        sizes = (tokens, w.in_features, w.out_features, *per_group)
        w.matrix[name](*matrix_groups(tokens, w.out_features), x.contiguous(), *parts, bias, y, *sizes)
        return y
    if tokens <= MOST_TOKENS:
        y = x.new_empty(tokens, w.out_features)
        groups = (-(-tokens // TOKENS_AT_ONCE), -(-w.out_features // ROWS_AT_ONCE), 1)
        sizes = (tokens, w.in_features, w.out_features, *per_group)
        w.module[name](groups, (1, ROWS_AT_ONCE, LANES), x.contiguous(), *parts, bias, y, *sizes)
        return y
    weight = x.new_empty(w.out_features, w.in_features)
    words = w.codes.numel() // 4
    last = per_group or (w.in_features // 8,)
    w.module[f"unpack_{name}"]((1, 1, -(-words // UNPACK_ITEMS)), (1, 1, UNPACK_ITEMS), *parts, weight, words, *last)
    return F.linear(x, weight, bias)


def matrix_groups(tokens: int, out_features: int) -> tuple[Groups, Groups]:
    """Work-groups and their items: a sub-group has as many rows of the weight as lanes."""
    rows = ROWS_AT_ONCE * LANES
    groups = (-(-tokens // MATRIX_TOKENS_AT_ONCE), -(-out_features // rows), 1)
    return groups, (1, ROWS_AT_ONCE, LANES)


def matrix_module(spec: LinearSpec, device: SyclDevice, group: int) -> Module | None:
    """`kernels/linear_matrix.cpp` for weights with a scale for `group` columns, where it takes them."""
    matrix = device.runtime.matrix(spec.act_dtype)
    if not matrix or spec.in_features % GROUP or group % LANES:
        return None
    return device.runtime.module("linear_matrix.cpp", NUMBER=NUMBERS[spec.act_dtype], MATRIX=matrix)


class Int4Linear:
    """4-bit codes with a scale and an offset for every 32 columns: GGUF's Q4_0, Q4_1 and Q4_K, `--quantization int4`.

    Codes are exact; scales and offsets are kept in float16, as Q4_0 and Q4_1 store them (Q4_K's products of two
    factors are rounded to it), and in float32 beside float32 activations.
    """

    name: ClassVar[str] = "int4"

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if not has_int4_groups(spec.scheme):
            return no(f"reads 4-bit codes, not {spec.scheme.packing if spec.scheme else 'plain weights'}")
        reason = refusal(spec, device)
        return no(reason) if reason else YES

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> PackedWeight:
        """weights: canonical tensors of `spec.scheme`."""
        assert spec.scheme is not None
        assert isinstance(device, SyclDevice)
        codes, scales, offsets = int4_groups(
            {name: t.to(device.torch_device) for name, t in weights.items()}, spec.scheme
        )
        kept = torch.float32 if spec.act_dtype == "float32" else torch.float16
        return PackedWeight(
            module=device.runtime.module("linear.cpp", NUMBER=NUMBERS[spec.act_dtype]),
            matrix=matrix_module(spec, device, GROUP),
            codes=(codes[:, 0::2] | codes[:, 1::2] << 4).contiguous(),
            scales=scales.to(kept).contiguous(),
            offsets=offsets.to(kept).contiguous(),
            group=GROUP,
            out_features=spec.out_features,
            in_features=spec.in_features,
        )

    def apply(self, x: Tensor, w: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N]."""
        return product("int4", x, w, bias)


class Int8Linear:
    """8-bit codes, signed: GGUF's Q8_0 with a scale for every 32 columns, and plain weights rounded at load with one
    for each row (`--quantization int8_per_channel_weight_only`). Both are exact."""

    name: ClassVar[str] = "int8"

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if spec.scheme is None or spec.scheme.packing not in INT8_PACKINGS:
            return no(f"reads 8-bit codes, not {spec.scheme.packing if spec.scheme else 'plain weights'}")
        if spec.in_features % 4:
            return no(f"reads four columns at once, and {spec.in_features} is no multiple")
        reason = refusal(spec, device)
        return no(reason) if reason else YES

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> PackedWeight:
        """weights: canonical tensors of `spec.scheme`."""
        assert spec.scheme is not None
        assert isinstance(device, SyclDevice)
        weight = weights["weight"].to(device.torch_device)
        if spec.scheme.packing == "gguf:Q8_0":
            blocks = weight.view(spec.out_features, -1, 2 + GROUP)
            scales = blocks[..., :2].contiguous().view(torch.float16).float()
            codes, group = blocks[..., 2:].contiguous(), GROUP
        else:
            codes, scales = quantize_rows(weight, "int8")
            group = spec.in_features
        return PackedWeight(
            module=device.runtime.module("linear.cpp", NUMBER=NUMBERS[spec.act_dtype]),
            matrix=matrix_module(spec, device, group),
            codes=codes.contiguous(),
            scales=scales.contiguous(),
            offsets=None,
            group=group,
            out_features=spec.out_features,
            in_features=spec.in_features,
        )

    def apply(self, x: Tensor, w: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N]."""
        return product("int8", x, w, bias)
