"""Core's linear layers with packed 4-bit weights, started as the card can."""

from __future__ import annotations

from octavo.plugin import Device, LinearSpec
from octavo.triton import linear_int4
from octavo.triton.linear_tuning import ProductTuning
from octavo_cuda.linear import few_tokens_refusal
from octavo_cuda.overlap import overlap_for


class Int4Linear(linear_int4.Int4Linear):
    __doc__ = linear_int4.Int4Linear.__doc__

    @classmethod
    def refusal(cls, spec: LinearSpec, device: Device) -> str:
        return few_tokens_refusal(spec, device)

    @classmethod
    def tuning_for(cls, device: Device) -> ProductTuning:
        return ProductTuning(overlap=overlap_for(getattr(device, "capability", (0, 0))))
