"""What was measured on which card: the sizes that Triton's kernels run with.

Filled from `benchmarks/gpu_ops.py` (the GEMV table) and `benchmarks/gpu_attention.py`, one entry a card. A card that is
not listed runs with the kernels' defaults, and with cuBLAS alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.triton.attention_tuning import AttentionTuning
from octavo.triton.gemv import GemvConfig

Gemv = Mapping[tuple[int, int, int], GemvConfig]
"""(N, K, tokens) -> the cut that beat cuBLAS by more than the noise. A product that cuBLAS wins has no entry."""


@dataclass(frozen=True, kw_only=True)
class CardTuning:
    """attention: of the paged kernels. gemv: products of up to 8 tokens in bfloat16 or float16."""

    attention: AttentionTuning = AttentionTuning()
    gemv: Gemv = field(default_factory=dict)


HOPPER = AttentionTuning(shared_memory=200 * 1024)
"""228 KiB of shared memory a multiprocessor, 227 for one program."""

CARDS: Mapping[str, CardTuning] = {
    "NVIDIA H100": CardTuning(attention=HOPPER),
    "NVIDIA H200": CardTuning(attention=HOPPER),
}
"""By the beginning of the card's name."""


def tuning_for(card: str) -> CardTuning:
    """The entry whose name begins the card's, the longest such; else the defaults."""
    matches = [name for name in CARDS if card.startswith(name)]
    return CARDS[max(matches, key=len)] if matches else CardTuning()
