"""One step of work and its result: what the scheduler tells a worker, and what comes back.

Everything is numpy or plain data, so that it crosses a process boundary and so that a platform which brings its
own executor (`make_executor`) needs nothing else. S = sequences in the step, G = KV groups.

A *row* is a sequence's place in the request table: stable from `Admit` until it appears in `Batch.released`.
Workers keep the row's tokens, parameters and block table; a step carries only what changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from octavo.sampling.params import SamplingParams

Ints = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Admit:
    """A sequence takes `row`. `token_ids` int32: all tokens known so far (prompt, and output if it was preempted).

    num_prompt_tokens: how many of them are the prompt (penalties and positions of sampling need it).
    stop_ids: tokens that would end the sequence; they may not be sampled before params.min_tokens.
    limit: number of tokens, prompt and answer, at which it ends; None: the longest that the executor takes.
    seed: the resolved seed; sampled tokens are a function of (seed, position) and logits alone.
    """

    row: int
    token_ids: Ints
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    lora: int = 0
    stop_ids: tuple[int, ...] = ()
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class BlockUpdate:
    """Entries newly written into one group's block table: table[rows[i], indices[i]] = blocks[i]."""

    rows: Ints
    indices: Ints
    blocks: Ints


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step. Sequence i computes positions starts[i] .. starts[i] + counts[i] - 1 of row rows[i].

    Sequences are ordered: decodes first (counts 1, then 1 + drafts), then prefills.
    samples: bool [S]; a token is sampled from the last position (False for an unfinished prefill), and with drafts from
        each position before that from the last known token on.
    drafts: int32 [S, k] draft tokens behind the last known token, -1 padded; None if nobody has any. They are the last
        of a sequence's counts[i] tokens. What is computed for those that turn out wrong is computed again later.
    masked: some of its sequences may not sample every token: a `MaskingExecutor` samples once it has the `Masks`.
    released: rows whose sequences ended before this step; their state may be dropped.
    """

    step: int
    rows: Ints
    starts: Ints
    counts: Ints
    samples: NDArray[np.bool_]
    admits: Sequence[Admit] = ()
    blocks: Sequence[BlockUpdate] = ()
    released: Sequence[int] = ()
    drafts: Ints | None = None
    masked: bool = False

    @property
    def num_seqs(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())


@dataclass(frozen=True, kw_only=True)
class Masks:
    """Which tokens a step that was launched may sample.

    places int32 [M], ascending: of the batch's sequences that sample, counted among themselves; the others are free.
    With drafts, of the positions that are sampled from: those of one sequence count one after another.
    words int32 [M, ceil(vocab / 32)]: bit i of word w set = token 32 w + i allowed.
    """

    step: int
    places: Ints
    words: Ints


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Logprobs of n positions of one row, starting at position `start` of its tokens.

    ids int32 [n, 1 + k]: the actual token, then the k most likely; values float32 [n, 1 + k];
    ranks int32 [n]: rank of the actual token, 1 = most likely.
    """

    row: int
    start: int
    ids: Ints
    values: NDArray[np.float32]
    ranks: Ints


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Sampled tokens of the sequences of a batch that had `samples` set, in batch order.

    rows int32 [n]; tokens int32 [n, w] with w >= 1, -1 padded; counts int32 [n]: tokens valid in each row (1..w).
        Behind drafts those that agree with them and the first one that does not, or the one behind the last.
    logprobs: for rows that asked; `start` is the position of the first sampled token.
    prompt_logprobs: for rows that asked, the part that this step computed.
    errors: row -> message, for rows that failed alone (for example non-finite logits).
    """

    step: int
    rows: Ints
    tokens: Ints
    counts: Ints
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    errors: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class KVGroup:
    """One block table, as the scheduler needs to know it. `num_blocks` includes the null block 0."""

    block_size: int
    num_blocks: int
    window: int | None = None
