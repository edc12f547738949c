"""Linear layers by the compiled library: GGUF blocks multiplied as they are, and plain weights for few tokens.

Shapes: T tokens, K in_features, N out_features.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch

from octavo.plugin import YES, Device, LinearSpec, Support, no
from octavo.plugin.torch import dequantize_weight
from octavo_cpu import native
from octavo_cpu.activation import act_and_mul
from octavo_cpu.linear import EVERY, Matmul, OneDnnLinear, Packed, apply, has_native, packed, plain, room_for

Tensor = torch.Tensor

GEMV_TOKENS, GEMV_TOKENS_NATIVE_BF16 = 16, 4
"""Up to how many tokens reading a plain weight as it lies beats oneDNN. The second, for CPUs with bfloat16 products in
hardware, is an estimate: oneDNN's own reading there reaches half of the memory's rate for one token."""


class LinearArgs(ctypes.Structure):
    """`octavo::LinearArgs`."""

    _fields_ = (
        ("layer", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
    )


def matmul(spec: LinearSpec, kind: str, weight: Tensor) -> Matmul:
    """The library's product with a weight that lies in memory as `kind` says."""
    call = native.step_function("linear")
    layer = native.Linear(
        kind=native.KINDS.index(kind),
        dtype=native.DTYPES.index(spec.act_dtype),
        gate=native.GATES.index(spec.gate),
        num_out=spec.out_features,
        num_in=spec.in_features,
        weight=weight.data_ptr(),
    )
    address, kept = ctypes.addressof(layer), (layer, weight)
    width = spec.out_features // 2 if spec.gate else spec.out_features
    dtype, empty = getattr(torch, spec.act_dtype), native.empty

    def multiply(x: Tensor, bias: Tensor | None, kept: object = kept) -> Tensor:
        tokens = x.shape[0]
        if not x.is_contiguous():
            x = x.contiguous()
        y = empty((tokens, width), dtype)
        if bias is None:
            call(LinearArgs(address, x.data_ptr(), None, y.data_ptr(), tokens))
        else:
            bias = bias.to(dtype)
            call(LinearArgs(address, x.data_ptr(), bias.data_ptr(), y.data_ptr(), tokens))
        return y

    return multiply


def gated(product: Matmul, gate: str | None) -> Matmul:
    """A product of torch's, with the gate behind it."""
    if gate is None:
        return product
    return lambda x, bias: act_and_mul(product(x, bias), gate)


def pack(rows: Tensor, kind: str, spec: LinearSpec) -> Tensor:
    """GGUF blocks uint8 [N, bytes of a row] into the library's panels."""
    library = native.load()
    shape = (native.KINDS.index(kind), native.GATES.index(spec.gate), spec.out_features, spec.in_features)
    packed = torch.empty(library.octavo_packed_bytes(*shape), dtype=torch.uint8)
    rows = rows.contiguous()
    columns, size = native.BLOCKS[kind]
    assert rows.shape == (spec.out_features, spec.in_features // columns * size), f"{spec.name}: {tuple(rows.shape)}"
    library.octavo_pack(*shape, rows.data_ptr(), packed.data_ptr())
    return packed


def refusal(spec: LinearSpec, device: Device) -> str:
    """Why the library cannot serve the layer, whatever its weight; empty if it can."""
    if device.type != "cpu":
        return f"needs a cpu device, not {device.type}"
    if why := native.why_not():
        return why
    if spec.act_dtype not in native.DTYPES:
        return f"no {spec.act_dtype} activations"
    if spec.out_dtype != spec.act_dtype:
        return f"gives {spec.act_dtype}, not {spec.out_dtype}"
    return ""


class GgufLinear:
    """GGUF blocks in their own number of bits, with activations rounded to 8 bits in blocks of 32 (see the README for
    what that costs in accuracy). There is no second copy: many tokens run on the same packed weight."""

    name: ClassVar[str] = "gguf"
    gates: ClassVar[tuple[str, ...]] = ("silu", "gelu", "gelu_tanh")

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if reason := refusal(spec, device):
            return no(reason)
        packing = spec.scheme.packing if spec.scheme else "none"
        kind = packing.removeprefix("gguf:")
        if packing == kind or kind not in native.BLOCKS:
            return no(f"reads {', '.join(native.BLOCKS)} of GGUF, not {packing}")
        if not native.load().octavo_packed_bytes(native.KINDS.index(kind), 0, spec.out_features, spec.in_features):
            return no(f"{spec.in_features} in_features are not whole blocks of {kind}")
        choice = getattr(device, "int8_activations", "auto")
        if choice == "never":
            return no("rounds activations to 8 bits, which int8_activations=never forbids")
        if choice == "auto" and spec.act_dtype == "float32":
            return no("rounds activations to 8 bits, which float32 is not asked for; int8_activations=always allows it")
        return YES

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Packed:
        """weights: "weight" uint8 [N, bytes of a row], GGUF blocks."""
        assert spec.scheme is not None
        kind = spec.scheme.packing.removeprefix("gguf:")
        product = matmul(spec, kind, pack(weights["weight"], kind, spec))
        return Packed(EVERY, product, product)

    def apply(self, x: Tensor, w: Packed, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N], or [T, N / 2] with a gate."""
        return apply(x, w, bias)


class GemvLinear:
    """Plain weights, and quantized ones that are unpacked at load, read as they lie for few tokens; oneDNN's packed
    form, a second copy, for more."""

    name: ClassVar[str] = "gemv"
    gates: ClassVar[tuple[str, ...]] = GgufLinear.gates

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if reason := refusal(spec, device):
            return no(reason)
        return OneDnnLinear.supports(spec, device)

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Packed:
        """weights: canonical tensors of `spec.scheme`. Raises UnsupportedModelError if core cannot decode them."""
        dtype = getattr(torch, spec.act_dtype)
        if spec.scheme is None:
            weight = weights["weight"].to(dtype).contiguous()
        else:
            weight = dequantize_weight(weights, spec.scheme, dtype)
        few = matmul(spec, spec.act_dtype, weight)
        native_bf16 = spec.act_dtype == "bfloat16" and has_native(torch.bfloat16, device)
        if room_for(weight.numel() * (2 if native_bf16 else 4), device):
            dense = OneDnnLinear().prepare({"weight": weight}, replace(spec, gate=None, scheme=None), device)
            return Packed(GEMV_TOKENS_NATIVE_BF16 if native_bf16 else GEMV_TOKENS, few, gated(dense.many, spec.gate))
        if native_bf16:  # one form has to serve all: prompts matter more
            only = gated(packed(weight), spec.gate)
            return Packed(EVERY, only, only)
        if spec.act_dtype == "float32":
            return Packed(GEMV_TOKENS, few, gated(plain(weight), spec.gate))
        return Packed(EVERY, few, few)

    def apply(self, x: Tensor, w: Packed, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N], or [T, N / 2] with a gate."""
        return apply(x, w, bias)
