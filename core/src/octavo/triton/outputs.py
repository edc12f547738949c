"""What the kernels of products of few tokens share: the rows of a tile, meeting of its slices, bias, gate and store.

A gated product has twice as many rows as outputs, first all gates, then what they gate. A tile of it holds some of
both, so that one program can finish them:

    rows of W    0 ........ N/2 - 1 | N/2 ........ N - 1
                    [ HALF ]              [ HALF ]        -> one tile of BLOCK_N = 2 HALF rows, HALF outputs
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.triton.activation import activate

Tensor = torch.Tensor


@triton.jit
def tile_rows(block, N, BLOCK_N: tl.constexpr, GATE: tl.constexpr):
    """int64 [BLOCK_N]: the rows of W of a tile. Beyond the end the last row is read again, which is cheaper than a mask
    on every load; `store_outputs` leaves it out."""
    r = tl.arange(0, BLOCK_N)
    if GATE is None:
        row = tl.minimum(block * BLOCK_N + r, N - 1)
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        row = tl.minimum(block * HALF + r % HALF, N // 2 - 1) + tl.where(r < HALF, 0, N // 2)
    return row.to(tl.int64)


@triton.jit
def arrive(counter_ptr, number, PUBLISH: tl.constexpr):
    """Whether this program is the last of `number` to come here: to it alone the stores of all are visible. The counter
    is zero before and after. PUBLISH: see `Overlap`."""
    PUBLISH()
    tl.debug_barrier()  # every thread's stores are done before one thread says so
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == number - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def meet(
    total,
    partials_ptr,
    counters_ptr,
    block,
    part,
    M,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PUBLISH: tl.constexpr,
):
    """total float32 [BLOCK_N, ROWS], of which M columns count, summed over the slices of K, in their order; and whether
    this program has that sum: the last of the block to come here. partials float32 [SPLIT_K, blocks * BLOCK_N, M]."""
    m = tl.arange(0, ROWS)[None, :]
    cell = (block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None] * M + m
    stride_part = tl.num_programs(0) * BLOCK_N * M
    tl.store(partials_ptr + part * stride_part + cell, total, mask=m < M)
    last = arrive(counters_ptr + block, SPLIT_K, PUBLISH)
    if last:
        total = tl.zeros_like(total)
        for other in tl.static_range(SPLIT_K):
            partial = partials_ptr + other * stride_part + cell
            total += tl.load(partial, mask=m < M, other=0.0, cache_modifier=".cg")
    return total, last


@triton.jit
def store_outputs(
    total,
    row,
    bias_ptr,
    y_ptr,
    block,
    M,
    N,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATE: tl.constexpr,
):
    """total float32 [BLOCK_N, ROWS], of which M columns count -> y [M, N], or [M, N / 2] behind a gate."""
    if bias_ptr is not None:
        total += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    m = tl.arange(0, ROWS)[None, :]
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    if GATE is None:
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        tl.store(y_ptr + m * N + n, total.to(dtype), mask=(n < N) & (m < M))
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        n = block * HALF + tl.arange(0, HALF)[:, None]
        # Rounded where the product and the activation by themselves would round.
        pair = tl.permute(tl.reshape(total.to(dtype), [2, HALF, ROWS]), [1, 2, 0])
        gate, up = tl.split(pair)
        y = activate(gate.to(tl.float32), GATE).to(dtype).to(tl.float32) * up.to(tl.float32)
        tl.store(y_ptr + m * (N // 2) + n, y.to(dtype), mask=(n < N // 2) & (m < M))


def make_partials(
    shape: tuple[int, ...], num_blocks: int, counters: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Where slices leave their sums, float32 of `shape`, and an arrival counter a block: `counters`, or zeroed ones."""
    if counters is None:
        counters = torch.zeros((num_blocks,), dtype=torch.int32, device=device)
    return torch.empty(shape, dtype=torch.float32, device=device), counters
