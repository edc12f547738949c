"""Routed experts, plainly: one expert after another over the tokens that chose it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F

from octavo.ops.activation import ACTIVATIONS, act_and_mul
from octavo.plugin.contracts import Device
from octavo.plugin.data import YES, Support, no
from octavo.plugin.specs import MoESpec, QuantScheme
from octavo.plugin.torch import dequantize_weight

Tensor = torch.Tensor


class ReferenceMoE:
    """The expert kernel of a platform that brings none; quantized experts are dequantized once, at load."""

    name: ClassVar[str] = "reference"

    @classmethod
    def supports(cls, spec: MoESpec, device: Device) -> Support:
        if spec.activation not in ACTIVATIONS:
            return no(f"activation {spec.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        return YES

    def prepare(self, weights: Mapping[str, Tensor], spec: MoESpec, device: Device) -> tuple[Tensor, Tensor, str]:
        """weights: see `MoEKernel`."""
        dtype = getattr(torch, spec.act_dtype)
        gate_up, down = (_plain(weights, name, spec.scheme, dtype) for name in ("gate_up", "down"))
        return gate_up.to(device.torch_device), down.to(device.torch_device), spec.activation

    def apply(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w: tuple[Tensor, Tensor, str],
        expert_map: Tensor | None,
    ) -> Tensor:
        """x [T, K]; topk_ids int [T, k] of global experts; topk_weights [T, k]. Returns a new [T, K] in x's dtype.

        expert_map int [experts of all ranks]: global expert -> place in this rank's weights, -1 for another rank's.
        """
        gate_up, down, kind = w
        local = topk_ids if expert_map is None else expert_map[topk_ids]
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(gate_up.shape[0]):
            token, choice = torch.where(local == expert)
            if token.numel():
                hidden = act_and_mul(F.linear(x[token], gate_up[expert]), kind)
                share = topk_weights[token, choice].float()[:, None]
                out.index_add_(0, token, F.linear(hidden, down[expert]).float() * share)
        return out.to(x.dtype)


def _plain(weights: Mapping[str, Tensor], name: str, scheme: QuantScheme | None, dtype: torch.dtype) -> Tensor:
    """The matrices of all experts, [E, rows, columns]."""
    if scheme is None:
        return weights[name].to(dtype)
    stacked = {key.removeprefix(f"{name}."): t for key, t in weights.items() if key.startswith(f"{name}.")}
    experts = range(len(next(iter(stacked.values()))))
    return torch.stack([dequantize_weight({key: t[e] for key, t in stacked.items()}, scheme, dtype) for e in experts])
