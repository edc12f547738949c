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
    (28672, 4096, True, 1): lanes(16, 512, 4, 4, 2),  # 1.08
    (28672, 4096, True, 2): None,  # 1.01
    (28672, 4096, True, 4): None,  # 1.00
    (28672, 4096, True, 8): None,  # 1.01
    (28672, 4096, True, 16): None,  # 1.01
    (28672, 4096, True, 32): None,  # 0.99
    (28672, 4096, True, 64): None,  # 1.00
    (28672, 4096, True, 128): None,  # 0.91
    (6144, 4096, False, 1): lanes(16, 512, 8, 4, 2),  # 1.07
    (6144, 4096, False, 2): stream(64, 128, 132, 4, 8, 4),  # 1.07
    (6144, 4096, False, 4): stream(64, 128, 132, 4, 8, 4),  # 1.03
    (6144, 4096, False, 8): dots(16, 256, 1, 1, 4, 2),  # 1.04
    (6144, 4096, False, 16): stream(64, 128, 132, 4, 8, 4),  # 1.05
    (6144, 4096, False, 32): None,  # 1.02
    (6144, 4096, False, 64): None,  # 0.69
    (6144, 4096, False, 128): None,  # 0.47
    (4096, 4096, False, 1): lanes(16, 512, 8, 4, 2),  # 1.30
    (4096, 4096, False, 2): stream(64, 128, 128, 4, 8, 4),  # 1.11
    (4096, 4096, False, 4): stream(64, 128, 128, 4, 8, 4),  # 1.12
    (4096, 4096, False, 8): stream(64, 128, 128, 4, 8, 4),  # 1.12
    (4096, 4096, False, 16): stream(64, 128, 128, 4, 8, 4),  # 1.09
    (4096, 4096, False, 32): stream(64, 128, 128, 4, 8, 4),  # 1.08
    (4096, 4096, False, 64): None,  # 0.67
    (4096, 4096, False, 128): None,  # 0.50
    (4096, 14336, False, 1): lanes(8, 1024, 8, 4, 2),  # 1.08
    (4096, 14336, False, 2): dots(64, 128, 4, 4, 4, 2),  # 1.07
    (4096, 14336, False, 4): dots(64, 128, 4, 4, 4, 2),  # 1.06
    (4096, 14336, False, 8): stream(64, 128, 128, 4, 8, 4),  # 1.04
    (4096, 14336, False, 16): stream(64, 128, 128, 4, 8, 4),  # 1.05
    (4096, 14336, False, 32): stream(64, 128, 128, 4, 8, 4),  # 1.04
    (4096, 14336, False, 64): None,  # 0.94
    (4096, 14336, False, 128): None,  # 0.73
    (128256, 4096, False, 1): lanes(16, 512, 8, 4, 2),  # 1.06
    (128256, 4096, False, 2): dots(64, 128, 1, 4, 3, 2),  # 1.05
    (128256, 4096, False, 4): dots(64, 128, 1, 4, 3, 2),  # 1.05
    (128256, 4096, False, 8): dots(64, 128, 1, 4, 4, 2),  # 1.04
    (128256, 4096, False, 16): stream(64, 128, 2004, 4, 4, 0),  # 1.04
    (128256, 4096, False, 32): stream(64, 128, 2004, 4, 4, 2),  # 1.07
    (128256, 4096, False, 64): stream(64, 64, 2004, 4, 6, 4),  # 1.08
    (128256, 4096, False, 128): None,  # 0.92
    (6144, 1024, True, 1): lanes(32, 256, 4, 4, 2),  # 1.44
    (6144, 1024, True, 2): dots(16, 256, 1, 1, 4, 2),  # 1.27
    (6144, 1024, True, 4): dots(16, 256, 1, 1, 4, 2),  # 1.26
    (6144, 1024, True, 8): dots(16, 256, 1, 1, 4, 2),  # 1.25
    (6144, 1024, True, 16): None,  # 0.89
    (6144, 1024, True, 32): None,  # 0.98
    (6144, 1024, True, 64): None,  # 0.81
    (6144, 1024, True, 128): None,  # 0.60
    (1024, 3072, False, 1): lanes(4, 1024, 4, 6, 2),  # 1.84
    (1024, 3072, False, 2): dots(64, 128, 8, 4, 6, 2),  # 1.52
    (1024, 3072, False, 4): dots(64, 128, 8, 4, 6, 2),  # 1.55
    (1024, 3072, False, 8): dots(64, 128, 8, 4, 6, 2),  # 1.54
    (1024, 3072, False, 16): stream(16, 256, 256, 2, 4, 2),  # 1.19
    (1024, 3072, False, 32): stream(16, 256, 256, 2, 4, 2),  # 1.06
    (1024, 3072, False, 64): None,  # 0.88
    (1024, 3072, False, 128): None,  # 0.65
    (4096, 1024, False, 1): lanes(8, 512, 4, 4, 2),  # 1.39
    (4096, 1024, False, 2): dots(16, 256, 1, 1, 6, 2),  # 1.44
    (4096, 1024, False, 4): dots(16, 256, 1, 1, 6, 2),  # 1.43
    (4096, 1024, False, 8): dots(16, 256, 1, 1, 6, 2),  # 1.40
    (4096, 1024, False, 16): stream(16, 256, 256, 2, 4, 2),  # 1.14
    (4096, 1024, False, 32): stream(32, 128, 128, 4, 5, 2),  # 1.32
    (4096, 1024, False, 64): stream(32, 128, 128, 4, 5, 2),  # 1.06
    (4096, 1024, False, 128): None,  # 0.76
    (1024, 2048, False, 1): lanes(4, 1024, 4, 3, 2),  # 3.09
    (1024, 2048, False, 2): dots(16, 256, 4, 2, 4, 2),  # 2.03
    (1024, 2048, False, 4): dots(16, 256, 4, 2, 4, 2),  # 2.62
    (1024, 2048, False, 8): dots(16, 256, 4, 2, 4, 2),  # 1.48
    (1024, 2048, False, 16): stream(32, 128, 256, 4, 5, 2),  # 1.31
    (1024, 2048, False, 32): stream(32, 128, 128, 4, 5, 2),  # 1.12
    (1024, 2048, False, 64): None,  # 0.83
    (1024, 2048, False, 128): None,  # 0.63
    (151936, 1024, False, 1): stream(64, 128, 2374, 4, 4, 2),  # 1.08
    (151936, 1024, False, 2): stream(64, 128, 2374, 4, 4, 0),  # 1.09
    (151936, 1024, False, 4): dots(64, 128, 1, 4, 3, 2),  # 1.08
    (151936, 1024, False, 8): stream(64, 128, 2374, 4, 4, 2),  # 1.08
    (151936, 1024, False, 16): stream(64, 128, 2374, 4, 4, 2),  # 1.07
    (151936, 1024, False, 32): stream(64, 128, 2374, 4, 4, 2),  # 1.07
    (151936, 1024, False, 64): stream(64, 64, 2374, 4, 6, 4),  # 1.06
    (151936, 1024, False, 128): None,  # 0.81
}
"""Measured 2026-11-29: NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0, in a CUDA graph behind an add_rms_norm and with
early starts: `benchmarks/gpu_products.py`. The factors are those of norm and product together."""
