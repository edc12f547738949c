"""Linear layers: checkpoint tensors, cut to this rank's share, packed into as few kernel calls as their formats allow.

    q_proj [H D, K]     one format       one kernel call        x [T, K] -> [T, q | k | v]
    k_proj [Hkv D, K]   for all three
    v_proj [Hkv D, K]   another for v    two, concatenated

A layer packs as soon as its last tensor arrives, and drops the raw ones: loading never holds more than one layer twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Protocol

import torch

from octavo.errors import ConfigError
from octavo.layers.context import BuildContext, dtype_name
from octavo.layers.weight import Range, Weight, joined, load_weight, runs
from octavo.plugin.contracts import Communicator
from octavo.plugin.quant import MatrixSpec
from octavo.plugin.specs import LinearSpec
from octavo.plugin.torch import ScaledRows
from octavo.weights.slots import CheckpointTensor, Slot

Tensor = torch.Tensor
Rows = Tensor | ScaledRows
"""Activations [T, K], plain or in fp8."""
NEVER = math.inf


class TakesRows(Protocol):
    """A layer that takes `ScaledRows` from so many tokens on, `NEVER` if not at all."""

    @property
    def scaled_rows_from(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One matrix of the checkpoint in a linear layer.

    name: its module, without ".weight". out_features: its rows in the checkpoint.
    keep: the ranges of rows that this rank takes, in the order in which the layer gives them out.
    """

    name: str
    out_features: int
    keep: tuple[Range, ...]


def share(total: int, comm: Communicator, what: str) -> Range:
    """This rank's equal part of `total`. Raises ConfigError if the ranks do not divide it."""
    if total % comm.size:
        raise ConfigError(f"tensor_parallel_size {comm.size} does not divide {what} ({total}): choose one that does")
    length = total // comm.size
    return comm.rank * length, length


class Linear:
    """y = x W^T + b for a stack of shards: x [T, K] -> [T, kept rows of all shards], in the model's dtype.

    columns: the range of input features of this rank; None takes all. bias: every shard has a ".bias".
    gate: the first half of the rows are gates of the second, see `LinearSpec.gate`; then y is [T, kept rows / 2].
    """

    def __init__(
        self,
        ctx: BuildContext,
        shards: Sequence[Shard],
        in_features: int,
        *,
        columns: Range | None = None,
        bias: bool = False,
        gate: str | None = None,
    ) -> None:
        self._ctx = ctx
        self._gate = gate
        self._shards = tuple(shards)
        self._sizes = [sum(length for _, length in shard.keep) for shard in shards]
        self._raw: dict[int, Weight] = {}
        self._parts: list[tuple[Any, Any, Tensor | None]] = []
        """(kernel, what its prepare made, bias) of each kernel call"""
        self._activate: Callable[[Tensor], Tensor] | None = None
        self._join: Callable[[Tensor, Tensor], Tensor]
        self._bias = torch.zeros(sum(self._sizes), dtype=ctx.dtype, device=ctx.torch_device) if bias else None
        for i, shard in enumerate(shards):
            matrix = MatrixSpec(
                name=shard.name, kind="linear", out_features=shard.out_features, in_features=in_features
            )
            load_weight(ctx, matrix, partial(self._take, i), rows=shard.keep, columns=columns)
            if bias:
                ctx.weights.add(
                    f"{shard.name}.bias", Slot(shape=(shard.out_features,), load=partial(self._take_bias, i))
                )

    def __call__(self, x: Rows) -> Tensor:
        parts = self._parts
        if len(parts) == 1:
            kernel, packed, bias = parts[0]
            y: Tensor = kernel.apply(x, packed, bias)
            return y
        y = reduce(self._join, (kernel.apply(x, packed, bias) for kernel, packed, bias in parts))
        return y if self._activate is None else self._activate(y)

    @property
    def scaled_rows_from(self) -> float:
        """From how many tokens on x may be `ScaledRows`, and is better so."""
        return getattr(self._parts[0][0], "scaled_rows_from", NEVER) if len(self._parts) == 1 else NEVER

    def scaled(self, x: Rows) -> ScaledRows:
        """The result as `ScaledRows`. x [T, K], T at least `scaled_rows_from`."""
        kernel, packed, bias = self._parts[0]
        rows: ScaledRows = kernel.apply_scaled(x, packed, bias)
        return rows

    def _take(self, index: int, weight: Weight) -> None:
        self._raw[index] = weight
        if len(self._raw) == len(self._shards):
            self._pack()

    def _take_bias(self, index: int, tensor: CheckpointTensor) -> None:
        assert self._bias is not None
        place = sum(self._sizes[:index])
        for start, length in self._shards[index].keep:
            self._bias[place : place + length] = tensor.read(start=start, length=length)
            place += length

    def _pack(self) -> None:
        """Neighbours of one format become one kernel call; if that is all, the kernel applies the gate as well."""
        parts = runs([self._raw[i] for i in range(len(self._shards))])
        self._raw.clear()
        gate = self._gate if len(parts) == 1 else None
        if len(parts) > 1:
            self._join = self._ctx.op("join")
        if self._gate and not gate:
            act_and_mul = self._ctx.op("act_and_mul", kind=self._gate, size=sum(self._sizes) // 2)
            self._activate = lambda y: act_and_mul(y, self._gate)
        place = 0
        for part in parts:
            weight = joined(part)
            bias = None if self._bias is None else self._bias[place : place + weight.num_rows]
            place += weight.num_rows
            self._parts.append((*pack(self._ctx, weight, bias is not None, gate), bias))


class RowLinear(Linear):
    """A linear layer cut along its input features; the ranks' partial sums are added. x [T, K / ranks] -> [T, N]."""

    def __init__(
        self, ctx: BuildContext, name: str, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        comm = ctx.comm
        columns = share(in_features, comm, f"the input features of {name}") if comm.size > 1 else None
        shard = Shard(name=name, out_features=out_features, keep=((0, out_features),))
        super().__init__(ctx, [shard], in_features, columns=columns, bias=bias)
        self._all_reduce = comm.all_reduce if comm.size > 1 else None
        self._adds_bias = comm.rank == 0

    def __call__(self, x: Rows) -> Tensor:
        if self._all_reduce is None:
            return super().__call__(x)
        kernel, packed, bias = self._parts[0]
        # Added once: the sum over ranks would count it as often as there are ranks.
        return self._all_reduce(kernel.apply(x, packed, bias if self._adds_bias else None))


def pack(ctx: BuildContext, weight: Weight, bias: bool, gate: str | None = None) -> tuple[Any, Any]:
    """Hand a weight to the best kernel: (the kernel, what its prepare made)."""
    spec = LinearSpec(
        in_features=weight.num_columns,
        out_features=weight.num_rows,
        act_dtype=dtype_name(ctx.dtype),
        out_dtype=dtype_name(ctx.dtype),
        scheme=weight.scheme,
        bias=bias,
        max_tokens=ctx.limits.max_num_tokens,
        gate=gate,
    )
    kernel = ctx.kernels.linear_kernel(spec, ctx.device)
    return kernel, kernel.prepare(weight.tensors, spec, ctx.device)
