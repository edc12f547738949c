"""The addition of a block's result to what went in, where no norm follows it. Shapes: T tokens, D features."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from octavo.ops.catalogue import DEFAULT_TOLERANCE, OpDef, define
from octavo.ops.samples import gaussian


def scaled_add(x: Tensor, residual: Tensor, scale: float | None = None) -> Tensor:
    """residual + x * scale, or their sum without a scale; rounded once. x, residual [T, D] of one dtype.

    Both inputs are given up by the caller: an implementation may write its result into them.
    """
    return torch.add(residual, x, alpha=1 if scale is None else scale)


def _samples(dtype: str) -> Iterable[tuple[Any, ...]]:
    for tokens, width, scale in ((1, 64, None), (7, 33, 0.22), (40, 576, -3.0), (0, 64, None)):
        yield gaussian(tokens, width, dtype=dtype, seed=1), gaussian(tokens, width, dtype=dtype, seed=2), scale


define(
    OpDef(
        name="scaled_add",
        reference=scaled_add,
        samples=_samples,
        tolerance=DEFAULT_TOLERANCE,
        params=lambda sample: {"size": sample[0].shape[-1]},
        given_up=frozenset({"x", "residual"}),
    )
)
