"""Products with 4-bit weights that stay packed: a quarter of the memory to keep and to read.

    up to 256 tokens   decoded in registers, tile by tile       reading the codes is most of the cost
    more               unpacked into a temporary, then cuBLAS   the product outweighs writing and reading it

Shapes: T tokens, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from octavo.plugin import YES, Device, LinearSpec, Support, no
from octavo.plugin.torch import has_int4_groups, int4_groups
from octavo_cuda.fp8 import GATES
from octavo_cuda.linear import GEMV_DTYPES, refusal

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class PackedInt4:
    """packed: an `octavo.triton.int4.Int4Weight`. counters: see `octavo.triton.gemv.make_counters`.

    gate: as in the spec. overlap: how the card starts a kernel before the one before it has ended, an
    `octavo.triton.overlap.Overlap`.
    """

    packed: Any
    counters: Tensor
    gate: str | None
    overlap: Any


class Int4Linear:
    """Weights of 4-bit codes with a scale and an offset for every 32 columns: GGUF's Q4_0, Q4_1 and Q4_K.

    Codes are exact; scales and offsets are kept in float16, as Q4_0 and Q4_1 store them (Q4_K's products of two
    factors are rounded to it, far below what rounding the weight to bfloat16 would lose).
    """

    name: ClassVar[str] = "int4"
    gates: ClassVar[tuple[str, ...]] = GATES

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if not has_int4_groups(spec.scheme):
            return no(f"reads 4-bit codes, not {spec.scheme.packing if spec.scheme else 'plain weights'}")
        if reason := refusal(spec, device):
            return no(reason)
        if spec.act_dtype not in GEMV_DTYPES:
            return no(f"multiplies {' and '.join(GEMV_DTYPES)}, not {spec.act_dtype}")
        return YES

    def __init__(self) -> None:
        from octavo.triton import int4
        from octavo.triton.activation import act_and_mul

        self._int4, self._act_and_mul = int4, act_and_mul

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> PackedInt4:
        """weights: canonical tensors of `spec.scheme`."""
        from octavo.triton.gemv import make_counters
        from octavo_cuda.overlap import overlap_for

        assert spec.scheme is not None
        groups = int4_groups({name: t.to(device.torch_device) for name, t in weights.items()}, spec.scheme)
        return PackedInt4(
            packed=self._int4.pack(*groups),
            counters=make_counters(spec.out_features, device.torch_device),
            gate=spec.gate,
            overlap=overlap_for(getattr(device, "capability", (0, 0))),
        )

    def apply(self, x: Tensor, w: PackedInt4, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N], or [T, N / 2] behind a gate."""
        if x.shape[0] <= self._int4.MAX_ROWS:
            return self._int4.product(x, w.packed, bias, gate=w.gate, counters=w.counters, overlap=w.overlap)
        y = F.linear(x, self._int4.unpack(w.packed, x.dtype), bias)
        return y if w.gate is None else self._act_and_mul(y, w.gate, overlap=w.overlap)
