"""Sampling ops: from logits to token ids. N rows, V vocabulary; logits are float32 [N, V], where nothing else is said.

Random choice is the Gumbel-max trick (argmax of logits / temperature + Gumbel noise is a sample of the softmax), and
the noise is a hash of (seed, position, token id). So a token depends on its own row's logits, seed and position only:
not on its batch-mates, the step's shape, preemption, or how many tokens a step verifies.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from octavo.ops.catalogue import OpDef, define

NEG_INF = float("-inf")
GOLDEN = 0x9E3779B9 - 2**32
"""2**32 / golden ratio, as int32: spreads consecutive token ids before mixing."""


def _right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int32. Not by the operator >>, which gets negative numbers wrong on some backends."""
    return torch.bitwise_right_shift(x, bits).bitwise_and_((1 << (32 - bits)) - 1)


def mix32(x: Tensor) -> Tensor:
    """The 32-bit finalizer of MurmurHash3 on int32 tensors (arithmetic wraps), in place."""
    x.bitwise_xor_(_right(x, 16)).mul_(0x85EBCA6B - 2**32)
    x.bitwise_xor_(_right(x, 13)).mul_(0xC2B2AE35 - 2**32)
    return x.bitwise_xor_(_right(x, 16))


def row_key(seeds: Tensor, positions: Tensor) -> Tensor:
    """One int32 key per row from int64 seeds [N] and the int64 positions [N] of the tokens to be sampled."""
    low, high = (seeds & 0xFFFFFFFF).to(torch.int32), torch.bitwise_right_shift(seeds, 32).to(torch.int32)
    key = mix32(mix32(low) ^ high)
    return mix32(key + positions.to(torch.int32) * GOLDEN)


def gumbel(keys: Tensor, num_tokens: int) -> Tensor:
    """Gumbel noise float32 [N, V] for int32 keys [N]: -log(-log(u)), u in (0, 1) from 23 hashed bits."""
    tokens = torch.arange(num_tokens, device=keys.device, dtype=torch.int32) * GOLDEN
    u = _right(mix32(keys[:, None] + tokens), 9).to(torch.float32)
    return u.add_(0.5).mul_(2.0**-23).log_().neg_().log_().neg_()


def sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
    """Token ids int64 [N]; -1 where a row's logits hold NaN or allow no token. logits [N, V] of any float dtype.

    temperature float32 [N]: rows below 1e-5 take the most likely token. seeds, positions int64 [N].
    rows int64 [N]: temperature and seeds are those of a table instead, at these rows.
    """
    logits = logits.float()
    if rows is not None:
        temperature, seeds = temperature[rows], seeds[rows]
    best, greedy = logits.max(dim=-1)
    random = temperature >= 1e-5
    scaled = logits / torch.where(random, temperature, 1.0)[:, None]
    drawn = (scaled + gumbel(row_key(seeds, positions), logits.shape[-1])).argmax(dim=-1)
    return torch.where(torch.isfinite(best), torch.where(random, drawn, greedy), -1)


def greedy(logits: Tensor) -> Tensor:
    """Most likely token ids int64 [N]; -1 where a row's logits hold NaN or allow no token."""
    best, token = logits.max(dim=-1)
    return torch.where(torch.isfinite(best), token, -1)


