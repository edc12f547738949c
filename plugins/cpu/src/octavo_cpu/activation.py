"""Gated activations: the product is written over the activation, which saves a buffer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def act_and_mul(x: Tensor, kind: str) -> Tensor:
    """As the catalogue's `act_and_mul`: act(x[:, :I]) * x[:, I:]."""
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[kind](gate).mul_(up)
