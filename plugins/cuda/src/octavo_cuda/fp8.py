"""8-bit floating-point matrix products: weights quantized at load, one scale a row; activations one scale a token.

    up to 8 tokens   y = gemv(x, W8) * scale_w             activations stay as they are: reading W8 is all the cost
    up to 32         y = skinny(x, W8) * scale_w           likewise, on the matrix units
    more             y = (x8 W8^T) * scale_x * scale_w     on the fp8 matrix units, twice the rate of bfloat16

With more tokens x comes quantized from the norm or the activation before it where core can arrange that (`ScaledRows`).

Shapes: T tokens, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from octavo.plugin import YES, Device, LinearSpec, QuantScheme, Support, no
from octavo.plugin.torch import ScaledRows, quantize_rows

Tensor = torch.Tensor

ONLINE = "online:fp8"
"""The packing of a plain weight [N, K] that the kernel is asked to quantize itself."""

SCHEME = QuantScheme(weight="fp8_e4m3", act="fp8_e4m3", granularity="channel", dynamic_act=True, packing=ONLINE)

SINCE = (8, 9)
MULTIPLE = 16
"""What the row-wise product asks of N and K."""
SKINNY_TOKENS = 32
"""Up to here decoding the weight is taken to cost less than quantizing the activations: not measured yet."""
ACT = torch.bfloat16
GATES = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True, kw_only=True)
class Fp8Weight:
    """weight float8_e4m3fn [N, K]; scale float32 [1, N]. counters: see `octavo.triton.gemv.make_counters`.

    gate: as in the spec. overlap: how the card starts a kernel before the one before it has ended, an
    `octavo.triton.overlap.Overlap`.
    """

    weight: Tensor
    scale: Tensor
    counters: Tensor
    gate: str | None
    overlap: Any


class Fp8Linear:
    """Weights and activations in fp8 e4m3, for layers whose scheme is `SCHEME`."""

    name: ClassVar[str] = "fp8"
    gates: ClassVar[tuple[str, ...]] = GATES
    scaled_rows_from: ClassVar[int] = SKINNY_TOKENS + 1

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if spec.scheme is None or spec.scheme.packing != ONLINE:
            return no(f"quantizes weights that are asked for as {ONLINE}")
        if device.type != "cuda":
            return no(f"needs a cuda device, not {device.type}")
        if getattr(device, "capability", (0, 0)) < SINCE:
            return no("needs fp8 matrix units (compute capability 8.9)")
        if spec.act_dtype != "bfloat16" or spec.out_dtype != "bfloat16":
            return no(f"multiplies bfloat16 activations, not {spec.act_dtype} to {spec.out_dtype}")
        if spec.out_features % MULTIPLE or spec.in_features % MULTIPLE:
            return no(f"needs both sizes in multiples of {MULTIPLE}, not {spec.out_features}x{spec.in_features}")
        return YES

    def __init__(self) -> None:
        from octavo.triton.activation import act_and_mul, act_and_mul_fp8
        from octavo.triton.gemv import MAX_ROWS, gemv_fp8
        from octavo.triton.quantize import quantize_fp8
        from octavo.triton.skinny import skinny

        self._gemv_tokens = MAX_ROWS
        self._gemv, self._skinny, self._quantize = gemv_fp8, skinny, quantize_fp8
        self._act_and_mul, self._act_and_mul_fp8 = act_and_mul, act_and_mul_fp8

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Fp8Weight:
        """weights: "weight" [N, K], plain."""
        from octavo.triton.gemv import make_counters
        from octavo_cuda.overlap import overlap_for

        weight, scale = quantize_rows(weights["weight"].to(device.torch_device))
        return Fp8Weight(
            weight=weight,
            scale=scale.reshape(1, -1),
            counters=make_counters(spec.out_features, device.torch_device),
            gate=spec.gate,
            overlap=overlap_for(getattr(device, "capability", (0, 0))),
        )

    def apply(self, x: Tensor | ScaledRows, w: Fp8Weight, bias: Tensor | None) -> Tensor:
        """x bfloat16 [T, K] or ScaledRows -> bfloat16 [T, N], or [T, N / 2] behind a gate."""
        if isinstance(x, Tensor) and x.shape[0] <= SKINNY_TOKENS:
            few: dict[str, Any] = {"gate": w.gate, "counters": w.counters, "overlap": w.overlap}
            if x.shape[0] <= self._gemv_tokens:
                return self._gemv(x, w.weight, w.scale[0], bias, **few)
            return self._skinny(x, w.weight, bias, scale=w.scale[0], **few)
        y = self._product(x, w, bias)
        return y if w.gate is None else self._act_and_mul(y, w.gate, overlap=w.overlap)

    def apply_scaled(self, x: Tensor | ScaledRows, w: Fp8Weight, bias: Tensor | None) -> ScaledRows:
        """A gated product [T, N / 2], quantized by the kernel that applies the gate. T is above `SKINNY_TOKENS`."""
        assert w.gate is not None, "only a gated product ends in a kernel that can quantize"
        return ScaledRows(*self._act_and_mul_fp8(self._product(x, w, bias), w.gate, overlap=w.overlap))

    def _product(self, x: Tensor | ScaledRows, w: Fp8Weight, bias: Tensor | None) -> Tensor:
        values, scale = self._quantize(x, overlap=w.overlap) if isinstance(x, Tensor) else x
        return torch._scaled_mm(
            values, w.weight.t(), scale_a=scale, scale_b=w.scale, bias=bias, out_dtype=ACT, use_fast_accum=True
        )
