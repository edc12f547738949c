"""Logprobs of prompt tokens: for requests that ask, chunk by chunk, in memory bounded by a slice of the chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.plugin.step import Admit, Batch

SLICE = 128
"""Most positions whose logits [SLICE, vocabulary] exist at once."""


class PromptScorer:
    """Scores prompt tokens of the rows that asked for `prompt_logprobs`. tokens: the request table int32 [R, L]."""

    def __init__(self, model: Any, topk_logprobs: Callable[..., Any], tokens: Tensor) -> None:
        self.model = model
        self.topk_logprobs = topk_logprobs
        self.tokens = tokens
        self.wanted: dict[int, tuple[int, int, bool]] = {}  # row -> (top logprobs, prompt length, logits instead)

    def admit(self, admit: Admit) -> None:
        """Note a row that wants its prompt scored."""
        wanted = admit.params.prompt_logprobs
        if wanted is not None:
            top = self.model.vocab_size if wanted == -1 else min(wanted, self.model.vocab_size)
            # Prompts are not sampled from, so raw and processed are one.
            as_logits = (admit.params.logprobs_mode or "").endswith("logits")
            self.wanted[admit.row] = (top, admit.num_prompt_tokens, as_logits)
        else:
            self.wanted.pop(admit.row, None)

    def release(self, row: int) -> None:
        """Forget a row."""
        self.wanted.pop(row, None)

    def score(self, batch: Batch, hidden: Tensor) -> list[tuple[int, int, Tensor, Tensor, Tensor]]:
        """(row, first scored position, ids, values, ranks) of each wanting row's part of this step.

        hidden [T, hidden]. The hidden state at position p scores the token at p + 1; the first token has no score.
        """
        if not self.wanted:
            return []
        out = []
        first = 0
        for row, start, count in zip(batch.rows.tolist(), batch.starts.tolist(), batch.counts.tolist(), strict=True):
            if row in self.wanted:
                top, length, as_logits = self.wanted[row]
                num = min(start + count, length - 1) - start
                if num > 0:
                    part = hidden[first : first + num]
                    out.append((row, start + 1, *self._slices(row, start + 1, part, top, as_logits=as_logits)))
            first += count
        return out

    def _slices(
        self, row: int, start: int, hidden: Tensor, top: int, *, as_logits: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        pieces = []
        for i in range(0, len(hidden), SLICE):
            part = hidden[i : i + SLICE]
            known = self.tokens[row, start + i : start + i + len(part)].to(torch.int64)
            logits = self.model.logits(part).float()
            ids, values, ranks = self.topk_logprobs(logits, known, top)
            if as_logits:
                values = logits.gather(-1, ids)
            # To the host at once: results of a whole vocabulary would pile up on the device.
            pieces.append([t.cpu() for t in (ids, values, ranks)])
        ids, values, ranks = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        return ids, values, ranks
