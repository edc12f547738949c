"""Products with 4-bit weights that stay packed: a quarter of the memory to keep and to read.

    up to 4 tokens     the HIP kernel, where it can be compiled    both read core's own layout of 4-bit codes
    up to 256 tokens   core's Triton kernel, decoded tile by tile
    more               unpacked into a temporary, then hipBLASLt   the product outweighs writing and reading it

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
from octavo_rocm import products, torch_ops
from octavo_rocm.linear import few_tokens_refusal

Tensor = torch.Tensor

GATES = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True, kw_only=True)
class PackedInt4:
    """packed: an `octavo.triton.int4.Int4Weight`. counters: see `octavo.triton.gemv.make_counters`.

    gate: as in the spec. tuning: an `octavo_rocm.tuning.Tuning`. hip: whether the HIP kernel takes few tokens.
    """

    packed: Any
    counters: Tensor
    gate: str | None
    tuning: Any
    hip: bool


class Int4Linear:
    """Weights of 4-bit codes with a scale and an offset for every 32 columns: GGUF's Q4_0, Q4_1 and Q4_K, and
    `--quantization int4`. Codes are exact; scales and offsets are kept in float16."""

    name: ClassVar[str] = "int4"
    gates: ClassVar[tuple[str, ...]] = GATES
    hip: ClassVar[bool] = True

    @classmethod
    def with_hip(cls, hip: bool) -> type[Int4Linear]:
        """This kernel with or without the HIP one."""
        names = {"hip": hip, "__module__": cls.__module__, "__doc__": cls.__doc__}
        return type(cls.__name__, (cls,), names)

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if not has_int4_groups(spec.scheme):
            return no(f"reads 4-bit codes, not {spec.scheme.packing if spec.scheme else 'plain weights'}")
        reason = few_tokens_refusal(spec, device)
        return no(reason) if reason else YES

    def __init__(self) -> None:
        from octavo.triton import int4
        from octavo.triton.activation import act_and_mul

        self._int4, self._act_and_mul = int4, act_and_mul

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> PackedInt4:
        """weights: canonical tensors of `spec.scheme`."""
        from octavo.triton.gemv import make_counters
        from octavo_rocm.tuning import tuning_for

        assert spec.scheme is not None
        groups = int4_groups({name: t.to(device.torch_device) for name, t in weights.items()}, spec.scheme)
        return PackedInt4(
            packed=self._int4.pack(*groups),
            counters=make_counters(spec.out_features, device.torch_device),
            gate=spec.gate,
            tuning=tuning_for(device),
            hip=self.hip and not products.objection(device, "Int4", spec.act_dtype),
        )

    def apply(self, x: Tensor, w: PackedInt4, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N], or [T, N / 2] behind a gate."""
        num_tokens, words = x.shape[0], w.packed.words
        if w.hip and products.takes(x):
            y = torch_ops.gemv(x, words, w.packed.groups, bias, "Int4")
        elif num_tokens <= self._int4.MAX_ROWS:
            config = w.tuning.int4(words.shape[0], w.packed.num_in, max(num_tokens, 1))
            few = {"gate": w.gate, "config": config, "counters": w.counters, "overlap": w.tuning.overlap}
            return self._int4.product(x, w.packed, bias, **few)
        else:
            y = F.linear(x, self._int4.unpack(w.packed, x.dtype), bias)
        return y if w.gate is None else self._act_and_mul(y, w.gate)
