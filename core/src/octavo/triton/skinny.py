"""Matrix products of a few dozen rows: y[M, N] = x[M, K] W[N, K]^T for M <= 128, bound by reading W once.

W's rows are the matrix unit's rows and x's its columns, so that few of them waste nothing. The tiles of W, [BLOCK_N,
BLOCK_K] each, are dealt out evenly to as many programs as the chip runs at once, whatever N and K are ("stream-K",
Osama et al. 2023); each reads its share as one unbroken stream:

             K, tiles of BLOCK_K
           +----+----+----+----+
    block 0| p0   p0   p0 | p1 |   -> p0 and p1 leave partial sums; the last of them to arrive adds them, in order
           +----+----+----+----+
    block 1| p1   p1 | p2   p2 |
           +----+----+----+----+

No float atomics: equal inputs give equal bits.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from octavo.triton.gemv import INTERPRETED, MIN_BLOCK_N, load_x
from octavo.triton.outputs import arrive, make_partials, store_outputs, tile_rows
from octavo.triton.overlap import IN_ORDER, SECTOR, Overlap

Tensor = torch.Tensor

MAX_ROWS = 128
MIN_ROWS = 16
"""Fewer rows are padded to so many: the matrix unit's least."""


@dataclass(frozen=True, kw_only=True)
class SkinnyConfig:
    """How one shape is cut. programs: how many share the work; those that the chip holds at once are best.

    num_stages: tiles on their way at a time; together they fill the shared memory. fetch: tiles of the program that are
    asked for before the kernel before has ended, see `Overlap`.
    """

    block_n: int
    block_k: int
    programs: int
    num_warps: int = 4
    num_stages: int = 4
    fetch: int = 2

    def __post_init__(self) -> None:
        assert self.block_n >= 2 * MIN_BLOCK_N, f"block_n {self.block_n} is less than {2 * MIN_BLOCK_N}"


@triton.jit
def _owner(tile, num_tiles, programs):
    """The program p with p T / P <= tile < (p + 1) T / P, rounded down, for T tiles and P programs."""
    return ((tile + 1) * programs - 1) // num_tiles


