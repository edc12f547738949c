"""Root-mean-square norms. With one token the dispatch of torch's eight small operations is the whole cost."""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

vector_norm = torch.linalg.vector_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the catalogue's `rms_norm`: x [..., D], weight [D] in x's dtype (rounds before the product) or float32.

    One row takes half the operations: its norm becomes a Python number, which costs nothing where the host is the
    device.
    """
    width = weight.shape[0]
    if x.numel() == width:
        length: float = vector_norm(x, dtype=torch.float32).item()
        mean_square = length * length / width + eps
        if mean_square > 0.0:
            scale: float = mean_square**-0.5
            if weight.dtype == x.dtype:
                return (x * scale).mul_(weight)
            return (x.float() * scale).mul_(weight).to(x.dtype)
    if weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, None, eps).mul_(weight)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As the catalogue's `add_rms_norm`; the sum is written into `residual`."""
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual
