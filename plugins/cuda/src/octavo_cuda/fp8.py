"""8-bit floating-point matrix products: weights quantized at load, one scale a row; activations one scale a token.

    up to 8 tokens   y = gemv(x, W8) * scale_w             activations stay as they are: reading W8 is all the cost
    up to 64         y = (x8 W8^T) * scale_x * scale_w     core's stream-K kernel, which shares K out among programs
    more             likewise, by cuBLAS                   on the fp8 matrix units, twice the rate of bfloat16

With more than 8 tokens x comes quantized from the norm or the activation before it, where core can arrange that.

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
PLAIN_TOKENS = 8
"""Up to here decoding the weight costs less than quantizing the activations."""
SKINNY_TOKENS = 64
"""Up to here cuBLAS, which gives all of K to one program, takes longer: 43 us against 25 to 28 for a product of 4096
outputs and 14336 inputs on an H200. Above, it wins all but the longest K."""
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
    scaled_rows_from: ClassVar[int] = PLAIN_TOKENS + 1

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
        from octavo.triton.gemv import gemv_fp8
        from octavo.triton.quantize import quantize_fp8
        from octavo.triton.skinny import skinny

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
        few: dict[str, Any] = {"gate": w.gate, "counters": w.counters, "overlap": w.overlap}
        if isinstance(x, Tensor):
            if x.shape[0] <= PLAIN_TOKENS:
                return self._gemv(x, w.weight, w.scale[0], bias, **few)
            x = ScaledRows(*self._quantize(x, overlap=w.overlap))
        if x.shape[0] <= SKINNY_TOKENS:
            return self._skinny(x.values, w.weight, bias, scale=w.scale[0], x_scale=x.scale, out_dtype=ACT, **few)
        y = self._product(x, w, bias)
        return y if w.gate is None else self._act_and_mul(y, w.gate, overlap=w.overlap)

    def apply_scaled(self, x: Tensor | ScaledRows, w: Fp8Weight, bias: Tensor | None) -> ScaledRows:
        """A gated product [T, N / 2], quantized; by the kernel that applies the gate, where that is one of its own."""
        assert w.gate is not None, "only gated products are asked for in fp8"
        if x.shape[0] <= SKINNY_TOKENS:
            return ScaledRows(*self._quantize(self.apply(x, w, bias), overlap=w.overlap))
        rows = ScaledRows(*self._quantize(x, overlap=w.overlap)) if isinstance(x, Tensor) else x
        return ScaledRows(*self._act_and_mul_fp8(self._product(rows, w, bias), w.gate, overlap=w.overlap))

    def _product(self, x: ScaledRows, w: Fp8Weight, bias: Tensor | None) -> Tensor:
        return torch._scaled_mm(
            x.values, w.weight.t(), scale_a=x.scale, scale_b=w.scale, bias=bias, out_dtype=ACT, use_fast_accum=True
        )
