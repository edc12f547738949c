"""The seeded work that every engine replays: prompts as token ids, exact output lengths, greedy, EOS ignored.

All prompts are distinct, so that a prefix cache never helps.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

SEED = 20261129
ID_RANGE = (100, 49000)
"""Valid in SmolLM2's vocabulary and clear of its special tokens."""


@dataclass(frozen=True)
class Work:
    """One request: prompt token ids and how many tokens to generate."""

    prompt: list[int]
    num_output: int


class Source:
    """Draws requests from one seed."""

    def __init__(self, seed: int = SEED, *, ids: tuple[int, int] = ID_RANGE) -> None:
        self._random = random.Random(seed)
        self._ids = ids

    def fixed(self, num_prompt: int, num_output: int) -> Work:
        """A request of exactly these lengths."""
        return Work([self._random.randrange(*self._ids) for _ in range(num_prompt)], num_output)

    def mix(self, count: int = 64) -> list[Work]:
        """Chat-like requests: prompts of 32-512 and outputs of 32-256 tokens, uniform."""
        lengths = [(self._random.randint(32, 512), self._random.randint(32, 256)) for _ in range(count)]
        return [self.fixed(*pair) for pair in lengths]

    def skewed(self, count: int = 1000) -> list[Work]:
        """Many requests as chat traffic is skewed: prompts of 32-1024 and outputs of 32-512 tokens, log-uniform."""
        return [self.fixed(self._log_uniform(32, 1024), self._log_uniform(32, 512)) for _ in range(count)]

    def _log_uniform(self, low: int, high: int) -> int:
        return int(math.exp(self._random.uniform(math.log(low), math.log(high))))
