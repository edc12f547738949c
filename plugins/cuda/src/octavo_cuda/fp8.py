"""Core's linear layers in fp8, on the cards that multiply it."""

from __future__ import annotations

from typing import ClassVar

from octavo.plugin import Device
from octavo.triton import linear_fp8
from octavo.triton.linear_tuning import ProductTuning
from octavo_cuda.linear import device_refusal
from octavo_cuda.overlap import overlap_for

SINCE = (8, 9)
SKINNY_TOKENS = 64
"""Up to here cuBLAS, which gives all of K to one program, takes longer on an H200: 43 us against 25 to 28 for a product
of 4096 outputs and 14336 inputs. Above, it wins all but the longest K."""


class Fp8Linear(linear_fp8.Fp8Linear):
    __doc__ = linear_fp8.Fp8Linear.__doc__

    fast_accum: ClassVar[bool] = True

    @classmethod
    def refusal(cls, device: Device) -> str:
        if reason := device_refusal(device):
            return reason
        old = getattr(device, "capability", (0, 0)) < SINCE
        return "needs fp8 matrix units (compute capability 8.9)" if old else ""

    @classmethod
    def tuning_for(cls, device: Device) -> ProductTuning:
        overlap = overlap_for(getattr(device, "capability", (0, 0)))
        return ProductTuning(overlap=overlap, skinny_tokens=SKINNY_TOKENS)
