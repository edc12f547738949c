"""Root-mean-square norms. Shapes: R rows of D features; one program takes a few whole rows, in float32.

Numbers of rows are never specialized on: a step of a new size must not wait for a compiler.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.triton.overlap import IN_ORDER, Overlap
from octavo.triton.quantize import FP8, quantize_row, row_warps

Tensor = torch.Tensor

ELEMENTS = 1024
"""Elements of a program's tile, where rows are short enough to take several."""


@triton.jit
def scale_to_unit_rms(x, weight, eps, width, DTYPE: tl.constexpr, ROUND: tl.constexpr):
    """x [BLOCK_R, BLOCK_D] float32, zero beyond `width`. ROUND: to DTYPE before the product with the weight."""
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)
    unit = x * inverse[:, None]
    if ROUND:
        unit = unit.to(DTYPE).to(tl.float32)
    return unit * weight


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_inner,
    stride_outer,
    stride_inner,
    width,
    eps,
    ROUND: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    START: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    start = rows // num_inner * stride_outer + rows % num_inner * stride_inner
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    START()
    x = tl.load(x_ptr + start[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    y = scale_to_unit_rms(x, weight[None, :], eps, width, dtype, ROUND)
    tl.store(out_ptr + rows[:, None] * width + columns[None, :], y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    num_rows,
    stride_x,
    stride_residual,
    width,
    eps,
    ROUND: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    START: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    x_at = x_ptr + rows[:, None] * stride_x + columns[None, :]
    residual_at = residual_ptr + rows[:, None] * stride_residual + columns[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    START()
    total = tl.load(x_at, mask=mask, other=0.0).to(tl.float32) + tl.load(residual_at, mask=mask, other=0.0)
    total = total.to(dtype)
    tl.store(residual_at, total, mask=mask)
    y = scale_to_unit_rms(total.to(tl.float32), weight[None, :], eps, width, dtype, ROUND)
    tl.store(x_at, y.to(dtype), mask=mask)


@triton.jit
def _add_rms_norm_fp8_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    scale_ptr,
    stride_x,
    stride_residual,
    width,
    eps,
    LARGEST: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_D: tl.constexpr,
    START: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < width
    residual_at = residual_ptr + row * stride_residual + columns
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    START()
    x = tl.load(x_ptr + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    total = (x + tl.load(residual_at, mask=mask, other=0.0)).to(dtype)
    tl.store(residual_at, total, mask=mask)
    y = scale_to_unit_rms(total.to(tl.float32)[None, :], weight[None, :], eps, width, dtype, ROUND)
    normed = tl.reshape(y, (BLOCK_D,)).to(dtype).to(tl.float32)
    values, scale = quantize_row(normed, LARGEST)
    tl.store(out_ptr + row * width + columns, values.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row, scale)


def row_tile(width: int) -> tuple[int, int, int]:
    """(rows, padded width, warps) of a program that keeps whole rows of `width` in registers."""
    block_d = triton.next_power_of_2(width)
    block_r = max(1, ELEMENTS // block_d)
    return block_r, block_d, 16 if block_d > 8192 else 8 if block_d > 2048 else 4


def rows_of(x: Tensor) -> tuple[Tensor, int, int, int, int]:
    """(tensor, rows, rows of an inner group, stride of a group, stride of a row) of x [..., D].

    Rows of up to two leading dimensions are walked as they lie (heads of a packed projection); others are copied.
    """
    width = x.shape[-1]
    if x.stride(-1) != 1 or (x.dim() > 3 and not x.is_contiguous()):
        x = x.contiguous()
    if x.dim() == 3 and not x.is_contiguous():
        return x, x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1)
    if x.dim() == 2:
        return x, x.shape[0], 1, x.stride(0), 0
    return x, x.numel() // width, 1, width, 0


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, overlap: Overlap = IN_ORDER) -> Tensor:
    """The op `rms_norm`: x [..., D], possibly strided, normed over D; a new contiguous tensor in x's dtype."""
    x, num_rows, num_inner, stride_outer, stride_inner = rows_of(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    block_r, block_d, num_warps = row_tile(x.shape[-1])
    overlap.launch(
        _rms_norm_kernel,
        (triton.cdiv(num_rows, block_r),),
        x,
        weight,
        out,
        num_rows,
        num_inner,
        stride_outer,
        stride_inner,
        x.shape[-1],
        eps,
        ROUND=weight.dtype == x.dtype,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        START=overlap.start,
        num_warps=num_warps,
        **overlap.options,
    )
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, overlap: Overlap = IN_ORDER
) -> tuple[Tensor, Tensor]:
    """The op `add_rms_norm` in one pass and in place: residual becomes x + residual, x its norm. Both [T, D]."""
    assert x.stride(1) == residual.stride(1) == 1, "rows are read in order"
    num_rows, width = x.shape
    if num_rows == 0:
        return x, residual
    block_r, block_d, num_warps = row_tile(width)
    overlap.launch(
        _add_rms_norm_kernel,
        (triton.cdiv(num_rows, block_r),),
        x,
        residual,
        weight,
        num_rows,
        x.stride(0),
        residual.stride(0),
        width,
        eps,
        ROUND=weight.dtype == x.dtype,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        START=overlap.start,
        num_warps=num_warps,
        **overlap.options,
    )
    return x, residual


def add_rms_norm_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    dtype: torch.dtype = FP8,
    overlap: Overlap = IN_ORDER,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op `add_rms_norm_fp8` in one pass: residual becomes x + residual, in place. Both [T, D].

    dtype: the fp8 format, a chip's own kind of e4m3.
    """
    assert x.stride(1) == residual.stride(1) == 1, "rows are read in order"
    num_rows, width = x.shape
    out = torch.empty((num_rows, width), dtype=dtype, device=x.device)
    scale = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    if num_rows:
        block_d = triton.next_power_of_2(width)
        overlap.launch(
            _add_rms_norm_fp8_kernel,
            (num_rows,),
            x,
            residual,
            weight,
            out,
            scale,
            x.stride(0),
            residual.stride(0),
            width,
            eps,
            LARGEST=torch.finfo(dtype).max,
            ROUND=weight.dtype == x.dtype,
            BLOCK_D=block_d,
            START=overlap.start,
            num_warps=row_warps(block_d),
            **overlap.options,
        )
    return out, scale, residual
