"""Linear layers with 4-bit weights that stay packed: a quarter of the memory to keep and to read.

    up to 256 tokens   decoded in registers, tile by tile              reading the codes is most of the cost
    more               unpacked into a temporary, then torch's product    which outweighs writing and reading it

Shapes: T tokens, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from octavo.plugin.contracts import Device
from octavo.plugin.data import YES, Support, no
from octavo.plugin.specs import LinearSpec
from octavo.plugin.torch import has_int4_groups, int4_groups
from octavo.triton import int4
from octavo.triton.activation import act_and_mul
from octavo.triton.gemv import make_counters
from octavo.triton.linear_tuning import GATES, ProductTuning

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class PackedInt4:
    """counters: see `octavo.triton.gemv.make_counters`. gate: as in the spec."""

    packed: int4.Int4Weight
    counters: Tensor
    gate: str | None
    tuning: ProductTuning


class Int4Linear:
    """Weights of 4-bit codes with a scale and an offset for every 32 columns: GGUF's Q4_0, Q4_1 and Q4_K, and
    `--quantization int4`. A platform says what its cards cannot do (`refusal`) and how they do it (`tuning_for`).

    Codes are exact; scales and offsets are kept in float16, as Q4_0 and Q4_1 store them (Q4_K's products of two
    factors are rounded to it, far below what rounding the weight to bfloat16 would lose).
    """

    name: ClassVar[str] = "int4"
    gates: ClassVar[tuple[str, ...]] = GATES

    @classmethod
    def refusal(cls, spec: LinearSpec, device: Device) -> str:
        """Why the platform's products of few tokens do not take the spec, whatever its weight; empty if they do."""
        return ""

    @classmethod
    def tuning_for(cls, device: Device) -> ProductTuning:
        return ProductTuning()

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if not has_int4_groups(spec.scheme):
            return no(f"reads 4-bit codes, not {spec.scheme.packing if spec.scheme else 'plain weights'}")
        reason = cls.refusal(spec, device)
        return no(reason) if reason else YES

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> PackedInt4:
        """weights: canonical tensors of `spec.scheme`."""
        assert spec.scheme is not None
        groups = int4_groups({name: t.to(device.torch_device) for name, t in weights.items()}, spec.scheme)
        return PackedInt4(
            packed=int4.pack(*groups),
            counters=make_counters(spec.out_features, device.torch_device),
            gate=spec.gate,
            tuning=self.tuning_for(device),
        )

    def apply(self, x: Tensor, w: PackedInt4, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N], or [T, N / 2] behind a gate."""
        num_tokens, overlap = x.shape[0], w.tuning.overlap
        if num_tokens <= int4.MAX_ROWS:
            config = w.tuning.int4(w.packed.words.shape[0], w.packed.num_in, max(num_tokens, 1))
            return int4.product(x, w.packed, bias, gate=w.gate, config=config, counters=w.counters, overlap=overlap)
        y = F.linear(x, int4.unpack(w.packed, x.dtype), bias)
        return y if w.gate is None else act_and_mul(y, w.gate, overlap=overlap)
