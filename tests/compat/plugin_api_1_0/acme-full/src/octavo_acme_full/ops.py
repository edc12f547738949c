"""The ops that acme has kernels for. T tokens, D the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_acme_full.kernels.library import LIBRARY, address


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; a new tensor. x float32 [..., D], weight [D]."""
    rows, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(rows)
    width = x.shape[-1]
    LIBRARY.acme_rms_norm(address(rows), address(weight), address(out), rows.numel() // width, width, eps)
    return out
