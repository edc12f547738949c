"""Token counts of the rows that asked for penalties, on the device, so that run-ahead sees its own last token."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class PenaltyState:
    """counts int32 [P, V] of generated tokens and in_prompt bool [P, V], for P places that grow on demand."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.place: dict[int, int] = {}
        self.free: list[int] = []
        self.counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def admit(self, row: int, known: Tensor, num_prompt_tokens: int) -> None:
        """Count a request's known tokens, int64 on the device (after preemption these hold output too)."""
        self.release(row)
        if not self.free:
            self._grow()
        place = self.place[row] = self.free.pop()
        prompt, output = known[:num_prompt_tokens], known[num_prompt_tokens:]
        self.in_prompt[place].zero_()
        self.in_prompt[place, prompt] = True
        self.counts[place] = torch.bincount(output, minlength=self.vocab_size)

    def release(self, row: int) -> None:
        """Free a row's place, if it has one."""
        place = self.place.pop(row, None)
        if place is not None:
            self.free.append(place)

    def places(self, rows: NDArray[np.int32]) -> NDArray[np.int64]:
        """Where rows [N] lie."""
        return np.array([self.place[row] for row in rows.tolist()], np.int64)

    def count(self, places: Tensor, tokens: Tensor, counted: Tensor | None = None) -> None:
        """Add one sampled token int64 [N] to each place; -1 (a failed row) counts as token 0, nobody will read it.

        counted bool [N]: which of them; None: all.
        """
        ones = torch.ones_like(tokens, dtype=torch.int32) if counted is None else counted.to(torch.int32)
        self.counts.index_put_((places, tokens.clamp_min(0)), ones, accumulate=True)

    def _grow(self) -> None:
        old = len(self.counts)
        more = max(4, old)
        self.counts = torch.cat((self.counts, self.counts.new_zeros((more, self.vocab_size))))
        self.in_prompt = torch.cat((self.in_prompt, self.in_prompt.new_zeros((more, self.vocab_size))))
        self.free += range(old + more - 1, old - 1, -1)
