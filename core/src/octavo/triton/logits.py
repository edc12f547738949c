"""What changes logits float32 [N, V] before sampling, in place and element by element. N rows, V vocabulary."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

BLOCK = 2048
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def _penalties_kernel(
    logits_ptr,
    counts_ptr,
    in_prompt_ptr,
    presence_ptr,
    frequency_ptr,
    repetition_ptr,
    stride_n,
    stride_counts,
    stride_prompt,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    presence, frequency = tl.load(presence_ptr + row), tl.load(frequency_ptr + row)
    repetition = tl.load(repetition_ptr + row)
    if (presence != 0.0) | (frequency != 0.0) | (repetition != 1.0):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = token < vocab
        count = tl.load(counts_ptr + row * stride_counts + token, mask=mask, other=0)
        in_prompt = tl.load(in_prompt_ptr + row * stride_prompt + token, mask=mask, other=0) != 0
        at = logits_ptr + row * stride_n + token
        x = tl.load(at, mask=mask, other=0.0)
        factor = tl.where(in_prompt | (count > 0), repetition, 1.0)
        x = tl.where(x > 0, x / factor, x * factor)
        x -= frequency * count.to(tl.float32)
        x -= tl.where(count > 0, presence, 0.0)
        tl.store(at, x, mask=mask)


@triton.jit
def _bitmask_kernel(
    logits_ptr, words_ptr, rows_ptr, stride_n, stride_words, vocab, PICKED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(rows_ptr + row) if PICKED else row
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab
    word = tl.load(words_ptr + row * stride_words + token // 32, mask=mask, other=-1)
    allowed = (word >> (token % 32)) & 1
    tl.store(logits_ptr + target * stride_n + token, NEG_INF, mask=mask & (allowed == 0))


@triton.jit
def _row_peak_kernel(logits_ptr, threshold_ptr, peaks_ptr, stride_n, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(threshold_ptr + row) > 0.0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * stride_n + token, mask=token < vocab, other=NEG_INF)
        # NaN counts as infinity: the sampler refuses such a row in either case.
        peak = tl.max(tl.where(x != x, float("inf"), x), axis=0)
        tl.store(peaks_ptr + row * tl.num_programs(1) + tl.program_id(1), peak)


@triton.jit
def _min_p_kernel(
    logits_ptr, threshold_ptr, peaks_ptr, stride_n, vocab, num_parts, BLOCK: tl.constexpr, BLOCK_PARTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    threshold = tl.load(threshold_ptr + row)
    if threshold > 0.0:
        part = tl.arange(0, BLOCK_PARTS)
        peaks = tl.load(peaks_ptr + row * num_parts + part, mask=part < num_parts, other=NEG_INF)
        limit = tl.max(peaks, axis=0) + tl.log(threshold)
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        at = logits_ptr + row * stride_n + token
        x = tl.load(at, mask=token < vocab, other=NEG_INF)
        tl.store(at, NEG_INF, mask=(token < vocab) & (x < limit))


def _grid(logits: Tensor) -> tuple[int, int]:
    return logits.shape[0], triton.cdiv(logits.shape[1], BLOCK)


def penalties(
    logits: Tensor, counts: Tensor, in_prompt: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """The op `penalties`, in place. Rows without a penalty are not read."""
    if logits.shape[0]:
        _penalties_kernel[_grid(logits)](
            logits,
            counts,
            in_prompt.view(torch.uint8),
            presence,
            frequency,
            repetition,
            logits.stride(0),
            counts.stride(0),
            in_prompt.stride(0),
            logits.shape[1],
            BLOCK=BLOCK,
            num_warps=4,
        )
    return logits


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> Tensor:
    """The op `apply_bitmask`, in place; only forbidden logits are written, and none is read."""
    if bitmask.shape[0]:
        _bitmask_kernel[(bitmask.shape[0], triton.cdiv(logits.shape[1], BLOCK))](
            logits,
            bitmask,
            bitmask if rows is None else rows,
            logits.stride(0),
            bitmask.stride(0),
            logits.shape[1],
            PICKED=rows is not None,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return logits


def min_p(logits: Tensor, threshold: Tensor) -> Tensor:
    """The op `min_p`, in place: the row's peak in parts, then the cut. Rows of threshold 0 are not read."""
    if logits.shape[0]:
        grid = _grid(logits)
        peaks = torch.empty(grid, dtype=torch.float32, device=logits.device)
        stride, vocab = logits.stride(0), logits.shape[1]
        _row_peak_kernel[grid](logits, threshold, peaks, stride, vocab, BLOCK=BLOCK, num_warps=4)
        _min_p_kernel[grid](
            logits,
            threshold,
            peaks,
            stride,
            vocab,
            grid[1],
            BLOCK=BLOCK,
            BLOCK_PARTS=triton.next_power_of_2(grid[1]),
            num_warps=4,
        )
    return logits
