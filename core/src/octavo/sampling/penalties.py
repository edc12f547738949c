"""Token counts of the rows that asked for penalties, on the device, so that run-ahead sees its own last token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Upload = Callable[[NDArray[Any]], Tensor]


class PenaltyState:
    """counts int32 [P, V] of generated tokens and in_prompt bool [P, V], for P places that grow on demand from
    `num_places` on."""

    def __init__(self, vocab_size: int, device: torch.device, *, num_places: int = 0) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.place: dict[int, int] = {}
        self.free = list(range(num_places - 1, -1, -1))
        self.counts = torch.zeros((num_places, vocab_size), dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros((num_places, vocab_size), dtype=torch.bool, device=device)

    def admit(self, row: int, known: NDArray[np.int32], num_prompt_tokens: int, upload: Upload) -> None:
        """Count a request's known tokens (after preemption these hold output too). On the host, whose arrays are of
        the vocabulary's size however many tokens there are."""
        self.release(row)
        if not self.free:
            self._grow()
        place = self.place[row] = self.free.pop()
        prompt = np.zeros((1, self.vocab_size), np.bool_)
        prompt[0, known[:num_prompt_tokens]] = True
        output = np.bincount(known[num_prompt_tokens:], minlength=self.vocab_size)[None].astype(np.int32)
        index = upload(np.array([place]))
        self.in_prompt[index] = upload(prompt)
        self.counts[index] = upload(output)

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
