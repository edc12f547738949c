"""Products of few tokens on an H200: the cuts that beat cuBLAS by more than the noise, and by what factor.

Keys: (N, K, whether gated, tokens); between two numbers of tokens the larger's cut runs. None: cuBLAS won.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.triton.gemv import GemvConfig
from octavo.triton.skinny import SkinnyConfig

Products = Mapping[tuple[int, int, bool, int], GemvConfig | SkinnyConfig | None]


def lanes(block_n: int, block_k: int, num_warps: int, num_stages: int, fetch: int = 2) -> GemvConfig:
    """One token, without the matrix unit."""
    return GemvConfig(
        block_n=block_n,
        block_k=block_k,
        num_warps=num_warps,
        num_stages=num_stages,
        dot=False,
        fetch=fetch,
    )


def dots(block_n: int, block_k: int, split_k: int, num_warps: int, num_stages: int, fetch: int = 2) -> GemvConfig:
    """Up to 8 tokens, one program for every BLOCK_N rows and slice of K."""
    return GemvConfig(
        block_n=block_n,
        block_k=block_k,
        split_k=split_k,
        num_warps=num_warps,
        num_stages=num_stages,
        fetch=fetch,
    )


def stream(block_n: int, block_k: int, programs: int, num_warps: int, num_stages: int, fetch: int = 2) -> SkinnyConfig:
    """Up to 128 tokens, an even share of the weight for every program."""
    return SkinnyConfig(
        block_n=block_n,
        block_k=block_k,
        programs=programs,
        num_warps=num_warps,
        num_stages=num_stages,
        fetch=fetch,
    )


H200: Products = {
    (6144, 4096, False, 1): lanes(16, 256, 4, 4),  # 1.18
    (6144, 4096, False, 4): dots(16, 256, 1, 1, 4),  # 1.07
    (6144, 4096, False, 8): dots(16, 256, 1, 1, 4),  # 1.04
    (4096, 4096, False, 1): lanes(8, 512, 4, 3),  # 1.24
    (4096, 4096, False, 4): dots(64, 128, 4, 4, 3),  # 1.14
    (4096, 4096, False, 8): dots(64, 128, 4, 4, 3),  # 1.11
    (28672, 4096, True, 1): dots(64, 128, 1, 4, 4),  # 1.03
    (4096, 14336, False, 1): lanes(8, 512, 4, 4),  # 1.08
    (4096, 14336, False, 4): dots(64, 128, 4, 4, 4),  # 1.03
    (4096, 14336, False, 8): dots(64, 128, 4, 4, 3),  # 1.03
    (128256, 4096, False, 1): lanes(8, 1024, 8, 6),  # 1.07
    (128256, 4096, False, 4): dots(64, 128, 1, 4, 3),  # 1.05
    (128256, 4096, False, 8): dots(64, 128, 1, 4, 4),  # 1.05
    (4096, 1024, False, 1): lanes(16, 256, 4, 4),  # 1.30
    (4096, 1024, False, 4): dots(16, 256, 1, 1, 6),  # 1.09
    (4096, 1024, False, 8): dots(16, 256, 1, 1, 6),  # 1.09
    (1024, 2048, False, 1): lanes(4, 1024, 4, 3),  # 3.76
    (1024, 2048, False, 4): dots(16, 256, 4, 2, 4),  # 1.75
    (1024, 2048, False, 8): dots(16, 256, 4, 2, 4),  # 1.25
    (6144, 1024, True, 1): lanes(16, 256, 4, 4),  # 1.20
    (6144, 1024, True, 4): dots(16, 256, 1, 1, 4),  # 1.06
    (6144, 1024, True, 8): dots(16, 256, 1, 1, 4),  # 1.03
    (1024, 3072, False, 1): lanes(4, 1024, 4, 6),  # 1.74
    (1024, 3072, False, 4): dots(64, 128, 8, 4, 6),  # 1.36
    (1024, 3072, False, 8): dots(64, 128, 8, 4, 6),  # 1.33
    (151936, 1024, False, 1): lanes(8, 512, 4, 4),  # 1.08
    (151936, 1024, False, 4): dots(64, 128, 1, 4, 3),  # 1.08
    (151936, 1024, False, 8): dots(64, 128, 1, 4, 3),  # 1.07
}
"""Measured 2026-11-29: NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0, replayed in a CUDA graph, each kernel by itself
and without early starts; gated ones without their gates."""
