"""The gated feed-forward block: down(act(gate(x)) * up(x)), gate, up and activation in one matrix multiplication."""

from __future__ import annotations

import torch

from octavo.errors import UnsupportedModelError
from octavo.layers.context import BuildContext
from octavo.layers.linear import Linear, RowLinear, Rows, Shard, share

KINDS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
"""The activation names of configs -> the kinds of `act_and_mul`."""


class GatedMLP:
    """x [T, hidden] -> [T, hidden].

    prefix: the module in the checkpoint. activation: as in the model's config. fused: the checkpoint holds one
    `gate_up_proj` instead of `gate_proj` and `up_proj`. Raises UnsupportedModelError for an unknown activation.
    """

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool = False,
        fused: bool = False,
    ) -> None:
        if activation not in KINDS:
            raise UnsupportedModelError(f"{prefix}: activation {activation!r} is not one of {', '.join(KINDS)}")
        size = intermediate_size
        start, length = share(size, ctx.comm, "intermediate_size")
        if fused:
            keep = ((start, length), (size + start, length))
            shards = [Shard(name=f"{prefix}.gate_up_proj", out_features=2 * size, keep=keep)]
        else:
            shards = [
                Shard(name=f"{prefix}.{name}", out_features=size, keep=((start, length),))
                for name in ("gate_proj", "up_proj")
            ]
        self._gate_up = Linear(ctx, shards, hidden_size, bias=bias, gate=KINDS[activation])
        self._down = RowLinear(ctx, f"{prefix}.down_proj", size, hidden_size, bias=bias)

    def __call__(self, x: Rows) -> torch.Tensor:
        if x.shape[0] >= max(self._gate_up.scaled_rows_from, self._down.scaled_rows_from):
            return self._down(self._gate_up.scaled(x))
        return self._down(self._gate_up(x))

    @property
    def scaled_rows_from(self) -> float:
        """From how many tokens on x may be `ScaledRows`, and is better so."""
        return self._gate_up.scaled_rows_from
