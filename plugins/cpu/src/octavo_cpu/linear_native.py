"""Linear layers by the compiled library: every weight packed once, at load, and multiplied from that one copy.

Plain numbers keep their bits, GGUF blocks theirs. Few tokens are bound by reading the weight, many by arithmetic: the
library chooses between its ways to multiply by the number of tokens and the CPU's instructions (`kernels/product.h`).

Shapes: T tokens, K in_features, N out_features.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from octavo.plugin import YES, Device, LinearSpec, Support, no
from octavo.plugin.torch import dequantize_weight, has_int4_groups, int4_groups, quantize_rows
from octavo_cpu import native, ops_native

Tensor = torch.Tensor
DTYPES = ("bfloat16", "float32", "float16")
"""`Dtype` of api.h, by index: of activations and plain weights."""

KINDS = ("bfloat16", "float32", *native.BLOCKS, "float16", "int8")
"""`Kind` of api.h, by index: plain numbers by torch's name, and GGUF block types."""

INT8 = ("online:int8", "online:int8_per_channel_weight_only")
"""Packings of plain weights that become bytes."""

LARGE_PAGE = 2 << 20
CHUNK = 64 << 20
"""Weights are laid into pieces of this size, as one alone may be smaller than a large page."""


class Layer(ctypes.Structure):
    """`octavo::Linear`: one layer. The weight's memory is the caller's."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("gate", ctypes.c_int32),
        ("exact", ctypes.c_int32),
        ("num_out", ctypes.c_int64),
        ("num_in", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
    )


class LinearArgs(ctypes.Structure):
    """`octavo::LinearArgs`."""

    _fields_ = (
        ("layer", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
    )


class WeightMemory:
    """Hands out memory for packed weights, in large pages where the system has them: reading is a third faster so."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], aligned to 64 bytes. A chunk is freed when the last of its pieces is."""
        size = -(-num_bytes // 64) * 64
        if size > CHUNK // 2:
            return self._chunk(size)[:num_bytes]
        if size > len(self._rest):
            self._rest = self._chunk(CHUNK)
        taken, self._rest = self._rest[:num_bytes], self._rest[size:]
        return taken

    @staticmethod
    def _chunk(size: int) -> Tensor:
        memory = torch.empty(size + LARGE_PAGE, dtype=torch.uint8)
        start = -memory.data_ptr() % LARGE_PAGE
        chunk = memory[start : start + size]
        native.load().octavo_large_pages(chunk.data_ptr(), size)
        return chunk


MEMORY = WeightMemory()


@dataclass(frozen=True, eq=False)
class Matmul:
    """The library's product with one packed weight: (x [T, K], bias [N] or None) -> [T, N], or [T, N / 2] with a gate.

    layer: says what the weight is; weight: its memory. width: of the result.
    """

    layer: Layer
    weight: Tensor
    dtype: torch.dtype
    width: int

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        tokens, dtype = x.shape[0], self.dtype
        if not x.is_contiguous():
            x = x.contiguous()
        y, address = native.empty((tokens, self.width), dtype), ctypes.addressof(self.layer)
        if bias is None:
            native.step_function("linear")(LinearArgs(address, x.data_ptr(), None, y.data_ptr(), tokens))
        else:
            bias = bias.to(dtype)
            native.step_function("linear")(LinearArgs(address, x.data_ptr(), bias.data_ptr(), y.data_ptr(), tokens))
        return y

    def look_up(self, ids: Tensor, first: int, scale: float | None) -> Tensor:
        """Rows of the weight, as the op `embedding_part`: of plain numbers and GGUF blocks, without a gate."""
        assert self.layer.kind != KINDS.index("int8"), "bytes are not the weight's own numbers"
        shape = (self.layer.num_out, self.layer.num_in)
        return ops_native.rows_of_table(ids, (None, ctypes.addressof(self.layer)), shape, self.dtype, first, scale)


def matmul(spec: LinearSpec, kind: str, weight: Tensor, *, exact: bool = False) -> Matmul:
    """The product with a weight that `pack` made. exact: activations keep their bits."""
    layer = Layer(
        kind=KINDS.index(kind),
        dtype=DTYPES.index(spec.act_dtype),
        gate=native.GATES.index(spec.gate),
        exact=exact,
        num_out=spec.out_features,
        num_in=spec.in_features,
        weight=weight.data_ptr(),
    )
    width = spec.out_features // 2 if spec.gate else spec.out_features
    return Matmul(layer, weight, getattr(torch, spec.act_dtype), width)


def pack(rows: Tensor, kind: str, spec: LinearSpec, scales: Tensor | None = None) -> Tensor:
    """A weight into the library's panels: numbers [N, K] of that kind, or GGUF blocks uint8 [N, bytes of a row].

    scales: float32 [N], of int8 only. Raises AssertionError if the rows are not those of `spec`.
    """
    library = native.load()
    shape = (KINDS.index(kind), native.GATES.index(spec.gate), spec.out_features, spec.in_features)
    if kind in native.BLOCKS:
        columns, size = native.BLOCKS[kind]
        expected = (torch.uint8, (spec.out_features, spec.in_features // columns * size))
    else:
        expected = (getattr(torch, kind), (spec.out_features, spec.in_features))
    assert (rows.dtype, tuple(rows.shape)) == expected, f"{rows.dtype} {tuple(rows.shape)}, not {expected}"
    rows = rows.contiguous()
    packed = MEMORY.take(library.octavo_packed_bytes(*shape))
    library.octavo_pack(*shape, rows.data_ptr(), None if scales is None else scales.data_ptr(), packed.data_ptr())
    return packed


def refusal(spec: LinearSpec, device: Device) -> str:
    """Why the library cannot serve the layer, whatever its weight; empty if it can."""
    if device.type != "cpu":
        return f"needs a cpu device, not {device.type}"
    if why := native.why_not():
        return why
    if spec.act_dtype not in DTYPES:
        return f"no {spec.act_dtype} activations"
    if spec.out_dtype != spec.act_dtype:
        return f"gives {spec.act_dtype}, not {spec.out_dtype}"
    return ""


def is_exact(spec: LinearSpec, device: Device) -> bool:
    """Whether activations keep their bits: the platform's option `int8_activations`."""
    choice = getattr(device, "int8_activations", "auto")
    return choice == "never" or (choice == "auto" and spec.act_dtype == "float32")


class GgufLinear:
    """GGUF blocks in their own number of bits. Whether activations are rounded to 8 bits in blocks of 32 (see the
    README for what that costs in accuracy) is the platform's option `int8_activations`; if not, panels of the weight
    are unpacked as they are multiplied, into the activations' dtype."""

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
        if spec.in_features % native.BLOCKS[kind][0]:
            return no(f"{spec.in_features} in_features are not whole blocks of {kind}")
        return YES

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Matmul:
        """weights: "weight" uint8 [N, bytes of a row], GGUF blocks."""
        assert spec.scheme is not None
        kind = spec.scheme.packing.removeprefix("gguf:")
        return matmul(spec, kind, pack(weights["weight"], kind, spec), exact=is_exact(spec, device))

    def apply(self, x: Tensor, w: Matmul, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N], or [T, N / 2] with a gate."""
        return w(x, bias)

    def look_up(self, w: Matmul, ids: Tensor, first: int, scale: float | None) -> Tensor:
        """Rows of the weight, see `LinearKernel`."""
        return w.look_up(ids, first, scale)


class Int8Linear:
    """Bytes with one scale a row. Activations become bytes with one scale a token, so that sums are of whole numbers;
    where the scheme quantizes the weight only they keep their bits."""

    name: ClassVar[str] = "int8"
    gates: ClassVar[tuple[str, ...]] = GgufLinear.gates

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if reason := refusal(spec, device):
            return no(reason)
        packing = spec.scheme.packing if spec.scheme else "none"
        return YES if packing in INT8 else no(f"reads {' and '.join(INT8)}, not {packing}")

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Matmul:
        """weights: "weight" [N, K], plain: it is quantized here."""
        assert spec.scheme is not None
        codes, scale = quantize_rows(weights["weight"], "int8")
        return matmul(spec, "int8", pack(codes, "int8", spec, scale.flatten()), exact=spec.scheme.act is None)

    def apply(self, x: Tensor, w: Matmul, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N], or [T, N / 2] with a gate."""
        return w(x, bias)


class Int4GroupsLinear:
    """Any weight of 4-bit codes with a scale and an offset for every 32 columns, kept as GGUF's Q4_1 keeps its own:
    codes are exact, scales and offsets float16. Activations as in `GgufLinear`."""

    name: ClassVar[str] = "int4_groups"
    gates: ClassVar[tuple[str, ...]] = GgufLinear.gates

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if reason := refusal(spec, device):
            return no(reason)
        if not has_int4_groups(spec.scheme):
            return no(f"reads 4-bit codes, not {spec.scheme.packing if spec.scheme else 'plain weights'}")
        return YES

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Matmul:
        """weights: canonical tensors of `spec.scheme`."""
        assert spec.scheme is not None
        rows = q4_1_rows(*int4_groups(weights, spec.scheme))
        return matmul(spec, "Q4_1", pack(rows, "Q4_1", spec), exact=is_exact(spec, device))

    def apply(self, x: Tensor, w: Matmul, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N], or [T, N / 2] with a gate."""
        return w(x, bias)


def q4_1_rows(codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Blocks uint8 [N, K / 32 * 20] of codes uint8 [N, K], scale and offset [N, K / 32]: both as float16, then 16 bytes
    whose low nibbles are columns 0..15 and whose high ones are columns 16..31."""
    numbers = torch.stack([scale, offset], dim=-1).half().view(torch.uint8)
    halves = codes.view(*scale.shape, 2, 16)
    return torch.cat([numbers, halves[:, :, 0] | halves[:, :, 1] << 4], dim=-1).flatten(1)


class PlainLinear:
    """Plain weights in the activations' dtype, and quantized ones of any other scheme, which are unpacked at load."""

    name: ClassVar[str] = "plain"
    gates: ClassVar[tuple[str, ...]] = GgufLinear.gates

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if reason := refusal(spec, device):
            return no(reason)
        if spec.scheme is not None and spec.scheme.act is not None:
            return no(f"does not quantize activations to {spec.scheme.act}")
        return YES

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Matmul:
        """weights: canonical tensors of `spec.scheme`. Raises UnsupportedModelError if core cannot decode them."""
        dtype = getattr(torch, spec.act_dtype)
        if spec.scheme is None:
            weight = weights["weight"].to(dtype)
        else:
            weight = dequantize_weight(weights, spec.scheme, dtype)
        return matmul(spec, spec.act_dtype, pack(weight, spec.act_dtype, spec))

    def apply(self, x: Tensor, w: Matmul, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N], or [T, N / 2] with a gate."""
        return w(x, bias)

    def look_up(self, w: Matmul, ids: Tensor, first: int, scale: float | None) -> Tensor:
        """Rows of the weight, see `LinearKernel`."""
        return w.look_up(ids, first, scale)
