"""Core's linear layers in fp8, on the cards that multiply it, each in its own kind of e4m3.

The matrix units of CDNA3 multiply "fnuz" numbers, whose exponent is biased by one more than OCP's: the same bits are
half the number. So OCP's numbers become theirs, exactly, by doubling the scale; only minus zero, which is NaN there,
must become zero.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from octavo.plugin import Device
from octavo.plugin.torch import ScaledRows
from octavo.triton import linear_fp8
from octavo.triton.linear_tuning import ProductTuning
from octavo_rocm.device import target_for
from octavo_rocm.tuning import tuning_for

OCP, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
MINUS_ZERO = 0x80


class Fp8Linear(linear_fp8.Fp8Linear):
    """Weights and activations in OCP's e4m3, which is core's: activations may come quantized."""

    kind: ClassVar[torch.dtype] = OCP

    @classmethod
    def refusal(cls, device: Device) -> str:
        target = target_for(device)
        if target is None or target.fp8_dtype is None:
            return f"needs fp8 matrix units, which {target.name if target else device.type} has not"
        if getattr(torch, target.fp8_dtype) != cls.kind:
            return f"the matrix units of {target.name} multiply {target.fp8_dtype}"
        return ""

    @classmethod
    def tuning_for(cls, device: Device) -> ProductTuning:
        return tuning_for(device)


class FnuzLinear(Fp8Linear):
    """Weights and activations in fnuz e4m3. It asks for plain activations: those that core quantizes are OCP's."""

    name: ClassVar[str] = "fp8_fnuz"
    scaled_rows_from: ClassVar[float] = math.inf
    kind: ClassVar[torch.dtype] = FNUZ

    def in_own_format(self, rows: ScaledRows) -> ScaledRows:
        assert rows.values.dtype == OCP, f"{rows.values.dtype} cannot become {FNUZ} exactly"
        bits = rows.values.view(torch.uint8)
        return ScaledRows(torch.where(bits == MINUS_ZERO, 0, bits).to(torch.uint8).view(FNUZ), rows.scale * 2)
