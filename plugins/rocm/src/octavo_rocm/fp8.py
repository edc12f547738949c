"""8-bit floating-point matrix products: weights quantized at load, one scale a row; activations one scale a token.

    up to 8 tokens   y = gemv(x, W8) * scale_w             activations stay as they are: reading W8 is all the cost
    up to 64         y = (x8 W8^T) * scale_x * scale_w     core's stream-K kernel, which shares K out among programs
    more             likewise, by hipBLASLt                on the fp8 matrix units

The matrix units of CDNA3 multiply "fnuz" numbers, whose exponent is biased by one more than OCP's: the same bits are
half the number. So OCP's numbers become theirs, exactly, by doubling the scale; only minus zero, which is NaN there,
must become zero.

Shapes: T tokens, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from octavo.plugin import YES, Device, LinearSpec, Support, no
from octavo.plugin.torch import ScaledRows, quantize_rows
from octavo_rocm.device import target_for
from octavo_rocm.int4 import GATES

Tensor = torch.Tensor

ONLINE = "online:fp8"
"""The packing of a plain weight [N, K] that the kernel is asked to quantize itself."""
OCP, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
MINUS_ZERO = 0x80
MULTIPLE = 16
"""What the row-wise product asks of N and K."""
PLAIN_TOKENS = 8
SKINNY_TOKENS = 64
ACT = torch.bfloat16


def in_format(rows: ScaledRows, dtype: torch.dtype) -> ScaledRows:
    """The same numbers in the kind of e4m3 that a chip multiplies."""
    if rows.values.dtype == dtype:
        return rows
    assert (rows.values.dtype, dtype) == (OCP, FNUZ), f"{rows.values.dtype} cannot become {dtype} exactly"
    bits = rows.values.view(torch.uint8)
    return ScaledRows(torch.where(bits == MINUS_ZERO, 0, bits).to(torch.uint8).view(FNUZ), rows.scale * 2)


@dataclass(frozen=True, kw_only=True)
class Fp8Weight:
    """weight in the chip's e4m3 [N, K]; scale float32 [1, N]. counters: see `octavo.triton.gemv.make_counters`.

    gate: as in the spec. tuning: an `octavo_rocm.tuning.Tuning`.
    """

    weight: Tensor
    scale: Tensor
    counters: Tensor
    gate: str | None
    tuning: Any


class FnuzLinear:
    """Weights and activations in fnuz e4m3. It asks for plain activations: those that core quantizes are OCP's."""

    name: ClassVar[str] = "fp8_fnuz"
    gates: ClassVar[tuple[str, ...]] = GATES
    kind: ClassVar[torch.dtype] = FNUZ

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if spec.scheme is None or spec.scheme.packing != ONLINE:
            return no(f"quantizes weights that are asked for as {ONLINE}")
        target = target_for(device)
        if target is None or target.fp8_dtype is None:
            return no(f"needs fp8 matrix units, which {target.name if target else device.type} has not")
        if getattr(torch, target.fp8_dtype) != cls.kind:
            return no(f"the matrix units of {target.name} multiply {target.fp8_dtype}")
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
        from octavo_rocm.tuning import tuning_for

        quantized = ScaledRows(*quantize_rows(weights["weight"].to(device.torch_device)))
        weight, scale = in_format(quantized, self.kind)
        return Fp8Weight(
            weight=weight,
            scale=scale.reshape(1, -1),
            counters=make_counters(spec.out_features, device.torch_device),
            gate=spec.gate,
            tuning=tuning_for(device),
        )

    def apply(self, x: Tensor | ScaledRows, w: Fp8Weight, bias: Tensor | None) -> Tensor:
        """x bfloat16 [T, K] or ScaledRows -> bfloat16 [T, N], or [T, N / 2] behind a gate."""
        num_tokens, (num_out, num_in) = max(x.shape[0], 1), w.weight.shape
        few: dict[str, Any] = {"gate": w.gate, "counters": w.counters, "overlap": w.tuning.overlap}
        if isinstance(x, Tensor) and num_tokens <= PLAIN_TOKENS:
            config = w.tuning.gemv(num_out, num_in, num_tokens)
            return self._gemv(x, w.weight, w.scale[0], bias, config=config, **few)
        rows = self._rows(x, w)
        if num_tokens <= SKINNY_TOKENS:
            few |= {
                "config": w.tuning.skinny(num_out, num_in, num_tokens, itemsize=1),
                "scale": w.scale[0],
                "x_scale": rows.scale,
            }
            return self._skinny(rows.values, w.weight, bias, out_dtype=ACT, **few)
        y = self._product(rows, w, bias)
        return y if w.gate is None else self._act_and_mul(y, w.gate)

    def apply_scaled(self, x: Tensor | ScaledRows, w: Fp8Weight, bias: Tensor | None) -> ScaledRows:
        """A gated product [T, N / 2], quantized; by the kernel that applies the gate, where that is one of its own."""
        assert w.gate is not None, "only gated products are asked for in fp8"
        if x.shape[0] <= SKINNY_TOKENS:
            return ScaledRows(*self._quantize(self.apply(x, w, bias), dtype=w.weight.dtype))
        product = self._product(self._rows(x, w), w, bias)
        return ScaledRows(*self._act_and_mul_fp8(product, w.gate, dtype=w.weight.dtype))

    def _rows(self, x: Tensor | ScaledRows, w: Fp8Weight) -> ScaledRows:
        """The activations in the weight's kind of e4m3."""
        if isinstance(x, Tensor):
            return ScaledRows(*self._quantize(x, dtype=w.weight.dtype))
        return in_format(x, w.weight.dtype)

    def _product(self, x: ScaledRows, w: Fp8Weight, bias: Tensor | None) -> Tensor:
        return torch._scaled_mm(
            x.values, w.weight.t(), scale_a=x.scale, scale_b=w.scale, bias=bias, out_dtype=ACT, use_fast_accum=False
        )


class Fp8Linear(FnuzLinear):
    """The same on cards that multiply OCP's numbers, which are core's: activations may come quantized."""

    name: ClassVar[str] = "fp8"
    kind: ClassVar[torch.dtype] = OCP
    scaled_rows_from: ClassVar[int] = PLAIN_TOKENS + 1
