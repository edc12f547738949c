"""The vocabulary at both ends: token ids to vectors, and hidden states to logits. One weight may serve both.

Ranks share the vocabulary: rank r holds rows [r * n, (r + 1) * n) with n = ceil(V / ranks), the last padded by zeros.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from octavo.layers.context import BuildContext
from octavo.layers.linear import pack
from octavo.layers.weight import Weight, load_weight
from octavo.plugin.quant import MatrixSpec

Tensor = torch.Tensor
LookUp = Callable[[Tensor, int, float | None], Tensor]
"""(ids, the first row's id, scale) -> vectors, as the op `embedding_part`."""


def _load_rows(ctx: BuildContext, matrix: MatrixSpec, done: Callable[[Weight], object]) -> None:
    """Ask for this rank's rows of a vocabulary weight; ranks behind its end get zeros, which nobody looks up."""
    num_rows = -(-matrix.out_features // ctx.comm.size)
    start = min(ctx.comm.rank * num_rows, matrix.out_features)
    length = min(num_rows, matrix.out_features - start)
    load_weight(
        ctx,
        matrix,
        lambda weight: done(weight if length == num_rows else weight.padded(num_rows)),
        rows=((start, length),),
    )


class VocabEmbedding:
    """Token ids [T] -> vectors [T, hidden], times `scale` (rounded to the model's dtype, as the checkpoints expect).

    table: this rank's rows; empty where they are read out of the weight that a tied head's kernel packed.
    """

    def __init__(
        self, ctx: BuildContext, name: str, vocab_size: int, hidden_size: int, *, scale: float | None = None
    ) -> None:
        self._ctx = ctx
        self._scale = scale
        self._first = ctx.comm.rank * -(-vocab_size // ctx.comm.size)
        self._tied: LMHead | None = None
        self.table = torch.empty(0, hidden_size, dtype=ctx.dtype, device=ctx.torch_device)
        self._look_up: Callable[[Tensor], Tensor]
        matrix = MatrixSpec(name=name, kind="embedding", out_features=vocab_size, in_features=hidden_size)
        _load_rows(ctx, matrix, self._load)

    def tie(self, head: LMHead) -> None:
        """Let `head` use this weight: a plain one is shared, a quantized one stays packed for the head."""
        self._tied = head

    def __call__(self, token_ids: Tensor) -> Tensor:
        x, comm = self._look_up(token_ids), self._ctx.comm
        return x if comm.size == 1 else comm.all_reduce(x)

    def _load(self, weight: Weight) -> None:
        packed = None
        if self._tied is not None:
            packed = self._tied.take(weight)
        if packed is not None:
            self._look_up = lambda ids: packed(ids, self._first, self._scale)
            return
        self.table = weight.plain(self._ctx.dtype)
        whole = self._ctx.comm.size == 1
        look_up = self._ctx.op("embedding" if whole else "embedding_part", size=self.table.shape[1])
        place = () if whole else (self._first,)
        self._look_up = lambda ids: look_up(ids, self.table, *place, self._scale)


class LMHead:
    """Hidden states [N, hidden] -> logits [N, V], times `scale` and soft-capped (see `octavo.ops.embedding`).

    They are as the product gives them, in the model's dtype, unless a factor or cap is computed in float32: sampling
    reads either, and a copy of the whole vocabulary is dear.
    tied_to: the embedding whose weight serves; the checkpoint's own head, if it has one, is then ignored.
    """

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: VocabEmbedding | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        self._ctx = ctx
        self._vocab_size = vocab_size
        self._scale, self._softcap = scale, softcap
        self._logits: Callable[..., Tensor] = ctx.op("logits", scaled=scale is not None, softcap=softcap is not None)
        self._kernel: Any = None
        self._packed: Any = None
        if tied_to is not None:
            tied_to.tie(self)
            ctx.weights.ignored.append(rf"{re.escape(name)}[.][^.]+")
        else:
            matrix = MatrixSpec(name=name, kind="head", out_features=vocab_size, in_features=hidden_size)
            _load_rows(ctx, matrix, self.take)

    def __call__(self, hidden: Tensor) -> Tensor:
        x: Tensor = self._kernel.apply(hidden, self._packed, None)
        if self._ctx.comm.size > 1:
            x = self._ctx.comm.all_gather(x, 1)[:, : self._vocab_size]
        if self._scale is None and self._softcap is None:
            return x
        return self._logits(x, self._scale, self._softcap)

    def take(self, weight: Weight) -> LookUp | None:
        """Use this weight. Returns what gives rows of it, if its kernel does."""
        self._kernel, self._packed = pack(self._ctx, weight, bias=False)
        look_up = getattr(self._kernel, "look_up", None)
        return None if look_up is None else partial(look_up, self._packed)
