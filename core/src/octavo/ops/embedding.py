"""Both ends of a decoder: token ids to vectors, head outputs to logits. Shapes: T tokens, N rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from octavo.ops.catalogue import DEFAULT_TOLERANCE, OpDef, define
from octavo.ops.samples import gaussian, integers

Tensor = torch.Tensor


def embedding(ids: Tensor, table: Tensor, scale: float | None = None) -> Tensor:
    """table[ids], times `scale` if given: [T, hidden] in the table's dtype. ids int32 or int64 [T]."""
    rows = F.embedding(ids, table)
    return rows if scale is None else rows * scale


def embedding_part(ops: Any, ids: Tensor, table: Tensor, first: int, scale: float | None = None) -> Tensor:
    """`embedding` of a vocabulary whose rows from `first` on are the table: [T, hidden], a new tensor; zeros for an id
    that lies elsewhere."""
    rows = ids - first
    elsewhere = (rows < 0) | (rows >= table.shape[0])
    found: Tensor = ops.embedding(rows.masked_fill(elsewhere, 0), table, scale)
    return found.masked_fill(elsewhere[:, None], 0.0)


def logits(x: Tensor, scale: float | None = None, softcap: float | None = None) -> Tensor:
    """What the head gave, as float32 logits [N, V]: times `scale`, then softcap * tanh(value / softcap).

    x [N, V]; the result may be x itself if there is nothing to do.
    """
    out = x.float()
    if scale is not None:
        out = out * scale
    if softcap is not None:
        out = torch.tanh(out / softcap) * softcap
    return out


def _embedding_samples(dtype: str) -> Iterable[tuple[Any, ...]]:
    table = gaussian(50, 64, dtype=dtype, seed=1)
    yield integers(7, high=50), table
    yield integers(7, high=50, dtype="int32"), table, 8.0
    yield integers(0, high=50), table


def _part_samples(dtype: str) -> Iterable[tuple[Any, ...]]:
    table = gaussian(20, 64, dtype=dtype, seed=1)
    yield integers(30, high=50), table, 20
    yield integers(30, high=50, dtype="int32"), table, 0, 8.0
    yield integers(0, high=50), table, 40


def _logits_samples(dtype: str) -> Iterable[tuple[Any, ...]]:
    x = gaussian(3, 50, dtype=dtype, seed=1, scale=20.0)
    for scale in (None, 0.125):
        for softcap in (None, 30.0):
            yield x, scale, softcap


define(
    OpDef(
        name="embedding",
        reference=embedding,
        samples=_embedding_samples,
        tolerance=DEFAULT_TOLERANCE,
        params=lambda sample: {"size": sample[1].shape[-1]},
    )
)
define(
    OpDef(
        name="embedding_part",
        reference=embedding_part,
        samples=_part_samples,
        tolerance=DEFAULT_TOLERANCE,
        params=lambda sample: {"size": sample[1].shape[-1]},
        parts=("embedding",),
    )
)
define(
    OpDef(
        name="logits",
        reference=logits,
        samples=_logits_samples,
        tolerance=DEFAULT_TOLERANCE,
        params=lambda sample: {"scaled": sample[1] is not None, "softcap": sample[2]},
    )
)
