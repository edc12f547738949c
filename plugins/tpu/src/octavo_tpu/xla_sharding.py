"""Tensor parallel by annotation: one process, one program, and XLA divides it over all chips (GSPMD, Xu et al., 2021).

    weight [N, K], N > K    rows      [ N / chips, K ]     each chip gives a part of the outputs
    weight [N, K], else     columns   [ N, K / chips ]     each chip gives a partial sum: XLA adds an all-reduce
    KV cache [B, Hkv, N, D] heads     [ B, Hkv / chips, N, D ]

Only where a tensor lies is said here. What XLA makes of it (which parts travel when) is its own affair, and the answer
does not depend on it: a size that the chips do not divide is held by each of them whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor

from octavo.plugin import YES, Device, KVPlan, KVView, LinearSpec, Support, no
from octavo.plugin.torch import dequantize_weight

XLA: Any = torch_xla._XLAC
CHIPS = "chips"


@cache
def mesh() -> xs.Mesh:
    """All chips, in one row."""
    count = xr.global_runtime_device_count()
    return xs.Mesh(np.arange(count), (count,), (CHIPS,))


def divide(t: Tensor, dim: int) -> Tensor:
    """Let each chip hold its part of `t` along `dim`, if the chips divide it."""
    if t.shape[dim] % mesh().size() == 0:
        xm.wait_device_ops()  # a result that is still being computed cannot be divided
        xs.mark_sharding(t, mesh(), tuple(CHIPS if i == dim else None for i in range(t.dim())))
    return t


def keep_sharding(owners: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Say of what takes the place of tensors that it lies as they do; XLA would choose."""
    if not xr.is_spmd():
        return
    for owner, result in zip(owners, results, strict=True):
        sharding = XLA._get_xla_op_sharding(owner)
        replicated = mesh().get_op_sharding((None,) * owner.dim())
        XLA._xla_mark_sharding(result, replicated if sharding is None else sharding)


def divided_kv(plan: KVPlan, device: Device) -> list[KVView]:
    """`KVLayout.alloc`: each chip holds its KV heads."""
    spec = plan.spec
    shape = (plan.num_blocks, spec.num_kv_heads, spec.block_size, spec.content)

    def part() -> Tensor:
        return divide(torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device.torch_device), 1)

    return [KVView(k=part(), v=part()) for _ in range(plan.num_layers)]


class DividedLinear:
    """A product whose weight is divided over the chips."""

    name: ClassVar[str] = "divided"

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if spec.scheme is not None and spec.scheme.act is not None:
            return no("activations in the model's dtype only")
        return YES

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Tensor:
        """weights: plain, or packed: they are unpacked, as the other kernels of this platform do."""
        dtype = getattr(torch, spec.act_dtype)
        weight = weights["weight"] if spec.scheme is None else dequantize_weight(weights, spec.scheme, dtype)
        return divide(weight, 0 if spec.out_features > spec.in_features else 1)

    def apply(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x, w, bias)
