"""Per-row dynamic fp8 of activations, for row-wise scaled matrix products. Shapes: T tokens, D features."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.triton.overlap import IN_ORDER, Overlap

Tensor = torch.Tensor

FP8 = torch.float8_e4m3fn


@triton.jit
def quantize_row(x, LARGEST: tl.constexpr):
    """(values in [-LARGEST, LARGEST], scale) of one row x in float32."""
    # A row of zeros must not divide by zero; the floor is far below what any format's smallest value can show.
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12) / LARGEST
    return tl.clamp(x * (1.0 / scale), -LARGEST, LARGEST), scale


@triton.jit
def _quantize_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    stride_x,
    width,
    LARGEST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    START: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < width
    START()
    x = tl.load(x_ptr + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    values, scale = quantize_row(x, LARGEST)
    tl.store(out_ptr + row * width + columns, values.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row, scale)


def row_warps(width: int) -> int:
    """Warps of a program that keeps one row of `width` in registers: about 16 features a thread."""
    return min(16, max(1, width // 512))


def quantize_fp8(x: Tensor, *, dtype: torch.dtype = FP8, overlap: Overlap = IN_ORDER) -> tuple[Tensor, Tensor]:
    """(values [T, D] in fp8, scales float32 [T, 1]) of x [T, D], rows contiguous inside: x is values * scales.

    A row's scale is its largest magnitude over the format's largest number. One program keeps a whole row in registers,
    about 16 features a thread. dtype: the fp8 format, a chip's own kind of e4m3.
    """
    assert x.stride(1) == 1, "rows are read in order"
    num_tokens, width = x.shape
    out = torch.empty((num_tokens, width), dtype=dtype, device=x.device)
    scale = torch.empty((num_tokens, 1), dtype=torch.float32, device=x.device)
    if num_tokens:
        block_d = triton.next_power_of_2(width)
        overlap.launch(
            _quantize_kernel,
            (num_tokens,),
            x,
            out,
            scale,
            x.stride(0),
            width,
            LARGEST=torch.finfo(dtype).max,
            BLOCK_D=block_d,
            START=overlap.start,
            num_warps=row_warps(block_d),
            **overlap.options,
        )
    return out, scale
