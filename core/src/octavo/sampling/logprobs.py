"""Which logprobs a step's rows get: of which tokens, and of which logits.

columns of a row:   the chosen token | its k likeliest ones | the ids that it named
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.sampling.params import SamplingParams

Upload = Callable[[NDArray[Any]], Tensor]

USUAL_TOP, USUAL_NAMED = 20, 16
"""Where each number is a shape to compile, likeliest and named tokens are looked at in multiples of these."""
Columns = slice | list[int]


@dataclass(frozen=True, kw_only=True)
class FoundLogprobs:
    """places int [m]: which of the step's sampled rows. ids int64 [m, W], values float32 [m, W], ranks int64 [m] as
    `topk_logprobs` gives them, or more rows, that nobody reads; a row's own part of the columns is `columns[i]`."""

    places: NDArray[np.int64]
    columns: Sequence[Columns]
    ids: Tensor
    values: Tensor
    ranks: Tensor

    def moved(self, move: Callable[[Tensor], Tensor]) -> FoundLogprobs:
        """The same, its tensors moved."""
        return replace(self, ids=move(self.ids), values=move(self.values), ranks=move(self.ranks))


class LogprobRows:
    """What the rows of the request table asked for. top int [R]: how many of the likeliest tokens; -1: no logprobs.

    static: look for numbers of tokens that do not depend on what is asked for, as far as they can.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, topk_logprobs: Callable[..., Any], *, static: bool = False
    ) -> None:
        self._static = static
        self.vocab_size = vocab_size
        self._topk_logprobs = topk_logprobs
        self.top = np.full(num_rows, -1, np.int64)
        self._processed = np.zeros(num_rows, np.bool_)
        self._logits = np.zeros(num_rows, np.bool_)
        self._named: dict[int, tuple[int, ...]] = {}

    def admit(self, row: int, params: SamplingParams) -> bool:
        """Note what a new row wants. Returns whether it wants logprobs at all."""
        top, mode = params.logprobs, params.logprobs_mode or "raw_logprobs"
        self.top[row] = -1 if top is None else self.vocab_size if top == -1 else min(top, self.vocab_size)
        self._processed[row] = mode.startswith("processed")
        self._logits[row] = mode.endswith("logits")
        self._named.pop(row, None)
        if params.logprob_token_ids:
            self._named[row] = params.logprob_token_ids
        return top is not None

    def release(self, row: int) -> None:
        self.top[row] = -1
        self._named.pop(row, None)

    def wanting(self, rows: NDArray[np.int32]) -> NDArray[np.int64]:
        """Places in `rows` of those that want logprobs."""
        return np.flatnonzero(self.top[rows] >= 0)

    def processed(self, rows: NDArray[np.int32]) -> NDArray[np.int64]:
        """Places in `rows` of those that want logprobs of what is sampled from."""
        return np.flatnonzero((self.top[rows] >= 0) & self._processed[rows])

    def find(
        self,
        logits: Tensor,
        tokens: Tensor,
        rows: NDArray[np.int32],
        places: NDArray[np.int64],
        upload: Upload,
    ) -> FoundLogprobs:
        """The logprobs of rows [m] at `places` of the step, from logits float32 [m, V] and chosen tokens int64 [m].

        Logits, tokens and rows may go on behind those of the places.
        """
        top = self.top[rows]
        width = self._wide(int(top.max()), USUAL_TOP)
        ids, values, ranks = self._topk_logprobs(logits, tokens, width)
        named = [self._named.get(row, ()) for row in rows.tolist()] if self._named else []
        columns: list[Columns] = [slice(0, 1 + int(k)) for k in top]
        if any(named) or self._static:
            padded = np.zeros((len(rows), self._wide(max(map(len, named), default=0), USUAL_NAMED)), np.int64)
            for i, wanted in enumerate(named):
                padded[i, : len(wanted)] = wanted
                columns[i] = [*range(1 + int(top[i])), *range(1 + width, 1 + width + len(wanted))]
            asked = upload(padded)
            ids = torch.cat((ids, asked), dim=1)
            values = torch.cat((values, logits.gather(-1, asked) - logits.logsumexp(dim=-1, keepdim=True)), dim=1)
        if self._logits[rows].any():
            values = torch.where(upload(self._logits[rows])[:, None], logits.gather(-1, ids.clamp_min(0)), values)
        return FoundLogprobs(places=places, columns=columns[: len(places)], ids=ids, values=values, ranks=ranks)

    def _wide(self, width: int, usual: int) -> int:
        """How many tokens are looked at for the `width` that are wanted."""
        return min(-(-max(width, 1) // usual) * usual, self.vocab_size) if self._static else width
