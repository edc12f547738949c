"""The index of this platform's kernels: what is registered, and with which priority."""

from __future__ import annotations

from octavo.plugin import KernelRegistry
from octavo_cpu.attention import PagedAttention
from octavo_cpu.linear import Int4Linear, OneDnnLinear


def register(registry: KernelRegistry) -> None:
    """Register every kernel of the pure-torch tier."""
    registry.attention(PagedAttention, priority=10)
    registry.linear(Int4Linear, priority=20)
    registry.linear(OneDnnLinear, priority=10)
