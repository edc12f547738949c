"""The index of this platform's kernels: what is registered, and with which priority."""

from __future__ import annotations

from octavo.plugin import Device, KernelRegistry
from octavo_tpu.attention import MatmulAttention, PallasAttention
from octavo_tpu.linear import Int4Linear, Int8Linear
from octavo_tpu.sampling import topk_topp


def register(registry: KernelRegistry, device: Device) -> None:
    """Register every kernel."""
    registry.attention(PallasAttention, priority=20)
    registry.attention(MatmulAttention, priority=10)
    registry.linear(Int4Linear, priority=10)
    registry.linear(Int8Linear, priority=10)
    registry.op("topk_topp", topk_topp, provider="tpu", priority=10, inplace=True)
    if getattr(device, "chips", 1) > 1:
        from octavo_tpu.xla_sharding import DividedLinear

        registry.linear(DividedLinear, priority=20)
