"""RMSNorm, alone, with the residual addition before it, or over rows that ranks share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo.layers.context import BuildContext
from octavo.layers.linear import Rows, TakesRows
from octavo.plugin.torch import ScaledRows
from octavo.weights.slots import CheckpointTensor, Slot

Tensor = torch.Tensor


class RMSNorm:
    """x / rms(x) * weight over the last dimension.

    name: the module in the checkpoint. float32_weight: keep the weight in float32, so that the product is rounded once
    (see `octavo.ops.norm.rms_norm`). unit_offset: the checkpoint stores weight - 1 (Gemma); implies float32_weight.
    """

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        width: int,
        eps: float,
        *,
        float32_weight: bool = False,
        unit_offset: bool = False,
    ) -> None:
        self.eps = eps
        self._unit_offset = unit_offset
        dtype = torch.float32 if float32_weight or unit_offset else ctx.dtype
        self.weight = torch.ones(width, dtype=dtype, device=ctx.torch_device)
        self._norm: Callable[..., Tensor] = ctx.op("rms_norm", size=width)
        self._add_norm: Callable[..., tuple[Tensor, Tensor]] = ctx.op("add_rms_norm", size=width)
        self._add_norm_fp8: Callable[..., tuple[Tensor, Tensor, Tensor]] = ctx.op("add_rms_norm_fp8", size=width)
        ctx.weights.add(f"{name}.weight", Slot(shape=(width,), load=self._load))

    def __call__(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape, a new tensor."""
        return self._norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual). Gives up both inputs."""
        return self._add_norm(x, residual, self.weight, self.eps)

    def add_before(self, next_layer: TakesRows, x: Tensor, residual: Tensor) -> tuple[Rows, Tensor]:
        """As `add`, with the norm in the form in which `next_layer` wants that many tokens."""
        if x.shape[0] < next_layer.scaled_rows_from:
            return self.add(x, residual)
        values, scale, total = self._add_norm_fp8(x, residual, self.weight, self.eps)
        return ScaledRows(values, scale), total

    def _load(self, tensor: CheckpointTensor) -> None:
        value = tensor.read()
        self.weight.copy_(value.float() + 1.0 if self._unit_offset else value)


class ShardedRMSNorm:
    """The RMS norm of rows that the ranks hold in parts; float32 inside.

    width: of a whole row. part: (start, length) of this rank's features; ranks may hold the same part, all parts
    equally often (KV heads that are fewer than the ranks).
    """

    def __init__(self, ctx: BuildContext, name: str, width: int, part: tuple[int, int], eps: float) -> None:
        self._comm, self._part, self._eps = ctx.comm, part, eps
        self._weight = torch.ones(part[1], dtype=torch.float32, device=ctx.torch_device)
        ctx.weights.add(f"{name}.weight", Slot(shape=(width,), load=self._load))

    def __call__(self, x: Tensor) -> Tensor:
        """[T, part] -> the same shape, a new tensor."""
        values = x.float()
        # Every part is counted as often as any other, so the mean over ranks is the mean over the row.
        total = self._comm.all_reduce(values.square().mean(dim=-1, keepdim=True))
        return (values * torch.rsqrt(total / self._comm.size + self._eps) * self._weight).to(x.dtype)

    def _load(self, tensor: CheckpointTensor) -> None:
        self._weight.copy_(tensor.read(start=self._part[0], length=self._part[1]))
