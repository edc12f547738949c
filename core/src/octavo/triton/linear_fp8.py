"""Linear layers in 8-bit floats: weights quantized at load, one scale a row; activations one scale a token.

    up to 8 tokens   y = gemv(x, W8) * scale_w             activations stay as they are: reading W8 is all the cost
    up to 64 or so   y = (x8 W8^T) * scale_x * scale_w     the stream-K kernel, which shares K out among programs
    more             likewise, by torch's product          on the fp8 matrix units, twice the rate of bfloat16

With more than 8 tokens x comes quantized from the norm or the activation before it, where core can arrange that.

Shapes: T tokens, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from octavo.plugin.contracts import Device
from octavo.plugin.data import YES, Support, no
from octavo.plugin.specs import LinearSpec, QuantScheme
from octavo.plugin.torch import ScaledRows, quantize_rows
from octavo.triton.activation import act_and_mul, act_and_mul_fp8
from octavo.triton.gemv import gemv_fp8, make_counters
from octavo.triton.linear_tuning import GATES, ProductTuning
from octavo.triton.quantize import quantize_fp8
from octavo.triton.skinny import skinny

Tensor = torch.Tensor

ONLINE = "online:fp8"
"""The packing of a plain weight [N, K] that the kernel is asked to quantize itself."""

SCHEME = QuantScheme(weight="fp8_e4m3", act="fp8_e4m3", granularity="channel", dynamic_act=True, packing=ONLINE)

MULTIPLE = 16
"""What the row-wise product asks of N and K."""
PLAIN_TOKENS = 8
"""Up to here decoding the weight costs less than quantizing the activations."""
ACT = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Fp8Weight:
    """weight in e4m3 [N, K]; scale float32 [1, N]. counters: see `octavo.triton.gemv.make_counters`. gate: as in the
    spec."""

    weight: Tensor
    scale: Tensor
    counters: Tensor
    gate: str | None
    tuning: ProductTuning


class Fp8Linear:
    """Weights and activations in fp8 e4m3, for layers whose scheme is `SCHEME`. A platform says which cards cannot
    (`refusal`) and how the others do it (`tuning_for`).

    fast_accum: whether torch's product may sum in less than float32, see `torch._scaled_mm`.
    """

    name: ClassVar[str] = "fp8"
    gates: ClassVar[tuple[str, ...]] = GATES
    scaled_rows_from: ClassVar[float] = PLAIN_TOKENS + 1
    fast_accum: ClassVar[bool] = False

    @classmethod
    def refusal(cls, device: Device) -> str:
        """Why the device does not multiply fp8; empty if it does."""
        return ""

    @classmethod
    def tuning_for(cls, device: Device) -> ProductTuning:
        return ProductTuning()

    def in_own_format(self, rows: ScaledRows) -> ScaledRows:
        """The same numbers in the kind of e4m3 that the card multiplies. rows: in core's kind, which is OCP's."""
        return rows

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if spec.scheme is None or spec.scheme.packing != ONLINE:
            return no(f"quantizes weights that are asked for as {ONLINE}")
        if reason := cls.refusal(device):
            return no(reason)
        if spec.act_dtype != "bfloat16" or spec.out_dtype != "bfloat16":
            return no(f"multiplies bfloat16 activations, not {spec.act_dtype} to {spec.out_dtype}")
        if spec.out_features % MULTIPLE or spec.in_features % MULTIPLE:
            return no(f"needs both sizes in multiples of {MULTIPLE}, not {spec.out_features}x{spec.in_features}")
        return YES

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Fp8Weight:
        """weights: "weight" [N, K], plain."""
        rows = self.in_own_format(ScaledRows(*quantize_rows(weights["weight"].to(device.torch_device))))
        return Fp8Weight(
            weight=rows.values,
            scale=rows.scale.reshape(1, -1),
            counters=make_counters(spec.out_features, device.torch_device),
            gate=spec.gate,
            tuning=self.tuning_for(device),
        )

    def apply(self, x: Tensor | ScaledRows, w: Fp8Weight, bias: Tensor | None) -> Tensor:
        """x bfloat16 [T, K] or ScaledRows -> bfloat16 [T, N], or [T, N / 2] behind a gate."""
        num_tokens, tuning = max(x.shape[0], 1), w.tuning
        num_out, num_in = w.weight.shape
        few: dict[str, Any] = {"gate": w.gate, "counters": w.counters, "overlap": tuning.overlap}
        if isinstance(x, Tensor) and num_tokens <= PLAIN_TOKENS:
            cut = tuning.gemv(num_out, num_in, num_tokens)
            return gemv_fp8(x, w.weight, w.scale[0], bias, config=cut, **few)
        rows = self._rows(x, w)
        if num_tokens <= tuning.skinny_tokens:
            few |= {"scale": w.scale[0], "x_scale": rows.scale, "out_dtype": ACT}
            few["config"] = tuning.skinny(num_out, num_in, num_tokens, itemsize=1)
            return skinny(rows.values, w.weight, bias, **few)
        y = self._product(rows, w, bias)
        return y if w.gate is None else act_and_mul(y, w.gate, overlap=tuning.overlap)

    def apply_scaled(self, x: Tensor | ScaledRows, w: Fp8Weight, bias: Tensor | None) -> ScaledRows:
        """A gated product [T, N / 2], quantized; by the kernel that applies the gate, where that is one of its own."""
        assert w.gate is not None, "only gated products are asked for in fp8"
        if x.shape[0] <= w.tuning.skinny_tokens:
            return self._rows(self.apply(x, w, bias), w)
        product = self._product(self._rows(x, w), w, bias)
        return ScaledRows(*act_and_mul_fp8(product, w.gate, dtype=w.weight.dtype, overlap=w.tuning.overlap))

    def _rows(self, x: Tensor | ScaledRows, w: Fp8Weight) -> ScaledRows:
        """The activations in the weight's kind of e4m3."""
        if isinstance(x, Tensor):
            return ScaledRows(*quantize_fp8(x, dtype=w.weight.dtype, overlap=w.tuning.overlap))
        return x if x.values.dtype == w.weight.dtype else self.in_own_format(x)

    def _product(self, x: ScaledRows, w: Fp8Weight, bias: Tensor | None) -> Tensor:
        return torch._scaled_mm(
            x.values,
            w.weight.t(),
            scale_a=x.scale,
            scale_b=w.scale,
            bias=bias,
            out_dtype=ACT,
            use_fast_accum=self.fast_accum,
        )
