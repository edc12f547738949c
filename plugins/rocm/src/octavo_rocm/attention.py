"""Paged attention: core's Triton kernels with the sizes and launch options of the card's target."""

from __future__ import annotations

from octavo.plugin import Device
from octavo.triton.attention_backend import TritonAttention
from octavo_rocm.tuning import tuning_for


def attention_for(device: Device) -> type[TritonAttention]:
    """The backend of this device."""
    tuning = tuning_for(device)
    return TritonAttention.with_tuning(tuning.attention, tuning.overlap)
