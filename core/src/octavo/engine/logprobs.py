"""Logprobs as people read them: from the flat arrays of a message to token id -> Logprob."""

from __future__ import annotations

import struct
from collections.abc import Callable

from octavo.engine.messages import LogprobBlock
from octavo.outputs import Logprob

FLOOR = -9999.0
"""Stands for minus infinity (and for no number) everywhere: JSON has no infinity."""


def entries(
    block: LogprobBlock, token_text: Callable[[int], str] | None, *, num_top: int | None = None
) -> list[dict[int, Logprob]]:
    """One dict per position of the block: the actual token first, then the most likely ones by rank.

    token_text gives decoded_token (None: no tokenizer). A top token that is the actual one appears once.
    num_top: how many are there for being likely; those behind them were asked for by id and have no rank. None: all.
    """
    if num_top is None or num_top < 0:
        num_top = block.width
    # A block mostly holds one position, for which struct is several times faster than numpy.
    width = block.width
    num_values = len(block.ids) // 4
    ids = struct.unpack(f"<{num_values}i", block.ids)
    values = struct.unpack(f"<{num_values}f", block.values)
    ranks = struct.unpack(f"<{num_values // width}i", block.ranks)
    result = []
    for row, rank in enumerate(ranks):
        entry: dict[int, Logprob] = {}
        here = slice(row * width, (row + 1) * width)
        for place, (token, value) in enumerate(zip(ids[here], values[here], strict=True)):
            if token < 0 or token in entry:
                continue
            text = None if token_text is None else token_text(token)
            # A comparison with NaN is false, so NaN takes the floor too.
            known_rank = rank if not place else place if place <= num_top else None
            entry[token] = Logprob(value if value > FLOOR else FLOOR, known_rank, text)
        result.append(entry)
    return result
