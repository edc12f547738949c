"""From logits [N, V] of any float dtype to token ids: one pass over the vocabulary, cut so that few rows fill the chip.

A program scans one chunk of one row for its best candidate; where a row has several chunks, a second tiny kernel
compares their winners. A candidate is one int64, so that comparing is a maximum and ties go to the lower id:

    | the value's ordered bits: 32 | 2^31 - 1 - token id: 32 |

The random choice is that of `octavo.ops.sampling`: the same hash, bit for bit, of (seed, position, token id).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.triton.overlap import IN_ORDER, Overlap

Tensor = torch.Tensor

GOLDEN = tl.constexpr(0x9E3779B9)
BLOCK = 2048
PROGRAMS = 1024
"""Programs that a launch aims at: several for each core of a large chip."""


@triton.jit
def ordered_bits(x):
    """float32 to int32 such that a < b as numbers iff as integers; -0 is 0, NaN above everything."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, 0x7FC00000, bits)


@triton.jit
def _mix32(x):
    """The 32-bit finalizer of MurmurHash3 on uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _row_key(seed, position):
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    return _mix32(_mix32(_mix32(low) ^ high) + position.to(tl.uint32) * GOLDEN)


@triton.jit
def _gumbel(key, token):
    u = (_mix32(key + token.to(tl.uint32) * GOLDEN) >> 9).to(tl.float32)
    return -tl.log(-tl.log((u + 0.5) * 1.1920928955078125e-07))


@triton.jit
def _disturb(logit, random, inverse, key, token):
    """The logits over the temperature plus noise, where the row is random; hashing is left out where it is not."""
    if random:
        logit = logit * inverse + _gumbel(key, token)
    return logit


@triton.jit
def _store_choice(candidates, peaks, out_ptr):
    """The token of the best candidate; -1 where the row's largest logit is not a number that can win."""
    token = 0x7FFFFFFF - (tl.max(candidates, axis=0) & 0xFFFFFFFF)
    peak = tl.max(peaks, axis=0)
    tl.store(out_ptr, tl.where(tl.abs(peak) < float("inf"), token, -1))


@triton.jit
def _scan_kernel(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    rows_ptr,
    candidates_ptr,
    peaks_ptr,
    out_ptr,
    stride_n,
    vocab,
    chunk,
    RANDOM: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK: tl.constexpr,
    START: tl.constexpr,
):
    START()
    row, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.zeros([BLOCK], tl.int32) + vocab
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    if RANDOM:
        source = row
        if rows_ptr is not None:
            source = tl.load(rows_ptr + row)
        temperature = tl.load(temperature_ptr + source)
        random = temperature >= 1e-5
        inverse = 1.0 / tl.where(random, temperature, 1.0)
        key = _row_key(tl.load(seeds_ptr + source), tl.load(positions_ptr + row))
    for start in range(part * chunk, tl.minimum(part * chunk + chunk, vocab), BLOCK):
        token = start + lane
        logit = tl.load(logits_ptr + row.to(tl.int64) * stride_n + token, mask=token < vocab, other=float("-inf")).to(
            tl.float32
        )
        value = logit
        if RANDOM:
            value = _disturb(logit, random, inverse, key, token)
        better = value > best
        best, best_token = tl.where(better, value, best), tl.where(better, token, best_token)
        peak = tl.maximum(peak, tl.where(logit != logit, float("inf"), logit))
    candidate = (ordered_bits(best).to(tl.int64) << 32) | (0x7FFFFFFF - best_token).to(tl.int64)
    if SINGLE:
        _store_choice(candidate, peak, out_ptr + row)
    else:
        at = row * tl.num_programs(1) + part
        tl.store(candidates_ptr + at, tl.max(candidate, axis=0))
        tl.store(peaks_ptr + at, tl.max(peak, axis=0))


@triton.jit(do_not_specialize=["num_parts"])
def _choose_kernel(candidates_ptr, peaks_ptr, out_ptr, num_parts, BLOCK: tl.constexpr, START: tl.constexpr):
    START()
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    mask = part < num_parts
    candidates = tl.load(candidates_ptr + row * num_parts + part, mask=mask, other=-(2**63))
    peaks = tl.load(peaks_ptr + row * num_parts + part, mask=mask, other=float("-inf"))
    _store_choice(candidates, peaks, out_ptr + row)


def _scan(
    logits: Tensor,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    rows: Tensor | None = None,
    *,
    overlap: Overlap,
) -> Tensor:
    num_rows, vocab = logits.shape
    out = torch.empty((num_rows,), dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    num_blocks = triton.cdiv(vocab, BLOCK)
    blocks_a_part = triton.cdiv(num_blocks, min(num_blocks, max(1, PROGRAMS // num_rows)))
    num_parts = triton.cdiv(num_blocks, blocks_a_part)
    candidates = peaks = None
    if num_parts > 1:
        candidates = torch.empty((num_rows, num_parts), dtype=torch.int64, device=logits.device)
        peaks = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    overlap.launch(
        _scan_kernel,
        (num_rows, num_parts),
        logits,
        temperature,
        seeds,
        positions,
        rows,
        candidates,
        peaks,
        out,
        logits.stride(0),
        vocab,
        blocks_a_part * BLOCK,
        RANDOM=temperature is not None,
        SINGLE=num_parts == 1,
        BLOCK=BLOCK,
        START=overlap.start,
        num_warps=8,
        **overlap.options,
    )
    if num_parts > 1:
        block = triton.next_power_of_2(num_blocks)  # of the vocabulary alone, so that it is compiled once
        overlap.launch(
            _choose_kernel,
            (num_rows,),
            candidates,
            peaks,
            out,
            num_parts,
            BLOCK=block,
            START=overlap.start,
            num_warps=1,
            **overlap.options,
        )
    return out


def greedy(logits: Tensor, *, overlap: Overlap = IN_ORDER) -> Tensor:
    """The op `greedy`: most likely token ids int64 [N], the lowest of equals; -1 where a row's logits hold NaN or
    allow no token."""
    return _scan(logits, overlap=overlap)


def sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    rows: Tensor | None = None,
    *,
    overlap: Overlap = IN_ORDER,
) -> Tensor:
    """The op `sample`: token ids int64 [N] by Gumbel-max; temperature float32 [N], seeds and positions int64 [N].
    With rows int64 [N], temperature and seeds are a table's.

    The hash equals the reference's bits; its logarithms and the division by the temperature may differ in the last
    place, which changes a token only where two candidates are that close.
    """
    return _scan(logits, temperature, seeds, positions, rows, overlap=overlap)