def penalties(
    logits: Tensor, counts: Tensor, in_prompt: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """Logits with penalties, in place. counts int32 [N, V]: how often each token was generated; in_prompt bool [N, V].

    presence and frequency [N] look at generated tokens only; repetition [N] at prompt and generated ones
    (divides positive logits and multiplies negative ones, Keskar et al. 2019).
    """
    seen = in_prompt | (counts > 0)
    factor = torch.where(seen, repetition[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
    logits.sub_(frequency[:, None] * counts)
    return logits.sub_(presence[:, None] * (counts > 0))


def min_p(logits: Tensor, threshold: Tensor) -> Tensor:
    """Remove tokens less likely than threshold [N] times the most likely one, in place. Logits after temperature."""
    limit = logits.amax(dim=-1) + threshold.log()
    return logits.masked_fill_(logits < limit[:, None], NEG_INF)


def topk_topp(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the top_k [N] int64 most likely tokens (0: all), then the least set whose probability reaches top_p [N].

    In place. Logits after temperature. Of equal logits at the border the lower ids stay (a stable sort), and at least
    one token always stays.
    """
    vocab = logits.shape[-1]
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=logits.device)
    k = torch.where(top_k > 0, top_k, vocab)
    ordered = ordered.masked_fill(rank >= k[:, None], NEG_INF)
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    drop = (before >= top_p[:, None]) & (top_p < 1.0)[:, None]
    drop[:, 0] = False
    ordered = ordered.masked_fill(drop, NEG_INF)
    return logits.scatter_(-1, index, ordered)


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> Tensor:
    """Forbid tokens whose bit is clear, in place. bitmask int32 [N, ceil(V / 32)], bit i of word w: token 32 w + i.

    rows int64 [M], none twice: the bitmask [M, ...] is that of these rows, the others stay as they are.
    """
    bits = torch.arange(32, device=logits.device, dtype=torch.int32)
    allowed = (torch.bitwise_right_shift(bitmask[:, :, None], bits) & 1).flatten(1)[:, : logits.shape[-1]]
    if rows is None:
        return logits.masked_fill_(allowed == 0, NEG_INF)
    logits[rows] = logits[rows].masked_fill(allowed == 0, NEG_INF)
    return logits


def logit_bias(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> Tensor:
    """Add values [M] at (rows [M], tokens [M]), in place; -inf forbids."""
    return logits.index_put_((rows, tokens), values, accumulate=True)


def bad_words(logits: Tensor, rows: Tensor, history: Tensor, prefixes: Tensor, lengths: Tensor, last: Tensor) -> Tensor:
    """Forbid the last token of a phrase whose other tokens were just generated, in place. M phrases.

    rows int64 [M]: row of each phrase; history int64 [M, P]: the last P tokens that its row generated, -1 padded;
    prefixes int64 [M, P]: the phrase without its last token, right-aligned, -1 padded; lengths int64 [M]: tokens in
    the prefix; last int64 [M].
    """
    width = prefixes.shape[1]
    ignored = torch.arange(width, device=logits.device) < (width - lengths)[:, None]
    match = ((history == prefixes) | ignored).all(dim=-1)
    value = torch.where(match, NEG_INF, 0.0)
    return logits.index_put_((rows, last), value, accumulate=True)


def topk_logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids int64 [N, 1 + k], values float32 [N, 1 + k], ranks int64 [N]): the given tokens [N], then the k likeliest.

    Values are log-softmax of the logits. rank 1 is the most likely token.
    """
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(-1, tokens.clamp_min(0)[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    top, ids = logprobs.topk(k, dim=-1) if k else (logprobs[:, :0], tokens.new_empty((len(tokens), 0)))
    return torch.cat((tokens[:, None], ids), dim=1), torch.cat((own, top), dim=1), ranks


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _logits(n: int, v: int, dtype: str) -> Tensor:
    return torch.randn(n, v, generator=_generator()) * 4


def _sample_inputs(dtype: str) -> Iterable[tuple[Tensor, ...]]:
    for n, v in ((1, 33), (5, 1000), (0, 50)):
        rows = torch.arange(n)
        yield _logits(n, v, dtype), torch.linspace(0, 2, n), rows * 7919 - 3, rows + 11
        yield _logits(n, v, dtype), torch.linspace(0, 2, 8), torch.arange(8) * 7919 - 3, rows + 11, 7 - rows


def _greedy_inputs(dtype: str) -> Iterable[tuple[Tensor, ...]]:
    for n, v in ((1, 33), (5, 1000), (0, 50)):
        yield (_logits(n, v, dtype),)


def _penalty_inputs(dtype: str) -> Iterable[tuple[Tensor, ...]]:
    for n, v in ((1, 33), (4, 500)):
        counts = torch.randint(0, 3, (n, v), generator=_generator(), dtype=torch.int32)
        prompt = torch.rand(n, v, generator=_generator()) < 0.2
        yield (
            _logits(n, v, dtype),
            counts,
            prompt,
            torch.full((n,), 0.5),
            torch.full((n,), -0.3),
            torch.full((n,), 1.3),
        )


def _min_p_inputs(dtype: str) -> Iterable[tuple[Tensor, ...]]:
    for n, v in ((1, 33), (4, 500)):
        yield _logits(n, v, dtype), torch.linspace(0.0, 0.5, n)


def _topk_topp_inputs(dtype: str) -> Iterable[tuple[Tensor, ...]]:
    for n, v in ((1, 33), (4, 500)):
        yield _logits(n, v, dtype), torch.arange(n) * 5, torch.linspace(0.3, 1.0, n)


def _bitmask_inputs(dtype: str) -> Iterable[tuple[Tensor, ...]]:
    for n, v in ((1, 33), (4, 500)):
        words = torch.randint(-(2**31), 2**31 - 1, (n, (v + 31) // 32), generator=_generator(), dtype=torch.int32)
        yield _logits(n, v, dtype), words
        yield _logits(n + 3, v, dtype), words, torch.arange(n + 3).flip(0)[:n]


def _bias_inputs(dtype: str) -> Iterable[tuple[Tensor, ...]]:
    yield (
        _logits(3, 40, dtype),
        torch.tensor([0, 2, 2]),
        torch.tensor([1, 5, 39]),
        torch.tensor([2.0, -100.0, NEG_INF]),
    )


def _bad_words_inputs(dtype: str) -> Iterable[tuple[Tensor, ...]]:
    history = torch.tensor([[-1, 3, 4], [7, 8, 9], [7, 8, 9], [-1, 3, 4]])
    prefixes = torch.tensor([[-1, -1, 4], [-1, 8, 9], [1, 8, 9], [-1, -1, -1]])
    rows, lengths, last = torch.tensor([0, 1, 1, 0]), torch.tensor([1, 2, 3, 0]), torch.tensor([5, 6, 7, 8])
    yield _logits(2, 40, dtype), rows, history, prefixes, lengths, last


def _logprob_inputs(dtype: str) -> Iterable[tuple[object, ...]]:
    for n, v, k in ((1, 33, 0), (4, 500, 5), (2, 7, 7)):
        yield _logits(n, v, dtype), torch.arange(n), k


EXACT = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}
CLOSE = {"float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5}

define(OpDef(name="sample", reference=sample, samples=_sample_inputs, tolerance=EXACT))
define(OpDef(name="greedy", reference=greedy, samples=_greedy_inputs, tolerance=EXACT))
define(OpDef(name="penalties", reference=penalties, samples=_penalty_inputs, tolerance=CLOSE))
define(OpDef(name="min_p", reference=min_p, samples=_min_p_inputs, tolerance=CLOSE))
define(OpDef(name="topk_topp", reference=topk_topp, samples=_topk_topp_inputs, tolerance=CLOSE))
define(OpDef(name="apply_bitmask", reference=apply_bitmask, samples=_bitmask_inputs, tolerance=EXACT))
define(OpDef(name="logit_bias", reference=logit_bias, samples=_bias_inputs, tolerance=CLOSE))
define(OpDef(name="bad_words", reference=bad_words, samples=_bad_words_inputs, tolerance=EXACT))
define(OpDef(name="topk_logprobs", reference=topk_logprobs, samples=_logprob_inputs, tolerance=CLOSE))
