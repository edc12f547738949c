"""What a step needs before the model runs, read from the device-resident request table. T tokens, R rows."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

BLOCK = 256


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_tokens_kernel(table_ptr, rows_ptr, positions_ptr, out_ptr, stride_r, num_tokens, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens
    row = tl.load(rows_ptr + token, mask=mask, other=0).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=mask, other=0)
    value = tl.load(table_ptr + row * stride_r + position, mask=mask, other=0)
    tl.store(out_ptr + token, value, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _slot_mapping_kernel(
    table_ptr, rows_ptr, positions_ptr, out_ptr, stride_r, num_tokens, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens
    row = tl.load(rows_ptr + token, mask=mask, other=0).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=mask, other=0).to(tl.int64)
    block = tl.load(table_ptr + row * stride_r + position // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    tl.store(out_ptr + token, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=mask)


def gather_tokens(tokens: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """The op `gather_tokens`: tokens [R, L] at (rows [T], positions [T]), in the dtype of the table."""
    num_tokens = rows.shape[0]
    out = torch.empty((num_tokens,), dtype=tokens.dtype, device=tokens.device)
    if num_tokens:
        grid = (triton.cdiv(num_tokens, BLOCK),)
        _gather_tokens_kernel[grid](
            tokens, rows, positions, out, tokens.stride(0), num_tokens, BLOCK=BLOCK, num_warps=4
        )
    return out


def slot_mapping(block_table: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """The op `slot_mapping`: KV slots int64 [T] of (rows [T], positions [T]) by block_table int32 [R, M]."""
    num_tokens = rows.shape[0]
    out = torch.empty((num_tokens,), dtype=torch.int64, device=block_table.device)
    if num_tokens:
        grid = (triton.cdiv(num_tokens, BLOCK),)
        _slot_mapping_kernel[grid](
            block_table,
            rows,
            positions,
            out,
            block_table.stride(0),
            num_tokens,
            BLOCK_SIZE=block_size,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out
