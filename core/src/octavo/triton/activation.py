"""Gated activations. Shapes: T tokens, I intermediate features; a row holds the gate, then the up projection."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.triton.overlap import IN_ORDER, Overlap
from octavo.triton.quantize import FP8, quantize_row, row_warps

Tensor = torch.Tensor

BLOCK = 1024


@triton.jit
def activate(gate, KIND: tl.constexpr):
    """silu, gelu (erf) or gelu_tanh of float32 values."""
    if KIND == "silu":
        return gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "gelu_tanh", "kind is silu, gelu or gelu_tanh")
        # 0.5 (1 + tanh(u)) = sigmoid(2 u), with u = sqrt(2 / pi) (g + 0.044715 g^3)
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))


@triton.jit
def _act_and_mul_kernel(x_ptr, out_ptr, stride_x, width, KIND: tl.constexpr, BLOCK: tl.constexpr, START: tl.constexpr):
    START()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + width + columns, mask=mask, other=0.0).to(tl.float32)
    # Rounded between the two, as the reference rounds: models are trained and compared with that.
    y = activate(gate, KIND).to(dtype).to(tl.float32) * up
    tl.store(out_ptr + row * width + columns, y.to(dtype), mask=mask)


@triton.jit
def _act_and_mul_fp8_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    stride_x,
    width,
    LARGEST: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_D: tl.constexpr,
    START: tl.constexpr,
):
    START()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < width
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + width + columns, mask=mask, other=0.0).to(tl.float32)
    y = (activate(gate, KIND).to(dtype).to(tl.float32) * up).to(dtype).to(tl.float32)
    values, scale = quantize_row(y, LARGEST)
    tl.store(out_ptr + row * width + columns, values.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row, scale)


def act_and_mul(x: Tensor, kind: str, *, overlap: Overlap = IN_ORDER) -> Tensor:
    """The op `act_and_mul`: act(x[:, :I]) * x[:, I:] for x [T, 2I]; new [T, I]. kind: silu, gelu, gelu_tanh."""
    assert x.stride(1) == 1, "rows are read in order"
    num_tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block = min(BLOCK, triton.next_power_of_2(width))
    grid = (num_tokens, triton.cdiv(width, block))
    overlap.launch(
        _act_and_mul_kernel,
        grid,
        x,
        out,
        x.stride(0),
        width,
        KIND=kind,
        BLOCK=block,
        START=overlap.start,
        num_warps=4,
        **overlap.options,
    )
    return out


def act_and_mul_fp8(
    x: Tensor, kind: str, *, dtype: torch.dtype = FP8, overlap: Overlap = IN_ORDER
) -> tuple[Tensor, Tensor]:
    """`quantize_fp8(act_and_mul(x, kind))` in one pass: (values [T, I] in fp8, scales float32 [T, 1])."""
    assert x.stride(1) == 1, "rows are read in order"
    num_tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=dtype, device=x.device)
    scale = torch.empty((num_tokens, 1), dtype=torch.float32, device=x.device)
    if num_tokens:
        block_d = triton.next_power_of_2(width)
        overlap.launch(
            _act_and_mul_fp8_kernel,
            (num_tokens,),
            x,
            out,
            scale,
            x.stride(0),
            width,
            LARGEST=torch.finfo(dtype).max,
            KIND=kind,
            BLOCK_D=block_d,
            START=overlap.start,
            num_warps=row_warps(block_d),
            **overlap.options,
        )
    return out, scale
