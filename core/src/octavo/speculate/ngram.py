"""The drafter `ngram`: what followed when the last tokens stood in the text before (prompt lookup).

    text    ... the cat sat on the mat . the cat          last tokens: "the cat"
                |-----| ^^^^^^^^^^           |-----|       drafts:     "sat on"

Of all endings of the text, the longest that stands before is taken, where it stands first: as in vLLM.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.plugin.drafter import DrafterSpec, DraftInput
from octavo.plugin.step import Ints

OPTIONS = ("prompt_lookup_min", "prompt_lookup_max")


class NgramDrafter:
    """Implements `octavo.plugin.Drafter`. Options: prompt_lookup_max, prompt_lookup_min (1): how many last tokens are
    looked for. Raises ValueError for others."""

    def __init__(self, spec: DrafterSpec) -> None:
        if unknown := set(spec.options) - set(OPTIONS):
            raise ValueError(f"it does not take {', '.join(sorted(unknown))}; it takes {', '.join(OPTIONS)}")
        self.longest = _size("prompt_lookup_max", spec.options.get("prompt_lookup_max"))
        self.shortest = _size("prompt_lookup_min", spec.options.get("prompt_lookup_min", 1))
        if self.shortest > self.longest:
            raise ValueError(f"prompt_lookup_min ({self.shortest}) must not exceed prompt_lookup_max ({self.longest})")

    def propose(self, batch: DraftInput) -> Ints:
        drafts = np.full((len(batch.tokens), int(batch.most.max())), -1, np.int32)
        for row, tokens, most in zip(drafts, batch.tokens, batch.most.tolist(), strict=True):
            start = self.find(tokens)
            found = tokens[start : start + most]
            row[: len(found)] = found
        return drafts

    def find(self, tokens: Ints) -> int:
        """Where what follows an earlier copy of the last tokens begins; the text's length if there is none."""
        length, found = len(tokens), len(tokens)
        # Ends of copies of the last token; then of the last two, and so on.
        (ends,) = (tokens[:-1] == tokens[-1]).nonzero()
        for size in range(1, self.longest + 1):
            if size > 1:
                ends = ends[ends >= size - 1]
                ends = ends[tokens[ends - (size - 1)] == tokens[length - size]]
            if not len(ends):
                break
            if size >= self.shortest:
                found = int(ends[0]) + 1
        return found


def _size(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
    return value
