"""Products with 4-bit weights, W[n, k] = code[n, k] * scale[n, k // 32] + offset[n, k // 32], decoded in registers.

    a row of W, tile by tile of 256 columns; a tile is 32 words of 32 bits, nibble by nibble a group:

    word     0   1  ..  31
    nibble 0 k0  k1 .. k31     group 0: one scale, one offset, 32 columns of x side by side
    nibble 1 k32 k33 .. k63    group 1
      ..
    nibble 7                   group 7

so a load of 16 bytes holds 32 weights, and a nibble of all words makes a product of depth 32 with one scale a row.
As in `octavo.triton.gemv` a program owns BLOCK_N rows of W and one of SPLIT_K slices of K, without float atomics.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.triton.gemv import INTERPRETED, MIN_BLOCK_N, load_x
from octavo.triton.outputs import make_partials, meet, store_outputs, tile_rows
from octavo.triton.overlap import IN_ORDER, SECTOR, Overlap

Tensor = torch.Tensor

GROUP = 32
NIBBLES = 8
TILE = GROUP * NIBBLES
"""Columns of a tile: rows of another length are padded with zeros."""

MAX_ROWS = 256
"""From here on the weight had better be unpacked: every 64 rows of x decode it again."""


@dataclass(frozen=True, kw_only=True)
class Int4Config:
    """How one shape is cut. dot: on the matrix unit (the only way for M > 1), else one multiply-add a weight.
    fetch: tiles that are asked for before the kernel before has ended, see `Overlap`."""

    block_n: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4
    dot: bool = True
    fetch: int = 2

    def __post_init__(self) -> None:
        assert self.block_n >= MIN_BLOCK_N, f"block_n {self.block_n} is less than {MIN_BLOCK_N}"


@dataclass(frozen=True, kw_only=True)
class Int4Weight:
    """A weight [N, K] as the kernels read it.

    words: int32 [N, tiles * 32], see the drawing. groups: int32 [tiles * 8, N]: float16 scale in the low half, float16
    offset in the high one; rows of a group side by side, as the programs read them. num_in: K.
    """

    words: Tensor
    groups: Tensor
    num_in: int


def pack(codes: Tensor, scale: Tensor, offset: Tensor) -> Int4Weight:
    """codes uint8 [N, K] in 0..15, K a multiple of 32; scale, offset [N, K / 32], kept in float16."""
    num_out, num_in = codes.shape
    assert num_in % GROUP == 0, f"{num_in} columns are not whole groups of {GROUP}"
    tiles = triton.cdiv(num_in, TILE)
    padded = torch.zeros((num_out, tiles, NIBBLES, GROUP), dtype=torch.uint8, device=codes.device)
    padded.view(num_out, -1)[:, :num_in] = codes
    # Two nibbles make a byte, and four bytes a word, the first of them lowest.
    octets = (padded[:, :, 0::2] | padded[:, :, 1::2] << 4).transpose(2, 3).contiguous()
    pairs = torch.zeros((tiles * NIBBLES, num_out, 2), dtype=torch.float16, device=codes.device)
    pairs[: num_in // GROUP, :, 0], pairs[: num_in // GROUP, :, 1] = scale.t(), offset.t()
    return Int4Weight(
        words=octets.view(torch.int32).view(num_out, tiles * GROUP),
        groups=pairs.view(torch.int32).view(tiles * NIBBLES, num_out),
        num_in=num_in,
    )


@triton.jit
def _decode(words, pairs, NIBBLE: tl.constexpr):
    """float32 [BLOCK_N, 32] of one nibble of the words [BLOCK_N, 32] and its group's pairs [BLOCK_N].

    The code goes into the mantissa of 1.0, where it reads 1 + code / 16: no conversion, and no number is large.
    """
    if NIBBLE < 5:
        bits = words << (19 - 4 * NIBBLE)
    else:
        bits = words >> (4 * NIBBLE - 19)
    unit = ((bits & 0x780000) | 0x3F800000).to(tl.float32, bitcast=True)
    scale = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16.0
    offset = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) - scale
    return unit * scale[:, None] + offset[:, None]


@triton.jit(do_not_specialize=["M"])
def _int4_kernel(
    x_ptr,
    words_ptr,
    groups_ptr,
    bias_ptr,
    y_ptr,
    partials_ptr,
    counters_ptr,
    M,
    N,
    num_y,
    stride_x,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
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
    GROUP: tl.constexpr = 32
    NIBBLES: tl.constexpr = 8
    TILE: tl.constexpr = GROUP * NIBBLES
    NUM_TILES: tl.constexpr = (K + TILE - 1) // TILE
    TILES: tl.constexpr = (NUM_TILES + SPLIT_K - 1) // SPLIT_K
    EXACT: tl.constexpr = K % TILE == 0
    dtype: tl.constexpr = tl.float32 if UPCAST else x_ptr.dtype.element_ty
    block, part, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * ROWS
    row = tile_rows(block, N, BLOCK_N, GATE)
    words_ptr += row[:, None] * (NUM_TILES * GROUP)
    begin, end = part * TILES, tl.minimum(part * TILES + TILES, NUM_TILES)

    for ahead in tl.static_range(FETCHED):
        sector = tl.minimum(begin + ahead, NUM_TILES - 1) * GROUP + tl.arange(0, GROUP // SECTOR) * SECTOR
        FETCH(words_ptr + sector[None, :])
    START()

    x_ptr += first.to(tl.int64) * stride_x
    column = tl.arange(0, GROUP)
    acc = tl.zeros([BLOCK_N, ROWS if DOT else GROUP], dtype=tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES):
        words = tl.load(words_ptr + (tile * GROUP + column)[None, :], eviction_policy="evict_first")
        for nibble in tl.static_range(NIBBLES):
            pairs = tl.load(groups_ptr + (tile * NIBBLES + nibble) * N + row)
            x = load_x(x_ptr, stride_x, tile * TILE + nibble * GROUP + column, M - first, K, ROWS, EXACT, dtype)
            w = _decode(words, pairs, nibble)
            if DOT:
                acc = tl.dot(w.to(dtype), x, acc=acc, input_precision="ieee")
            else:
                acc += w * x

    total = acc if DOT else tl.sum(acc, axis=1)[:, None]
    last = True
    if SPLIT_K > 1:
        total, last = meet(total, partials_ptr, counters_ptr, block, part, M, ROWS, BLOCK_N, SPLIT_K, PUBLISH)
    if last:
        y_ptr += first.to(tl.int64) * num_y
        store_outputs(total, row, bias_ptr, y_ptr, block, M - first, N, ROWS, BLOCK_N, GATE)


@triton.jit
def _unpack_kernel(words_ptr, groups_ptr, out_ptr, N, K: tl.constexpr, BLOCK_N: tl.constexpr):
    GROUP: tl.constexpr = 32
    NIBBLES: tl.constexpr = 8
    TILE: tl.constexpr = GROUP * NIBBLES
    tile = tl.program_id(1)
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    column = tl.arange(0, GROUP)
    at = words_ptr + row[:, None] * (tl.num_programs(1) * GROUP) + (tile * GROUP + column)[None, :]
    words = tl.load(at, mask=(row < N)[:, None], other=0)
    for nibble in tl.static_range(NIBBLES):
        pairs = tl.load(groups_ptr + (tile * NIBBLES + nibble) * N + row, mask=row < N, other=0)
        k = tile * TILE + nibble * GROUP + column
        values = _decode(words, pairs, nibble).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None] * K + k[None, :], values, mask=(row < N)[:, None] & (k < K)[None, :])


def default_config(num_out: int, num_in: int, num_rows: int, *, num_cores: int = 132) -> Int4Config:
    """A sane cut for a shape that nobody tuned. num_cores: multiprocessors of the chip.

    One row: no matrix unit, narrow programs, so that every core holds several. Several: tiles of 64 or 128 rows, split
    until there are about two programs a core.
    """
    if num_rows == 1:
        block_n = 16 if num_out >= 4 * 16 * num_cores else 8
        return Int4Config(block_n=block_n, num_warps=block_n // 4, dot=False)
    block_n = 64 if num_rows <= 16 else 128
    most = min(8, 2 * num_cores * block_n // num_out, triton.cdiv(num_in, 2 * TILE)) if num_rows <= 64 else 1
    return Int4Config(block_n=block_n, split_k=1 << (max(most, 1).bit_length() - 1), num_warps=block_n // 16)


def product(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None = None,
    *,
    gate: str | None = None,
    config: Int4Config | None = None,
    counters: Tensor | None = None,
    overlap: Overlap = IN_ORDER,
) -> Tensor:
    """x W^T + b: x [M, K] with M <= 256, rows contiguous inside; a new [M, N] in x's dtype, summed in float32.

    gate: a kind of `act_and_mul`, applied to the result: [M, N / 2]. config: default `default_config`; a split of K is
    for M <= 64. counters: from `gemv.make_counters`; None: zeroed for this product. With several rows W is rounded to
    x's dtype first, as an unpacked weight is.
    """
    assert x.stride(1) == 1, "rows are read in order"
    (num_rows, num_in), num_out = x.shape, weight.words.shape[0]
    assert num_in == weight.num_in, f"{num_in} features; the weight takes {weight.num_in}"
    assert num_rows <= MAX_ROWS, f"{num_rows} rows; the kernel takes up to {MAX_ROWS}"
    num_y = num_out // 2 if gate else num_out
    y = torch.empty((num_rows, num_y), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    config = config or default_config(num_out, num_in, num_rows)
    dot = config.dot or num_rows > 1
    rows = min(64, max(16, triton.next_power_of_2(num_rows))) if dot else 1
    num_blocks, partials = triton.cdiv(num_out, config.block_n), None
    if config.split_k > 1:
        assert num_rows <= rows, f"{num_rows} rows in pieces of {rows} do not meet across slices of K"
        shape = (config.split_k, num_blocks * config.block_n, num_rows)
        partials, counters = make_partials(shape, num_blocks, counters, x.device)
    overlap.launch(
        _int4_kernel,
        (num_blocks, config.split_k, triton.cdiv(num_rows, rows)),
        x,
        weight.words,
        weight.groups,
        bias,
        y,
        partials,
        counters,
        num_rows,
        num_out,
        num_y,
        x.stride(0),
        K=num_in,
        ROWS=rows,
        BLOCK_N=config.block_n,
        SPLIT_K=config.split_k,
        STAGES=config.num_stages,
        DOT=dot,
        FETCHED=config.fetch if overlap.early else 0,
        SECTOR=SECTOR // 4,
        GATE=gate,
        UPCAST=INTERPRETED,
        START=overlap.start,
        FETCH=overlap.fetch,
        PUBLISH=overlap.publish,
        num_warps=config.num_warps,
        **overlap.options,
    )
    return y


def unpack(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """The plain weight, a new [N, K] in `dtype`."""
    num_out = weight.words.shape[0]
    out = torch.empty((num_out, weight.num_in), dtype=dtype, device=weight.words.device)
    _unpack_kernel[(triton.cdiv(num_out, 32), weight.words.shape[1] // GROUP)](
        weight.words, weight.groups, out, num_out, K=weight.num_in, BLOCK_N=32
    )
    return out
