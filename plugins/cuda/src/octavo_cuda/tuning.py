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


HOPPER = AttentionTuning(
    shared_memory=200 * 1024,
    decode_fence=False,
    decode_block=32,
    decode_warps=2,
    decode_stages=5,
    decode_programs_per_unit=4,
    prefill_block=128,
)
"""Best of 16 decode and 10 prefill cuts on an H200 for batches; see benchmarks/results/h200-2026-11-29.md.

228 KiB of shared memory a multiprocessor, 227 for one program; PTX's barriers and releases are cumulative."""

H200_GEMV: Gemv = {
    (6144, 4096, 1): GemvConfig(
        block_n=16, block_k=256, split_k=1, num_warps=4, num_stages=4, dot=False
    ),  # 1.18 x cuBLAS
    (6144, 4096, 4): GemvConfig(
        block_n=16, block_k=256, split_k=1, num_warps=1, num_stages=4, dot=True
    ),  # 1.07 x cuBLAS
    (6144, 4096, 8): GemvConfig(
        block_n=16, block_k=256, split_k=1, num_warps=1, num_stages=4, dot=True
    ),  # 1.04 x cuBLAS
    (4096, 4096, 1): GemvConfig(
        block_n=8, block_k=512, split_k=1, num_warps=4, num_stages=3, dot=False
    ),  # 1.24 x cuBLAS
    (4096, 4096, 4): GemvConfig(
        block_n=64, block_k=128, split_k=4, num_warps=4, num_stages=3, dot=True
    ),  # 1.14 x cuBLAS
    (4096, 4096, 8): GemvConfig(
        block_n=64, block_k=128, split_k=4, num_warps=4, num_stages=3, dot=True
    ),  # 1.11 x cuBLAS
    (28672, 4096, 1): GemvConfig(
        block_n=64, block_k=128, split_k=1, num_warps=4, num_stages=4, dot=True
    ),  # 1.03 x cuBLAS
    (4096, 14336, 1): GemvConfig(
        block_n=8, block_k=512, split_k=1, num_warps=4, num_stages=4, dot=False
    ),  # 1.08 x cuBLAS
    (4096, 14336, 4): GemvConfig(
        block_n=64, block_k=128, split_k=4, num_warps=4, num_stages=4, dot=True
    ),  # 1.03 x cuBLAS
    (4096, 14336, 8): GemvConfig(
        block_n=64, block_k=128, split_k=4, num_warps=4, num_stages=3, dot=True
    ),  # 1.03 x cuBLAS
    (128256, 4096, 1): GemvConfig(
        block_n=8, block_k=1024, split_k=1, num_warps=8, num_stages=6, dot=False
    ),  # 1.07 x cuBLAS
    (128256, 4096, 4): GemvConfig(
        block_n=64, block_k=128, split_k=1, num_warps=4, num_stages=3, dot=True
    ),  # 1.05 x cuBLAS
    (128256, 4096, 8): GemvConfig(
        block_n=64, block_k=128, split_k=1, num_warps=4, num_stages=4, dot=True
    ),  # 1.05 x cuBLAS
    (4096, 1024, 1): GemvConfig(
        block_n=16, block_k=256, split_k=1, num_warps=4, num_stages=4, dot=False
    ),  # 1.30 x cuBLAS
    (4096, 1024, 4): GemvConfig(
        block_n=16, block_k=256, split_k=1, num_warps=1, num_stages=6, dot=True
    ),  # 1.09 x cuBLAS
    (4096, 1024, 8): GemvConfig(
        block_n=16, block_k=256, split_k=1, num_warps=1, num_stages=6, dot=True
    ),  # 1.09 x cuBLAS
    (1024, 2048, 1): GemvConfig(
        block_n=4, block_k=1024, split_k=1, num_warps=4, num_stages=3, dot=False
    ),  # 3.76 x cuBLAS
    (1024, 2048, 4): GemvConfig(
        block_n=16, block_k=256, split_k=4, num_warps=2, num_stages=4, dot=True
    ),  # 1.75 x cuBLAS
    (1024, 2048, 8): GemvConfig(
        block_n=16, block_k=256, split_k=4, num_warps=2, num_stages=4, dot=True
    ),  # 1.25 x cuBLAS
    (6144, 1024, 1): GemvConfig(
        block_n=16, block_k=256, split_k=1, num_warps=4, num_stages=4, dot=False
    ),  # 1.20 x cuBLAS
    (6144, 1024, 4): GemvConfig(
        block_n=16, block_k=256, split_k=1, num_warps=1, num_stages=4, dot=True
    ),  # 1.06 x cuBLAS
    (6144, 1024, 8): GemvConfig(
        block_n=16, block_k=256, split_k=1, num_warps=1, num_stages=4, dot=True
    ),  # 1.03 x cuBLAS
    (1024, 3072, 1): GemvConfig(
        block_n=4, block_k=1024, split_k=1, num_warps=4, num_stages=6, dot=False
    ),  # 1.74 x cuBLAS
    (1024, 3072, 4): GemvConfig(
        block_n=64, block_k=128, split_k=8, num_warps=4, num_stages=6, dot=True
    ),  # 1.36 x cuBLAS
    (1024, 3072, 8): GemvConfig(
        block_n=64, block_k=128, split_k=8, num_warps=4, num_stages=6, dot=True
    ),  # 1.33 x cuBLAS
    (151936, 1024, 1): GemvConfig(
        block_n=8, block_k=512, split_k=1, num_warps=4, num_stages=4, dot=False
    ),  # 1.08 x cuBLAS
    (151936, 1024, 4): GemvConfig(
        block_n=64, block_k=128, split_k=1, num_warps=4, num_stages=3, dot=True
    ),  # 1.08 x cuBLAS
    (151936, 1024, 8): GemvConfig(
        block_n=64, block_k=128, split_k=1, num_warps=4, num_stages=3, dot=True
    ),  # 1.07 x cuBLAS
}
"""Measured 2026-11-29: NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0, replayed in a CUDA graph."""

CARDS: Mapping[str, CardTuning] = {
    "NVIDIA H100": CardTuning(attention=HOPPER),
    "NVIDIA H200": CardTuning(attention=HOPPER, gemv=H200_GEMV),
}
"""By the beginning of the card's name."""


def tuning_for(card: str) -> CardTuning:
    """The entry whose name begins the card's, the longest such; else the defaults."""
    matches = [name for name in CARDS if card.startswith(name)]
    return CARDS[max(matches, key=len)] if matches else CardTuning()
