"""Top-k and top-p without a sort: a search for the threshold over the ordered bits of the logits. One program a row.

Let count(t) and mass(t) be the number and the probability mass of tokens whose key (ordered bits) is at least t: both
fall as t grows. Top-k keeps keys above the largest t with count(t) >= k; top-p those above the largest t with
mass(t) >= p * mass of the top k. Of the tokens that share the last key only as many stay as are still needed, lower
ids first, like after a stable sort.

    keys   lo ---- pivot 0 ---- pivot 1 ---- pivot 2 ---- hi     each scan of the row quarters the bracket
           enough                                        not enough

The search ends when the bracket holds one token or one key: about 10 scans of a row that stays in the L2 cache.
Masses are float32 sums, so that a token whose cumulative probability equals top_p to six digits may fall either way.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.triton.sampling import ordered_bits

Tensor = torch.Tensor

BLOCK = 4096
NEG_INF = tl.constexpr(float("-inf"))
KEY_NEG_INF = tl.constexpr(-0x7F800001)
"""ordered_bits(-inf), the lowest key of all."""


@triton.jit
def _bits_to_float(bits):
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _weigh(row_ptr, vocab, peak, first, second, third, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """For three pivots: (counts, weights) of the tokens with keys of at least each; the weight is mass or count."""
    lane = tl.arange(0, BLOCK)
    count0, count1, count2 = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    mass0, mass1, mass2 = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + lane
        x = tl.load(row_ptr + token, mask=token < vocab, other=NEG_INF)
        key = ordered_bits(x)  # beyond the vocabulary: the lowest key, which no pivot reaches
        in0, in1, in2 = key >= first, key >= second, key >= third
        count0 += in0.to(tl.int32)
        count1 += in1.to(tl.int32)
        count2 += in2.to(tl.int32)
        if MASS:
            mass = tl.exp(x - peak)
            mass0 += tl.where(in0, mass, 0.0)
            mass1 += tl.where(in1, mass, 0.0)
            mass2 += tl.where(in2, mass, 0.0)
    n0, n1, n2 = tl.sum(count0, axis=0), tl.sum(count1, axis=0), tl.sum(count2, axis=0)
    if MASS:
        return n0, n1, n2, tl.sum(mass0, axis=0), tl.sum(mass1, axis=0), tl.sum(mass2, axis=0)
    else:
        return n0, n1, n2, n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32)


@triton.jit
def _search(row_ptr, vocab, peak, lo, hi, num_lo, need, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """(threshold, weight above it): keys above stay, and of those equal to it what `need` still lacks.

    Weight(lo) reaches `need`, weight(hi) does not. num_lo: tokens with keys of at least lo.
    """
    num_hi = 0
    weight_hi = 0.0
    while (lo + 1 < hi) & (num_lo - num_hi > 1):
        # A bracket can be wider than int32.
        step = tl.maximum((hi.to(tl.int64) - lo) // 4, 1).to(tl.int32)
        first = lo + step
        second = tl.minimum(first + step, hi)
        third = tl.minimum(second + step, hi)
        n0, n1, n2, w0, w1, w2 = _weigh(row_ptr, vocab, peak, first, second, third, MASS, BLOCK)
        if w2 >= need:
            lo, num_lo = third, n2
        elif w1 >= need:
            lo, num_lo, hi, num_hi, weight_hi = second, n1, third, n2, w2
        elif w0 >= need:
            lo, num_lo, hi, num_hi, weight_hi = first, n0, second, n1, w1
        else:
            hi, num_hi, weight_hi = first, n0, w0
    if num_lo - num_hi == 1:
        # One token is left in [lo, hi), and it is needed: all keys from lo on stay.
        lo, weight_hi = lo - 1, need
    return lo, weight_hi


@triton.jit
def _cut(row_ptr, vocab, threshold, num_ties, BLOCK: tl.constexpr):
    """Keep keys above the threshold and the first num_ties equal to it."""
    lane = tl.arange(0, BLOCK)
    seen = 0
    for start in range(0, vocab, BLOCK):
        token = start + lane
        mask = token < vocab
        key = ordered_bits(tl.load(row_ptr + token, mask=mask, other=NEG_INF))
        drop = key <= threshold
        if num_ties > 0:
            tie = (mask & (key == threshold)).to(tl.int32)
            rank = seen + tl.cumsum(tie, axis=0) - tie
            drop = drop & ((tie == 0) | (rank >= num_ties))
            seen += tl.sum(tie, axis=0)
        tl.store(row_ptr + token, NEG_INF, mask=mask & drop)


@triton.jit
def _highest_key(row_ptr, vocab, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], KEY_NEG_INF, tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + lane
        highest = tl.maximum(highest, ordered_bits(tl.load(row_ptr + token, mask=token < vocab, other=NEG_INF)))
    return tl.max(highest, axis=0)


@triton.jit
def _topk_topp_kernel(logits_ptr, top_k_ptr, top_p_ptr, stride_n, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride_n
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    use_k, use_p = (top_k > 0) & (top_k < vocab), top_p < 1.0
    if use_k | use_p:
        top = _highest_key(row_ptr, vocab, BLOCK)
        peak = _bits_to_float(top)
        lowest = tl.zeros_like(top) + KEY_NEG_INF
        if use_k:
            need = top_k.to(tl.float32)
            threshold, above = _search(row_ptr, vocab, peak, lowest, top + 1, vocab, need, False, BLOCK)
            _cut(row_ptr, vocab, threshold, (need - above).to(tl.int32), BLOCK)
            tl.debug_barrier()  # other threads read what this one removed
        # The mass of an infinite peak is no number: such a row is left to the sampler, which refuses it.
        if use_p & (tl.abs(peak) < float("inf")):
            lowest += 1
            num_left, _n1, _n2, total, _w1, _w2 = _weigh(row_ptr, vocab, peak, lowest, top, top, True, BLOCK)
            need = tl.maximum(total * top_p, 1e-20)
            threshold, above = _search(row_ptr, vocab, peak, lowest, top + 1, num_left, need, True, BLOCK)
            if above >= need:
                num_ties = 0
            else:
                num_ties = tl.ceil((need - above) / tl.exp(_bits_to_float(threshold) - peak)).to(tl.int32)
            _cut(row_ptr, vocab, threshold, num_ties, BLOCK)


def topk_topp(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The op `topk_topp`, in place: top_k int64 [N] (0: all), then top_p float32 [N] of what is left (1: all).

    Rows that ask for neither are not read. Of equal logits at the border the lower ids stay; one token always does.
    """
    if logits.shape[0]:
        _topk_topp_kernel[(logits.shape[0],)](
            logits, top_k, top_p, logits.stride(0), logits.shape[1], BLOCK=BLOCK, num_warps=16
        )
    return logits
