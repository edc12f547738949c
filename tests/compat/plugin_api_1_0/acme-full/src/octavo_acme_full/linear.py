"""Matrix products: plain weights, and the platform's own 4-bit format. T tokens, N outputs, K inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.plugin import YES, Device, LinearSpec, Support, no
from octavo_acme_full.kernels.library import LIBRARY, address
from octavo_acme_full.quant import NAME, group_of

TILE = 16
"""As in kernels/acme.c."""


@dataclass(frozen=True)
class Weight:
    """tiles [ceil(N / TILE), K, TILE] float32, or [ceil(N / TILE), K / 2, TILE] of two codes a byte; scales float32
    [ceil(N / TILE), K / group, TILE], None for numbers."""

    tiles: Tensor
    scales: Tensor | None
    group: int
    rows: int


class AcmeLinear:
    """y = x W^T + b in float32. Codes stay codes in memory: an eighth of the bytes."""

    name: ClassVar[str] = "acme"

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if (spec.act_dtype, spec.out_dtype) != ("float32", "float32"):
            return no(f"the unit computes in float32, not {spec.act_dtype} to {spec.out_dtype}")
        if spec.gate is not None:
            return no("no gated products")
        if spec.scheme is not None and not spec.scheme.packing.startswith(f"{NAME}:"):
            return no(f"no {spec.scheme.packing} weights")
        return YES

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Weight:
        if spec.scheme is None:
            return Weight(tiled(weights["weight"]), None, 0, spec.out_features)
        scales = tiled(weights["weight_scale"].float())
        return Weight(tiled(weights["weight_packed"]), scales, group_of(spec.scheme), spec.out_features)

    def apply(self, x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
        out = torch.empty(x.shape[0], w.rows)
        sizes = (x.shape[0], w.rows, x.shape[1])
        if w.scales is None:
            LIBRARY.acme_linear(address(x), address(w.tiles), address(bias), address(out), *sizes)
        else:
            addresses = (address(x), address(w.tiles), address(w.scales), address(bias), address(out))
            LIBRARY.acme_linear_groups(*addresses, *sizes, w.group)
        return out


def tiled(rows: Tensor) -> Tensor:
    """[N, C] -> [ceil(N / TILE), C, TILE], padded with zeros."""
    padded = rows.new_zeros(-(-len(rows) // TILE) * TILE, rows.shape[1])
    padded[: len(rows)] = rows
    return padded.view(-1, TILE, rows.shape[1]).transpose(1, 2).contiguous()
