"""Root-mean-square norms. Shapes: T tokens, D features."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from octavo.ops.catalogue import DEFAULT_TOLERANCE, OpDef, define
from octavo.ops.samples import gaussian
from octavo.quant.online import quantize_rows

Tensor = torch.Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 inside; a new tensor in x's dtype.

    x [..., D], possibly strided; weight [D], in x's dtype or float32. With a weight in x's dtype the normalised value
    is rounded to it before the product (Llama's order); with a float32 weight the product is rounded once (Gemma's).
    """
    if weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, None, eps) * weight
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def add_rms_norm(ops: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual). x, residual [T, D]; weight as in `rms_norm`.

    Both inputs are given up by the caller: an implementation may write its results into them.
    """
    total = x + residual
    return ops.rms_norm(total, weight, eps), total


def add_rms_norm_fp8(
    ops: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`add_rms_norm` in fp8: (values float8_e4m3fn [T, D], scales float32 [T, 1], x + residual); a scale a row.

    The norm is rounded to x's dtype before it is quantized. Both inputs are given up by the caller.
    """
    normed, total = ops.add_rms_norm(x, residual, weight, eps)
    return *quantize_rows(normed), total


def _rms_norm_samples(dtype: str) -> Iterable[tuple[Any, ...]]:
    for shape in ((1, 64), (7, 96), (3, 4, 128), (0, 64)):
        yield gaussian(*shape, dtype=dtype, seed=1), gaussian(shape[-1], dtype=dtype, seed=2), 1e-6
    yield gaussian(5, 64, dtype=dtype, seed=3), 1 + gaussian(64, seed=4), 1e-5
    # Heads of a packed projection: rows are not contiguous.
    yield gaussian(5, 8, 64, dtype=dtype, seed=5)[:, 2:6], gaussian(64, dtype=dtype, seed=6), 1e-5


def _add_rms_norm_samples(dtype: str) -> Iterable[tuple[Any, ...]]:
    for tokens, width in ((1, 64), (7, 96), (33, 256)):
        x, residual = (
            gaussian(tokens, width, dtype=dtype, seed=1),
            gaussian(tokens, width, dtype=dtype, seed=2),
        )
        yield x, residual, gaussian(width, dtype=dtype, seed=3), 1e-6
        yield x, residual, 1 + gaussian(width, seed=4), 1e-6


def _size(sample: tuple[Any, ...]) -> dict[str, object]:
    return {"size": sample[0].shape[-1]}


define(
    OpDef(
        name="rms_norm",
        reference=rms_norm,
        samples=_rms_norm_samples,
        tolerance=DEFAULT_TOLERANCE,
        params=_size,
    )
)
define(
    OpDef(
        name="add_rms_norm",
        params=_size,
        given_up=frozenset({"x", "residual"}),
        reference=add_rms_norm,
        samples=_add_rms_norm_samples,
        tolerance=DEFAULT_TOLERANCE,
        parts=("rms_norm",),
    )
)
define(
    OpDef(
        name="add_rms_norm_fp8",
        params=_size,
        given_up=frozenset({"x", "residual"}),
        reference=add_rms_norm_fp8,
        samples=_add_rms_norm_samples,
        # A value between two codes may go to either, and neighbours lie 1/8 apart.
        tolerance=dict.fromkeys(DEFAULT_TOLERANCE, 0.13),
        parts=("add_rms_norm",),
    )
)
