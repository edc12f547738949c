"""Two results side by side: what a layer does whose checkpoint tensors have different formats."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from octavo.ops.catalogue import OpDef, define
from octavo.ops.samples import gaussian


def join(left: Tensor, right: Tensor) -> Tensor:
    """left [T, N] and right [T, M] of one dtype as a new tensor [T, N + M]."""
    return torch.cat((left, right), dim=-1)


def _samples(dtype: str) -> Iterable[tuple[Any, ...]]:
    for tokens, n, m in ((1, 64, 32), (7, 24, 96), (0, 8, 8)):
        yield gaussian(tokens, n, dtype=dtype, seed=1), gaussian(tokens, m, dtype=dtype, seed=2)


EXACT = {"float32": 0.0, "bfloat16": 0.0, "float16": 0.0}

define(OpDef(name="join", reference=join, samples=_samples, tolerance=EXACT))
