"""What was measured on which card: the sizes that Triton's kernels run with.

Filled from `benchmarks/gpu_attention.py` and `benchmarks/gpu_products.py`, one entry a card. A card that is not listed
runs with the kernels' defaults, and with cuBLAS alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.triton.attention_tuning import AttentionTuning, DecodeCut
from octavo_cuda import tuning_products
from octavo_cuda.tuning_products import Products


@dataclass(frozen=True, kw_only=True)
class CardTuning:
    """attention: of the paged kernels. products: of few tokens, in bfloat16 or float16."""

    attention: AttentionTuning = AttentionTuning()
    products: Products = field(default_factory=dict)


HOPPER = AttentionTuning(
    shared_memory=200 * 1024,
    decode_rows=16,
    decode_fence=False,
    decode=DecodeCut(block=64, warps=2, stages=3, programs_per_unit=4),
    decode_few=((16, DecodeCut(block=64, warps=4, stages=3, programs_per_unit=2, min_tiles=1)),),
    prefill_block=128,
    prefill_programs_per_unit=2,
)
"""Best of 8 decode cuts for many sequences, 18 for few and 8 prefill cuts on an H200: see
benchmarks/results/h200-2026-11-29.md.

228 KiB of shared memory a multiprocessor, 227 for one program; PTX's barriers and releases are cumulative."""

CARDS: Mapping[str, CardTuning] = {
    "NVIDIA H100": CardTuning(attention=HOPPER),
    "NVIDIA H200": CardTuning(attention=HOPPER, products=tuning_products.H200),
}
"""By the beginning of the card's name."""


def tuning_for(card: str) -> CardTuning:
    """The entry whose name begins the card's, the longest such; else the defaults."""
    matches = [name for name in CARDS if card.startswith(name)]
    return CARDS[max(matches, key=len)] if matches else CardTuning()
