"""Per-row dynamic fp8 of activations, alone or folded into the kernel before: for row-wise scaled matrix products.

Shapes: T tokens, D features. Each function returns values [T, D] in fp8 and scales float32 [T, 1], such that
values * scales is the row: scale = largest magnitude / the format's largest number. A program holds a whole row.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.triton.activation import activate
from octavo.triton.norm import scale_to_unit_rms

Tensor = torch.Tensor

FP8 = torch.float8_e4m3fn


@triton.jit
def _store_quantized(y, row, columns, mask, out_ptr, scale_ptr, width, LARGEST: tl.constexpr):
    """y float32 [1, BLOCK_D], zero beyond `width`."""
    # A row of zeros must not divide by zero; the floor is far below what any format's smallest value can show.
    scale = tl.maximum(tl.max(tl.abs(y), axis=1), 1e-12) / LARGEST
    values = tl.clamp(y * (1.0 / scale)[:, None], -LARGEST, LARGEST)
    tl.store(out_ptr + row[:, None] * width + columns[None, :], values.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _quantize_kernel(x_ptr, out_ptr, scale_ptr, stride_x, width, LARGEST: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    columns = tl.arange(0, BLOCK_D)
    mask = (columns < width)[None, :]
    y = tl.load(x_ptr + row[:, None] * stride_x + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    _store_quantized(y, row, columns, mask, out_ptr, scale_ptr, width, LARGEST)


@triton.jit
def _norm_quantize_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    scale_ptr,
    stride_x,
    stride_residual,
    width,
    eps,
    ADD: tl.constexpr,
    ROUND: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    columns = tl.arange(0, BLOCK_D)
    mask = (columns < width)[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row[:, None] * stride_x + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    if ADD:
        residual_at = residual_ptr + row[:, None] * stride_residual + columns[None, :]
        total = (x + tl.load(residual_at, mask=mask, other=0.0)).to(dtype)
        tl.store(residual_at, total, mask=mask)
        x = total.to(tl.float32)
    y = scale_to_unit_rms(x, weight[None, :], eps, width, dtype, ROUND)
    # Through the activation dtype, so that folding the two kernels changes no result.
    _store_quantized(y.to(dtype).to(tl.float32), row, columns, mask, out_ptr, scale_ptr, width, LARGEST)


@triton.jit
def _act_quantize_kernel(
    x_ptr, out_ptr, scale_ptr, stride_x, width, KIND: tl.constexpr, LARGEST: tl.constexpr, BLOCK_D: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    columns = tl.arange(0, BLOCK_D)
    mask = (columns < width)[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    at = x_ptr + row[:, None] * stride_x + columns[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=mask, other=0.0).to(tl.float32)
    y = (activate(gate, KIND).to(dtype).to(tl.float32) * up).to(dtype).to(tl.float32)
    _store_quantized(y, row, columns, mask, out_ptr, scale_ptr, width, LARGEST)


def _outputs(num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    out = torch.empty((num_tokens, width), dtype=dtype, device=device)
    return out, torch.empty((num_tokens, 1), dtype=torch.float32, device=device)


def _tile(width: int) -> tuple[int, int]:
    """(padded width, warps) of a program that keeps a row in registers."""
    block_d = triton.next_power_of_2(width)
    return block_d, 16 if block_d > 8192 else 8 if block_d > 2048 else 4


def quantize_fp8(x: Tensor, *, dtype: torch.dtype = FP8) -> tuple[Tensor, Tensor]:
    """(values [T, D], scales [T, 1]) of x [T, D]. dtype: the fp8 format, a chip's own kind of e4m3."""
    num_tokens, width = x.shape
    out, scale = _outputs(num_tokens, width, dtype, x.device)
    if num_tokens:
        block_d, num_warps = _tile(width)
        _quantize_kernel[(num_tokens,)](
            x,
            out,
            scale,
            x.stride(0),
            width,
            LARGEST=torch.finfo(dtype).max,
            BLOCK_D=block_d,
            num_warps=num_warps,
        )
    return out, scale


def _norm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    num_tokens, width = x.shape
    out, scale = _outputs(num_tokens, width, dtype, x.device)
    if num_tokens:
        block_d, num_warps = _tile(width)
        _norm_quantize_kernel[(num_tokens,)](
            x,
            residual,
            weight,
            out,
            scale,
            x.stride(0),
            residual.stride(0) if residual is not None else 0,
            width,
            eps,
            ADD=residual is not None,
            ROUND=weight.dtype == x.dtype,
            LARGEST=torch.finfo(dtype).max,
            BLOCK_D=block_d,
            num_warps=num_warps,
        )
    return out, scale


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float, *, dtype: torch.dtype = FP8) -> tuple[Tensor, Tensor]:
    """quantize_fp8(rms_norm(x)) in one pass: x [T, D], weight [D] as in the op `rms_norm`."""
    return _norm_quantize(x, None, weight, eps, dtype)


def add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, dtype: torch.dtype = FP8
) -> tuple[Tensor, Tensor, Tensor]:
    """(values, scales, x + residual): quantize_fp8 of the norm of the sum. residual is overwritten with the sum."""
    return *_norm_quantize(x, residual, weight, eps, dtype), residual


def act_and_mul_fp8(x: Tensor, kind: str, *, dtype: torch.dtype = FP8) -> tuple[Tensor, Tensor]:
    """quantize_fp8(act_and_mul(x, kind)) in one pass: x [T, 2D], gate first."""
    num_tokens, width = x.shape[0], x.shape[1] // 2
    out, scale = _outputs(num_tokens, width, dtype, x.device)
    if num_tokens:
        block_d, num_warps = _tile(width)
        _act_quantize_kernel[(num_tokens,)](
            x,
            out,
            scale,
            x.stride(0),
            width,
            KIND=kind,
            LARGEST=torch.finfo(dtype).max,
            BLOCK_D=block_d,
            num_warps=num_warps,
        )
    return out, scale
