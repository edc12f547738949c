"""Matrix products of few rows: y[M, N] = x[M, K] W[N, K]^T for M <= 8, bound by reading W once.

A program owns BLOCK_N outputs and one of SPLIT_K slices of K, so that narrow matrices fill the chip too:

              K, SPLIT_K slices
            +------+------+------+
    BLOCK_N |  p0  |  p1  |  p2  |  -> partials [SPLIT_K, M, N] -> the last program to arrive adds them, in order
            +------+------+------+

No float atomics: equal inputs give equal bits. Weights: bf16/fp16, or fp8 e4m3 with a scale per output row, decoded in
registers. 4-bit weights have a kernel of their own, `octavo.triton.int4`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.triton.outputs import make_partials, meet, store_outputs, tile_rows
from octavo.triton.overlap import IN_ORDER, SECTOR, Overlap

Tensor = torch.Tensor

MAX_ROWS = 8
MIN_BLOCK_N = 4


@dataclass(frozen=True, kw_only=True)
class GemvConfig:
    """How one shape is cut. dot: on the matrix unit (the only way for M > 1), else one multiply-add a weight.

    block_k is what a program reads of a row at once. fetch: how many such tiles are asked for before the kernel before
    has ended, see `Overlap`.
    """

    block_n: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 3
    dot: bool = True
    fetch: int = 2

    def __post_init__(self) -> None:
        # Fewer outputs a program would need more counters than `make_counters` makes.
        assert self.block_n >= MIN_BLOCK_N, f"block_n {self.block_n} is less than {MIN_BLOCK_N}"


@triton.jit
def load_x(x_ptr, stride_x, k, M, K, ROWS: tl.constexpr, EXACT: tl.constexpr, dtype: tl.constexpr):
    """x of columns k as the product takes it: [len(k), ROWS] for the matrix unit, rows beyond M zero; [1, len(k)] for
    one row. EXACT: no column lies beyond K."""
    if ROWS > 1:
        row = tl.arange(0, ROWS)[None, :]
        return tl.load(x_ptr + row * stride_x + k[:, None], mask=(k < K)[:, None] & (row < M), other=0.0).to(dtype)
    elif EXACT:
        return tl.load(x_ptr + k).to(tl.float32)[None, :]
    else:
        return tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["M"])
def _gemv_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    partials_ptr,
    counters_ptr,
    M,
    N,
    stride_x,
    stride_w,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    FETCHED: tl.constexpr,
    SECTOR: tl.constexpr,
    GATE: tl.constexpr,
    UPCAST: tl.constexpr,
    START: tl.constexpr,
    FETCH: tl.constexpr,
    PUBLISH: tl.constexpr,
):
    ROWS: tl.constexpr = 16 if DOT else 1  # the matrix unit's least
    NUM_TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TILES: tl.constexpr = (NUM_TILES + SPLIT_K - 1) // SPLIT_K
    EXACT: tl.constexpr = K % BLOCK_K == 0
    block, part = tl.program_id(0), tl.program_id(1)
    row = tile_rows(block, N, BLOCK_N, GATE)
    column = tl.arange(0, BLOCK_K)
    dtype: tl.constexpr = tl.float32 if UPCAST else x_ptr.dtype.element_ty
    acc = tl.zeros([BLOCK_N, ROWS if DOT else BLOCK_K], dtype=tl.float32)
    begin, end = part * TILES, tl.minimum(part * TILES + TILES, NUM_TILES)

    for ahead in tl.static_range(FETCHED):
        sector = tl.minimum(begin + ahead, NUM_TILES - 1) * BLOCK_K + tl.arange(0, BLOCK_K // SECTOR) * SECTOR
        FETCH(w_ptr + row[:, None] * stride_w + sector[None, :])
    START()

    for tile in tl.range(begin, end, num_stages=STAGES):
        k = tile * BLOCK_K + column
        at = w_ptr + row[:, None] * stride_w + k[None, :]
        if EXACT:
            w = tl.load(at, eviction_policy="evict_first")
        else:
            w = tl.load(at, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
        x = load_x(x_ptr, stride_x, k, M, K, ROWS, EXACT, dtype)
        if DOT:
            acc = tl.dot(w.to(dtype), x, acc=acc, input_precision="ieee")
        else:
            acc += w.to(tl.float32) * x

    total = acc if DOT else tl.sum(acc, axis=1)[:, None]
    last = True
    if SPLIT_K > 1:
        total, last = meet(total, partials_ptr, counters_ptr, block, part, M, ROWS, BLOCK_N, SPLIT_K, PUBLISH)
    if last:
        if scale_ptr is not None:
            total *= tl.load(scale_ptr + row).to(tl.float32)[:, None]
        store_outputs(total, row, bias_ptr, y_ptr, block, M, N, ROWS, BLOCK_N, GATE)


INTERPRETED = not isinstance(_gemv_kernel, triton.JITFunction)
"""Whether kernels run in the interpreter, whose bf16 products are wrong: there they are made in float32."""


def default_config(num_out: int, num_in: int, num_rows: int, *, num_cores: int = 132) -> GemvConfig:
    """A sane cut for a shape that nobody tuned, after what won where it was measured (`benchmarks/results`).
    num_cores: multiprocessors of the chip.

    One row: no matrix unit, narrow programs of 32 weights a thread, whole rows of K (there are enough outputs for all
    cores). Several: square-ish tiles on the matrix unit, split until there are about two programs a core.
    """
    widest = triton.next_power_of_2(num_in)
    if num_rows == 1:
        block_n = next((n for n in (16, 8) if num_out >= 2.5 * n * num_cores), MIN_BLOCK_N)
        return GemvConfig(block_n=block_n, block_k=min(4096 // block_n, widest), num_stages=4, dot=False)
    wide = num_out >= 16 * num_cores
    block_n, num_warps = (64, 4) if wide else (16, 2)
    block_k = min(128 if wide else 256, max(32, widest))
    most = min(4, 2 * num_cores * block_n // num_out, num_in // (2 * block_k))
    split_k = 1 << (max(most, 1).bit_length() - 1)
    return GemvConfig(block_n=block_n, block_k=block_k, split_k=split_k, num_warps=num_warps, num_stages=4)


def make_counters(num_out: int, device: torch.device) -> Tensor:
    """Arrival counters for any cut of N = num_out. They are zero again after each product.

    One per weight, or one for all products of one stream: two products must not use it at the same time.
    """
    return torch.zeros((triton.cdiv(num_out, MIN_BLOCK_N),), dtype=torch.int32, device=device)


def _launch(
    x: Tensor,
    w: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    config: GemvConfig,
    counters: Tensor | None,
    gate: str | None,
    overlap: Overlap,
) -> Tensor:
    assert x.stride(1) == w.stride(1) == 1, "rows are read in order"
    num_rows, num_in = x.shape
    num_out = w.shape[0]
    assert num_rows <= MAX_ROWS, f"{num_rows} rows; the kernel takes up to {MAX_ROWS}"
    y = torch.empty((num_rows, num_out // 2 if gate else num_out), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    num_blocks, partials = triton.cdiv(num_out, config.block_n), None
    if config.split_k > 1:
        shape = (config.split_k, num_blocks * config.block_n, num_rows)
        partials, counters = make_partials(shape, num_blocks, counters, x.device)
    sector = SECTOR // w.element_size()
    fetches = overlap.early and config.block_k >= sector and num_in % config.block_k == 0
    overlap.launch(
        _gemv_kernel,
        (num_blocks, config.split_k),
        x,
        w,
        scale,
        bias,
        y,
        partials,
        counters,
        num_rows,
        num_out,
        x.stride(0),
        w.stride(0),
        K=num_in,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT_K=config.split_k,
        STAGES=config.num_stages,
        DOT=config.dot or num_rows > 1,
        FETCHED=config.fetch if fetches else 0,
        SECTOR=sector,
        GATE=gate,
        UPCAST=INTERPRETED,
        START=overlap.start,
        FETCH=overlap.fetch,
        PUBLISH=overlap.publish,
        num_warps=config.num_warps,
        **overlap.options,
    )
    return y


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: GemvConfig | None = None,
    counters: Tensor | None = None,
    gate: str | None = None,
    overlap: Overlap = IN_ORDER,
) -> Tensor:
    """x W^T + b: x [M, K] with M <= 8, weight [N, K], rows contiguous inside; a new [M, N] in x's dtype, summed in
    float32. config: default `default_config`. counters: from `make_counters`; None: zeroed for this product.
    gate: a kind of `act_and_mul`, applied to the result: [M, N / 2]."""
    config = config or default_config(weight.shape[0], x.shape[1], x.shape[0])
    return _launch(x, weight, None, bias, config, counters, gate, overlap)


def gemv_fp8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    config: GemvConfig | None = None,
    counters: Tensor | None = None,
    gate: str | None = None,
    overlap: Overlap = IN_ORDER,
) -> Tensor:
    """`gemv` with weight [N, K] in 8-bit floats, times scale float32 [N] or [N, 1]."""
    config = config or default_config(weight.shape[0], x.shape[1], x.shape[0])
    return _launch(x, weight, scale, bias, config, counters, gate, overlap)
