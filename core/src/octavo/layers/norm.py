"""RMSNorm, alone or with the residual addition before it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo.layers.context import BuildContext
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
        ctx.weights.add(f"{name}.weight", Slot(shape=(width,), load=self._load))

    def __call__(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape, a new tensor."""
        return self._norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual). Gives up both inputs."""
        return self._add_norm(x, residual, self.weight, self.eps)

    def _load(self, tensor: CheckpointTensor) -> None:
        value = tensor.read()
        self.weight.copy_(value.float() + 1.0 if self._unit_offset else value)