@triton.jit
def _fetch_tiles(
    w_ptr,
    begin,
    end,
    N,
    stride_w,
    TILES_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FETCHED: tl.constexpr,
    SECTOR: tl.constexpr,
    GATE: tl.constexpr,
    FETCH: tl.constexpr,
):
    """Ask for the first FETCHED of the tiles begin..end."""
    for ahead in tl.static_range(FETCHED):
        tile = tl.minimum(begin + ahead, end - 1)
        row = tile_rows(tile // TILES_K, N, BLOCK_N, GATE)
        sector = tile % TILES_K * BLOCK_K + tl.arange(0, BLOCK_K // SECTOR) * SECTOR
        FETCH(w_ptr + row[:, None] * stride_w + sector[None, :])


@triton.jit(do_not_specialize=["M"])
def _skinny_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    x_scale_ptr,
    bias_ptr,
    y_ptr,
    partials_ptr,
    counters_ptr,
    M,
    N,
    stride_x,
    stride_w,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    FETCHED: tl.constexpr,
    SECTOR: tl.constexpr,
    GATE: tl.constexpr,
    UPCAST: tl.constexpr,
    START: tl.constexpr,
    FETCH: tl.constexpr,
    PUBLISH: tl.constexpr,
):
    TILES_K: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EXACT: tl.constexpr = K % BLOCK_K == 0
    dtype: tl.constexpr = tl.float32 if UPCAST else x_ptr.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    num_tiles = tl.cdiv(N, BLOCK_N) * TILES_K
    begin, end = program * num_tiles // programs, (program + 1) * num_tiles // programs

    _fetch_tiles(w_ptr, begin, end, N, stride_w, TILES_K, BLOCK_N, BLOCK_K, FETCHED, SECTOR, GATE, FETCH)
    START()

    for block in range(begin // TILES_K, tl.cdiv(end, TILES_K)):
        top = block * TILES_K
        till = tl.minimum(end, top + TILES_K)
        row = tile_rows(block, N, BLOCK_N, GATE)
        acc = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
        for tile in tl.range(tl.maximum(begin, top), till, num_stages=STAGES):
            k = (tile - top) * BLOCK_K + tl.arange(0, BLOCK_K)
            at = w_ptr + row[:, None] * stride_w + k[None, :]
            if EXACT:
                w = tl.load(at, eviction_policy="evict_first")
            else:
                w = tl.load(at, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
            x = load_x(x_ptr, stride_x, k, M, K, ROWS, EXACT, dtype)
            acc = tl.dot(w.to(dtype), x, acc=acc, input_precision="ieee")

        if till < end:  # memory works on the next block while this one is finished
            _fetch_tiles(w_ptr, till, end, N, stride_w, TILES_K, BLOCK_N, BLOCK_K, FETCHED, SECTOR, GATE, FETCH)
        first = _owner(top, num_tiles, programs)
        parts = _owner(top + TILES_K - 1, num_tiles, programs) - first + 1
        done = parts == 1
        if PARTS > 1:
            # A program leaves at most two: of the block that it begins in, and of the one that it ends in.
            begun_before = first * num_tiles // programs < top
            if not done:
                m = tl.arange(0, ROWS)[None, :]
                cell = tl.arange(0, BLOCK_N)[:, None] * ROWS + m
                place = 2 * program + ((program == first) & begun_before).to(tl.int32)
                tl.store(partials_ptr + place * (BLOCK_N * ROWS) + cell, acc, mask=m < M)
                done = arrive(counters_ptr + block, parts, PUBLISH)
                if done:
                    acc = tl.zeros_like(acc)
                    for part in tl.static_range(PARTS):
                        place = 2 * (first + part) + ((part == 0) & begun_before).to(tl.int32)
                        partial = partials_ptr + place * (BLOCK_N * ROWS) + cell
                        acc += tl.load(partial, mask=(m < M) & (part < parts), other=0.0, cache_modifier=".cg")
        if done:
            if scale_ptr is not None:
                acc *= tl.load(scale_ptr + row)[:, None]
            if x_scale_ptr is not None:
                m = tl.arange(0, ROWS)
                acc *= tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[None, :]
            store_outputs(acc, row, bias_ptr, y_ptr, block, M, N, ROWS, BLOCK_N, GATE)


def padded_rows(num_rows: int) -> int:
    """The rows that a product of `num_rows` is computed with."""
    return max(MIN_ROWS, 1 << (num_rows - 1).bit_length())


def default_config(
    num_out: int, num_in: int, num_rows: int, *, num_cores: int = 132, itemsize: int = 2
) -> SkinnyConfig:
    """A sane cut for a shape that nobody tuned. num_cores: multiprocessors of the chip. itemsize: bytes of a value.

    x is read once for every BLOCK_N rows of W, through the same cache: where it is wide, tiles have twice as many rows.
    In fp8 the same bytes hold twice as much of x, and tiles that are long in K measured faster than tall ones.
    """
    block_n = 128 if num_rows > 32 and itemsize > 1 else 64
    block_k = min((256 if block_n == 64 else 128) // itemsize, max(16, triton.next_power_of_2(num_in)))
    tiles = triton.cdiv(num_out, block_n) * triton.cdiv(num_in, block_k)
    return SkinnyConfig(
        block_n=block_n, block_k=block_k, programs=min(tiles, num_cores), num_warps=4 if block_n == 64 else 8
    )


@lru_cache(maxsize=1024)
def most_parts(tiles_k: int, blocks: int, programs: int) -> int:
    """How many programs share one block at most."""
    tiles = tiles_k * blocks

    def owner(tile: int) -> int:
        return ((tile + 1) * programs - 1) // tiles

    return max(owner(b * tiles_k + tiles_k - 1) - owner(b * tiles_k) + 1 for b in range(blocks))


def skinny(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    gate: str | None = None,
    config: SkinnyConfig | None = None,
    counters: Tensor | None = None,
    overlap: Overlap = IN_ORDER,
) -> Tensor:
    """x W^T + b: x [M, K] with M <= 128, weight [N, K], rows contiguous inside; a new [M, N] in x's dtype, summed in
    float32. scale: float32 [N], of a weight in fp8. x_scale: float32 [M], of an x in fp8 too; then out_dtype says what
    the result is in. gate: a kind of `act_and_mul`, applied to the result: [M, N / 2]. config: default
    `default_config`. counters: from `gemv.make_counters`; None: zeroed for this product."""
    assert x.stride(1) == weight.stride(1) == 1, "rows are read in order"
    num_rows, num_in = x.shape
    num_out = weight.shape[0]
    assert num_rows <= MAX_ROWS, f"{num_rows} rows; the kernel takes up to {MAX_ROWS}"
    y = torch.empty((num_rows, num_out // 2 if gate else num_out), dtype=out_dtype or x.dtype, device=x.device)
    if num_rows == 0:
        return y
    config = config or default_config(num_out, num_in, num_rows, itemsize=x.element_size())
    blocks, tiles_k = triton.cdiv(num_out, config.block_n), triton.cdiv(num_in, config.block_k)
    programs, rows = min(config.programs, blocks * tiles_k), padded_rows(num_rows)
    parts, partials = most_parts(tiles_k, blocks, programs), None
    if parts > 1:
        partials, counters = make_partials((2 * programs, config.block_n, rows), blocks, counters, x.device)
    sector = SECTOR // weight.element_size()
    overlap.launch(
        _skinny_kernel,
        (programs,),
        x,
        weight,
        scale,
        x_scale,
        bias,
        y,
        partials,
        counters,
        num_rows,
        num_out,
        x.stride(0),
        weight.stride(0),
        K=num_in,
        ROWS=rows,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        PARTS=parts,
        STAGES=config.num_stages,
        FETCHED=config.fetch if overlap.early and num_in % config.block_k == 0 else 0,
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
