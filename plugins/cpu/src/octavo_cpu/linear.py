"""Matrix multiplications out of torch's own CPU operators, with weights packed once at load.

A kernel keeps up to two forms of a weight: one for few tokens, where reading the weight is the cost and the narrowest
form wins, and one for many, where arithmetic is. Which forms, and from how many tokens on, was measured
(`benchmarks/cpu_kernels.py`) and follows from the instruction sets alone, so that a machine always computes the same.

Shapes: T tokens, K in_features, N out_features.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from octavo.plugin import YES, Device, LinearSpec, Support, no
from octavo.plugin.torch import dequantize_weight

Tensor = torch.Tensor
Matmul = Callable[[Tensor, Tensor | None], Tensor]
"""(x [T, K], bias [N] or None) -> [T, N]."""

EVERY = 1 << 62
"""A limit no step reaches."""

PACK_HINT = 16
"""The batch oneDNN packs for; its layout was the same for 1, 16 and 256."""

INT4_GROUP = 32

INT4_TOKENS, INT4_TOKENS_NATIVE_BF16 = 8, 4
"""Up to how many tokens torch's int4 product beats the wide form: its time grows with each, the wide one's hardly."""


@dataclass(frozen=True)
class Packed:
    """`few` serves up to `limit` tokens, `many` more."""

    limit: int
    few: Matmul
    many: Matmul


def plain(weight: Tensor) -> Matmul:
    """torch's own, for a weight as it is."""
    return lambda x, bias: F.linear(x, weight, bias)


def packed(weight: Tensor) -> Matmul:
    """oneDNN with the weight in its blocked layout, which `F.linear` would make anew in each call."""
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_HINT)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x, bias: multiply(x, blocked, bias, "none", [], "")


def widened(weight: Tensor) -> Matmul:
    """The product in float32: where a CPU has no 16-bit arithmetic, emulating it is several times slower."""
    multiply, dtype = packed(weight.float()), weight.dtype
    return lambda x, bias: multiply(x.float(), None if bias is None else bias.float()).to(dtype)


def has_native(dtype: torch.dtype, device: Device) -> bool:
    """Whether products of that dtype run in hardware."""
    if dtype == torch.float32:
        return True
    if dtype == torch.bfloat16:
        return bool(getattr(device, "native_bf16", False))
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies that dtype at all on this CPU."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def room_for(num_bytes: int, device: Device) -> bool:
    """Whether a second copy of that size may be kept: half of the memory stays free for the rest and the KV cache."""
    info = device.memory()
    return bool(getattr(device, "wide_copy", True)) and info.free - num_bytes > info.total // 2


def refusal(device: Device) -> str:
    """Why no kernel of this file runs on the device; empty if they do."""
    if device.type != "cpu":
        return f"needs a cpu device, not {device.type}"
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"measured on x86 only, not on {platform.machine()}"
    if not torch._C._has_mkldnn:
        return "this torch has no oneDNN"
    return ""


def apply(x: Tensor, w: Packed, bias: Tensor | None) -> Tensor:
    """x [T, K] -> [T, N]."""
    return (w.few if x.shape[0] <= w.limit else w.many)(x, bias)


class OneDnnLinear:
    """Plain weights, and quantized ones that are unpacked at load, in the layouts of oneDNN."""

    name: ClassVar[str] = "onednn"

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if reason := refusal(device):
            return no(reason)
        if spec.act_dtype not in ("bfloat16", "float16", "float32"):
            return no(f"no {spec.act_dtype} activations")
        if spec.out_dtype != spec.act_dtype:
            return no(f"gives {spec.act_dtype}, not {spec.out_dtype}")
        if spec.scheme is not None and spec.scheme.act is not None:
            return no(f"does not quantize activations to {spec.scheme.act}")
        return YES

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Packed:
        """weights: canonical tensors of `spec.scheme`. Raises UnsupportedModelError if core cannot decode them."""
        dtype = getattr(torch, spec.act_dtype)
        if spec.scheme is None:
            weight = weights["weight"].to(dtype)
        else:
            weight = dequantize_weight(weights, spec.scheme, dtype)
        assert weight.shape == (spec.out_features, spec.in_features), f"{tuple(weight.shape)} for {spec}"
        few = packed(weight) if packs(dtype) and dtype != torch.float32 else plain(weight)
        if dtype != torch.float32 and has_native(dtype, device):
            return Packed(EVERY, few, few)
        if not room_for(weight.numel() * 4, device):
            return Packed(EVERY, few, few)
        if dtype == torch.float32:
            return Packed(3, few, packed(weight))
        return Packed(1, few, widened(weight))

    def apply(self, x: Tensor, w: Packed, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N]."""
        return apply(x, w, bias)


class Int4Linear:
    """GGUF Q4_0 and Q4_1 read as four bits by torch's int4 product, which bfloat16 activations have in vector code.

    Codes are exact; a group's scale and offset are rounded to bfloat16 (relative 2^-9), so that an output differs from
    the exact product by about as much as its own rounding does.
    """

    name: ClassVar[str] = "int4"

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if reason := refusal(device):
            return no(reason)
        packing = spec.scheme.packing if spec.scheme else "none"
        if packing not in ("gguf:Q4_0", "gguf:Q4_1"):
            return no(f"reads gguf:Q4_0 and gguf:Q4_1, not {packing}")
        if spec.act_dtype != "bfloat16" or spec.out_dtype != "bfloat16":
            return no(f"fast with bfloat16 activations only, not {spec.act_dtype} to {spec.out_dtype}")
        if spec.out_features % 16 or spec.in_features % INT4_GROUP:
            return no(
                f"needs out_features in multiples of 16, in_features of 32, not {spec.out_features}x{spec.in_features}"
            )
        return YES

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Packed:
        """weights: "weight" uint8 [N, bytes of a row], GGUF blocks."""
        assert spec.scheme is not None
        few = int4(weights["weight"], has_offset=spec.scheme.packing == "gguf:Q4_1")
        native = has_native(torch.bfloat16, device)
        if not room_for(spec.out_features * spec.in_features * (2 if native else 4), device):
            return Packed(EVERY, few, few)
        weight = dequantize_weight(weights, spec.scheme, torch.bfloat16)
        if native:
            return Packed(INT4_TOKENS_NATIVE_BF16, few, packed(weight))
        return Packed(INT4_TOKENS, few, widened(weight))

    def apply(self, x: Tensor, w: Packed, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N]."""
        return apply(x, w, bias)


def int4(rows: Tensor, *, has_offset: bool) -> Matmul:
    """rows: uint8 [N, K / 32 * block]. A block is a float16 scale, with `has_offset` a float16 offset, and 16 bytes
    whose low nibbles are codes 0..15 and whose high nibbles are codes 16..31. For torch a value is (code - 8) * scale
    + zero.
    """
    head = 4 if has_offset else 2
    blocks = rows.reshape(rows.shape[0], -1, head + INT4_GROUP // 2)
    numbers = blocks[..., :head].contiguous().view(torch.float16).float()
    scale = numbers[..., 0]
    zero = numbers[..., 1] + 8 * scale if has_offset else torch.zeros_like(scale)
    nibbles = blocks[..., head:]
    codes = torch.cat([nibbles & 15, nibbles >> 4], dim=-1).flatten(1).to(torch.int32)
    weight = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.stack([scale, zero], dim=-1).transpose(0, 1).contiguous().to(torch.bfloat16)
    multiply = torch._weight_int4pack_mm_for_cpu

    def matmul(x: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = multiply(x, weight, INT4_GROUP, scales)
        return y if bias is None else y + bias

    return matmul
