"""The vocabulary at both ends: token ids to vectors, and hidden states to logits. One weight may serve both.

Ranks share the vocabulary: rank r holds rows [r * n, (r + 1) * n) with n = ceil(V / ranks), the last padded by zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from octavo.layers.context import BuildContext
from octavo.layers.linear import pack, plain, receive
from octavo.plugin.specs import QuantScheme
from octavo.weights.slots import CheckpointTensor, Slot

Tensor = torch.Tensor
LookUp = Callable[[Tensor, int, float | None], Tensor]
"""(ids, the first row's id, scale) -> vectors, as the op `embedding_part`."""


def _read_rows(ctx: BuildContext, tensor: CheckpointTensor, name: str) -> tuple[Tensor, QuantScheme | None]:
    """This rank's rows of a vocabulary weight, and its scheme. Zero rows of a packed weight mean zeros too."""
    vocab_size = tensor.shape[0]
    num_rows = -(-vocab_size // ctx.comm.size)
    start = min(ctx.comm.rank * num_rows, vocab_size)
    length = min(num_rows, vocab_size - start)
    raw, scheme = receive(ctx, tensor, [tensor.read(start=start, length=length)], name=name)
    if length < num_rows:
        raw = torch.cat((raw, raw.new_zeros(num_rows - length, raw.shape[1])))
    return raw, scheme


class VocabEmbedding:
    """Token ids [T] -> vectors [T, hidden], times `scale` (rounded to the model's dtype, as the checkpoints expect).

    table: this rank's rows; empty where they are read out of the weight that a tied head's kernel packed.
    """

    def __init__(
        self, ctx: BuildContext, name: str, vocab_size: int, hidden_size: int, *, scale: float | None = None
    ) -> None:
        self._ctx, self._name = ctx, name
        self._scale = scale
        self._first = ctx.comm.rank * -(-vocab_size // ctx.comm.size)
        self._tied: LMHead | None = None
        self.table = torch.empty(0, hidden_size, dtype=ctx.dtype, device=ctx.torch_device)
        self._look_up: Callable[[Tensor], Tensor]
        ctx.weights.add(f"{name}.weight", Slot(shape=(vocab_size, hidden_size), load=self._load))

    def tie(self, head: LMHead) -> None:
        """Let `head` use this weight: a plain one is shared, a quantized one stays packed for the head."""
        self._tied = head

    def __call__(self, token_ids: Tensor) -> Tensor:
        x, comm = self._look_up(token_ids), self._ctx.comm
        return x if comm.size == 1 else comm.all_reduce(x)

    def _load(self, tensor: CheckpointTensor) -> None:
        raw, scheme = _read_rows(self._ctx, tensor, self._name)
        packed = None
        if self._tied is not None:
            packed = self._tied.take(raw, scheme)
        if packed is not None:
            self._look_up = lambda ids: packed(ids, self._first, self._scale)
            return
        self.table = plain(raw, scheme, self._ctx.dtype)
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
        self._ctx, self._name = ctx, name
        self._vocab_size, self._hidden_size = vocab_size, hidden_size
        self._scale, self._softcap = scale, softcap
        self._logits: Callable[..., Tensor] = ctx.op("logits", scaled=scale is not None, softcap=softcap is not None)
        self._kernel: Any = None
        self._packed: Any = None
        if tied_to is not None:
            tied_to.tie(self)
            ctx.weights.ignored.append(rf"{name.replace('.', '[.]')}[.]weight")
        else:
            ctx.weights.add(f"{name}.weight", Slot(shape=(vocab_size, hidden_size), load=self._load))

    def __call__(self, hidden: Tensor) -> Tensor:
        x: Tensor = self._kernel.apply(hidden, self._packed, None)
        if self._ctx.comm.size > 1:
            x = self._ctx.comm.all_gather(x, 1)[:, : self._vocab_size]
        if self._scale is None and self._softcap is None:
            return x
        return self._logits(x, self._scale, self._softcap)

    def take(self, raw: Tensor, scheme: QuantScheme | None) -> LookUp | None:
        """Use this weight: [V / ranks, hidden], or its packed rows. Returns what gives rows, if the kernel does."""
        shape = (raw.shape[0], self._hidden_size)
        self._kernel, self._packed = pack(self._ctx, raw, scheme, shape, bias=False)
        look_up = getattr(self._kernel, "look_up", None)
        return None if look_up is None else partial(look_up, self._packed)

    def _load(self, tensor: CheckpointTensor) -> None:
        self.take(*_read_rows(self._ctx, tensor, self._name))
