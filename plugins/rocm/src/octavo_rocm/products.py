"""Products of few tokens by the HIP kernels of `kernels/gemv.hip`: y [T, N] = x [T, K] W^T + b for T <= 4.

The kernels of a format are compiled when a layer first asks whether it may have them, and must then agree with torch on
a small product; a reason why not is told by `octavo explain`.
"""

from __future__ import annotations

from ctypes import c_int, c_long, c_void_p
from functools import cache
from typing import Any

import torch

from octavo.plugin import Device
from octavo_rocm import kernels
from octavo_rocm.device import target_for
from octavo_rocm.hip import Hip, HipError, HipLibraries, compiled
from octavo_rocm.kernels import MOST_TOKENS, ROWS, THREADS
from octavo_rocm.targets import target_of

Tensor = torch.Tensor

BLOCKS = {"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_K": (256, 144)}
"""GGUF's packings that are read as they lie: columns and bytes of a block."""
ALIGNMENT = 16
"""Bytes that the kernels read at once."""
TOLERANCE = 2e-2
"""Of the self-test, as a share of the largest result: a rounding to bfloat16 is 4e-3."""


class Products:
    """The kernels of one format of W and one of x. functions: by name, as `hip` launches them."""

    def __init__(self, hip: Hip, functions: dict[str, Any], weight_format: str, wave: int) -> None:
        self._hip = hip
        self._functions = functions
        self._format = weight_format
        self._rows = ROWS[weight_format] * (THREADS // wave)

    def gemv(self, x: Tensor, weight: Tensor, groups: Tensor | None, bias: Tensor | None) -> Tensor:
        """x [T, K], T from 1 to 4, rows contiguous inside and aligned; a new [T, N]."""
        num_tokens, num_in = x.shape
        num_out = weight.shape[0]
        y = torch.empty((num_tokens, num_out), dtype=x.dtype, device=x.device)
        grid = -(-num_out // self._rows)
        self._launch(f"gemv_{num_tokens}", grid, x, weight, groups, bias, y, num_in)
        return y

    def unpack(self, weight: Tensor, groups: Tensor | None, num_in: int, dtype: torch.dtype) -> Tensor:
        """A new plain weight [N, K]."""
        y = torch.empty((weight.shape[0], num_in), dtype=dtype, device=weight.device)
        pieces = -(-num_in // 256) * 8 if self._format == "Int4" else num_in // (8 if self._format == "Plain" else 16)
        self._launch("unpack", -(-weight.shape[0] * pieces // THREADS), None, weight, groups, None, y, num_in)
        return y

    def _launch(
        self,
        name: str,
        grid: int,
        x: Tensor | None,
        weight: Tensor,
        groups: Tensor | None,
        bias: Tensor | None,
        y: Tensor,
        num_in: int,
    ) -> None:
        arguments = (
            address(x),
            c_long(0 if x is None else x.stride(0)),
            address(weight),
            address(groups),
            address(bias),
            address(y),
            c_long(weight.stride(0) * weight.element_size()),
            c_int(weight.shape[0]),
            c_int(num_in),
        )
        self._hip.launch(self._functions[name], grid, THREADS, arguments, stream_of(y.device))


def address(tensor: Tensor | None) -> c_void_p:
    return c_void_p(None if tensor is None else tensor.data_ptr())


def stream_of(device: torch.device) -> int:
    """Torch's current stream as HIP knows it; 0 for tensors of the host."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def takes(x: Tensor) -> bool:
    """Whether the kernels take these activations: few, and aligned."""
    size = x.element_size()
    # Allocations are aligned; by the offset, tracing can tell too.
    aligned = x.storage_offset() * size % ALIGNMENT == 0 and x.stride(0) * size % ALIGNMENT == 0
    return 0 < x.shape[0] <= MOST_TOKENS and x.stride(1) == 1 and aligned


@cache
def libraries() -> HipLibraries:
    return HipLibraries()


@cache
def products_for(index: int, weight_format: str, dtype: str) -> Products:
    """Compiled for card `index` and loaded there. Raises HipError."""
    arch = str(torch.cuda.get_device_properties(index).gcnArchName)
    target = target_of(arch)
    if target is None:
        raise HipError(f"the kernels are not written for {arch}")
    hip = libraries()
    code = compiled(hip, kernels.source(), kernels.options(weight_format, dtype, target, arch))
    with torch.cuda.device(index):
        return Products(hip, hip.load(code, kernels.NAMES), weight_format, target.wave)


def objection(device: Device, weight_format: str, dtype: str) -> str:
    """Why these kernels must not run on the device; empty if they are right. Compiles them on the first question."""
    if target_for(device) is None:
        return "its kernels are for AMD cards only"
    return card_objection(device.index, weight_format, dtype)


@cache
def card_objection(index: int, weight_format: str, dtype: str) -> str:
    try:
        products = products_for(index, weight_format, dtype)
        return self_test(products, weight_format, getattr(torch, dtype), torch.device("cuda", index))
    except (HipError, RuntimeError) as error:
        return f"its kernels cannot be used: {(str(error) or type(error).__name__).splitlines()[0]}"


def self_test(products: Products, weight_format: str, dtype: torch.dtype, device: torch.device) -> str:
    """What is wrong with the kernels, judged by their own unpacked weight and torch; empty if nothing is."""
    weight, groups, num_in, plain = sample(weight_format, dtype)
    weight, plain = weight.to(device), plain.to(device)
    groups = None if groups is None else groups.to(device)
    found = products.unpack(weight, groups, num_in, dtype)
    if not (off := relative(found, plain)) <= TOLERANCE:
        return f"its kernels fail their self-test: unpacked weights are off by {off:.3g}"
    numbers = torch.Generator().manual_seed(1)
    for tokens in range(1, MOST_TOKENS + 1):
        x = torch.randn((tokens, num_in), generator=numbers).to(device=device, dtype=dtype)
        bias = torch.randn(len(plain), generator=numbers).to(device=device, dtype=dtype)
        expected = x.float() @ plain.float().t() + bias.float()
        if not (off := relative(products.gemv(x, weight, groups, bias), expected)) <= TOLERANCE:
            return f"its kernels fail their self-test: {tokens} tokens are off by {off:.3g}"
    return ""


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest number; NaN if there is one."""
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def sample(weight_format: str, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, int, Tensor]:
    """(W, groups, K, plain W) of a small weight: rows that fill no block of threads, more columns than a wave takes."""
    from octavo.plugin.torch import core_scheme, dequantize_weight

    numbers, num_out, num_in = torch.Generator().manual_seed(0), 37, 2816
    if weight_format in BLOCKS:
        columns, size = BLOCKS[weight_format]
        packed = torch.randint(0, 256, (num_out, num_in // columns, size), generator=numbers, dtype=torch.uint8)
        scales = torch.rand((num_out, num_in // columns, 2), generator=numbers).mul(0.01).half()
        num_scales = 2 if weight_format == "Q4_K" else 1
        packed[..., : 2 * num_scales] = scales[..., :num_scales].contiguous().view(torch.uint8)
        packed = packed.flatten(1)
        scheme = core_scheme(f"gguf:{weight_format}")
        return packed, None, num_in, dequantize_weight({"weight": packed}, scheme, dtype)
    if weight_format == "Int4":
        from octavo.triton.int4 import pack

        codes = torch.randint(0, 16, (num_out, num_in), generator=numbers, dtype=torch.uint8)
        scale, offset = (torch.randn((num_out, num_in // 32), generator=numbers).half().float() for _ in range(2))
        int4 = pack(codes, scale, offset)
        plain = (codes.view(num_out, -1, 32) * scale[..., None] + offset[..., None]).flatten(1)
        return int4.words, int4.groups, num_in, plain.to(dtype)
    plain = torch.randn((num_out, num_in), generator=numbers).to(dtype)
    return plain, None, num_in, plain
