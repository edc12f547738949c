"""Matrix products: plain weights, and the platform's own 8-bit format. T tokens, N outputs, K inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.plugin import YES, Device, LinearSpec, Support, no
from octavo_acme_full.kernels.library import LIBRARY, address
from octavo_acme_full.quant import PACKING, codebook, octave_steps

TILE = 16
"""As in kernels/acme.c."""


@dataclass(frozen=True)
class Weight:
    """tiles [ceil(N / TILE), K, TILE], float32 or codes; book: what the codes mean, None for numbers."""

    tiles: Tensor
    book: Tensor | None
    rows: int


class AcmeLinear:
    """y = x W^T + b in float32. Codes stay codes in memory: a quarter of the bytes."""

    name: ClassVar[str] = "acme"

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if (spec.act_dtype, spec.out_dtype) != ("float32", "float32"):
            return no(f"the unit computes in float32, not {spec.act_dtype} to {spec.out_dtype}")
        if spec.gate is not None:
            return no("no gated products")
        if spec.scheme is not None and not spec.scheme.packing.startswith(f"{PACKING}:"):
            return no(f"no {spec.scheme.packing} weights")
        return YES

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Weight:
        weight = weights["weight"]
        rows, columns = weight.shape
        padded = weight.new_zeros(-(-rows // TILE) * TILE, columns)
        padded[:rows] = weight
        tiles = padded.view(-1, TILE, columns).transpose(1, 2).contiguous()
        book = None if spec.scheme is None else codebook(octave_steps(spec.scheme))
        return Weight(tiles, book, rows)

    def apply(self, x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
        out = torch.empty(x.shape[0], w.rows)
        sizes = (x.shape[0], w.rows, x.shape[1])
        if w.book is None:
            LIBRARY.acme_linear(address(x), address(w.tiles), address(bias), address(out), *sizes)
        else:
            LIBRARY.acme_linear_codes(
                address(x), address(w.tiles), address(w.book), address(bias), address(out), *sizes
            )
        return out
