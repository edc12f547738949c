"""Logprobs as people read them: from the flat arrays of a message to token id -> Logprob."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from octavo.engine.messages import LogprobBlock, int32
from octavo.outputs import Logprob

FLOOR = -9999.0
"""Stands for minus infinity (and for no number) everywhere: JSON has no infinity."""


def entries(block: LogprobBlock, token_text: Callable[[int], str] | None) -> list[dict[int, Logprob]]:
    """One dict per position of the block: the actual token first, then the most likely ones by rank.

    token_text gives decoded_token (None: no tokenizer). A top token that is the actual one appears once.
    """
    ids = int32(block.ids).reshape(-1, block.width).tolist()
    values = np.frombuffer(block.values, dtype="<f4").reshape(-1, block.width).tolist()
    ranks = int32(block.ranks).tolist()
    result = []
    for row_ids, row_values, rank in zip(ids, values, ranks, strict=True):
        entry: dict[int, Logprob] = {}
        for place, (token, value) in enumerate(zip(row_ids, row_values, strict=True)):
            if token < 0 or token in entry:
                continue
            text = None if token_text is None else token_text(token)
            # A comparison with NaN is false, so NaN takes the floor too.
            entry[token] = Logprob(value if value > FLOOR else FLOOR, place if place else rank, text)
        result.append(entry)
    return result
