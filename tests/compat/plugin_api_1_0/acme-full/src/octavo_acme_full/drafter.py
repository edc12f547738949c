"""A drafter: guesses that the text goes round with a fixed period. Small, and right about tables and counted lists."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.plugin import DrafterSpec, DraftInput


class Period:
    """Implements `octavo.plugin.Drafter`. Option: period (1), in tokens."""

    def __init__(self, spec: DrafterSpec) -> None:
        options = dict(spec.options)
        self.period = options.pop("period", 1)
        if options:
            raise ValueError(f"it takes period alone, not {', '.join(sorted(options))}")
        if not isinstance(self.period, int) or self.period < 1:
            raise ValueError(f"period must be an integer of at least 1, not {self.period!r}")

    def propose(self, batch: DraftInput) -> NDArray[np.int32]:
        drafts = np.full((len(batch.tokens), int(batch.most.max())), -1, np.int32)
        ahead = np.arange(drafts.shape[1]) % self.period - self.period
        for row, tokens, most in zip(drafts, batch.tokens, batch.most, strict=True):
            if len(tokens) >= self.period:
                row[:most] = tokens[ahead[:most]]
        return drafts
