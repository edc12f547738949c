"""Random tensors for the sample inputs of ops: seeded, so that every run of a conformance test sees the same ones."""

from __future__ import annotations

import torch


def gaussian(*shape: int, dtype: str = "float32", seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normally distributed values of standard deviation `scale`, on the CPU, in the dtype of that torch name."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(getattr(torch, dtype))


def integers(*shape: int, high: int, dtype: str = "int64", seed: int = 0) -> torch.Tensor:
    """Uniform integers in [0, high), on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, shape, generator=generator).to(getattr(torch, dtype))
