"""The index of this platform's kernels: what is registered, and with which priority."""

from __future__ import annotations

from octavo.plugin import KernelRegistry
from octavo_cpu.activation import act_and_mul
from octavo_cpu.attention import PagedAttention
from octavo_cpu.linear import Int4Linear, OneDnnLinear
from octavo_cpu.linear_native import GemvLinear, GgufLinear
from octavo_cpu.norm import add_rms_norm, rms_norm
from octavo_cpu.rope import qkv_norm_rope, rope, supports_qkv

PROVIDER = "cpu"


def register(registry: KernelRegistry) -> None:
    """Register every kernel: those of the compiled library first, which refuse where there is none."""
    registry.attention(PagedAttention, priority=10)
    registry.linear(GgufLinear, priority=40)
    registry.linear(GemvLinear, priority=30)
    registry.linear(Int4Linear, priority=20)
    registry.linear(OneDnnLinear, priority=10)
    registry.op("rms_norm", rms_norm, provider=PROVIDER, priority=10)
    registry.op("add_rms_norm", add_rms_norm, provider=PROVIDER, priority=10, inplace=True)
    registry.op("rope", rope, provider=PROVIDER, priority=10)
    registry.op("qkv_norm_rope", qkv_norm_rope, provider=PROVIDER, priority=10, supports=supports_qkv)
    registry.op("act_and_mul", act_and_mul, provider=PROVIDER, priority=10)
