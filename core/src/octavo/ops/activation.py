"""Gated activations. Shapes: T tokens, I intermediate features."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from octavo.ops.catalogue import DEFAULT_TOLERANCE, OpDef, define
from octavo.ops.samples import gaussian

Tensor = torch.Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""The kinds of `act_and_mul`; "gelu" is exact (erf), "gelu_tanh" its tanh approximation."""


def act_and_mul(x: Tensor, kind: str) -> Tensor:
    """act(x[:, :I]) * x[:, I:]. x [T, 2I], gate first; a new tensor [T, I] in x's dtype. kind: see `ACTIVATIONS`."""
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[kind](gate) * up


def _samples(dtype: str) -> Iterable[tuple[Any, ...]]:
    for kind in ACTIVATIONS:
        for tokens, width in ((1, 64), (9, 96), (0, 64)):
            yield gaussian(tokens, 2 * width, dtype=dtype, seed=tokens, scale=2.0), kind


def _params(sample: tuple[Any, ...]) -> dict[str, object]:
    x, kind = sample
    return {"kind": kind, "size": x.shape[-1] // 2}


define(OpDef(name="act_and_mul", reference=act_and_mul, samples=_samples, tolerance=DEFAULT_TOLERANCE, params=_params))
