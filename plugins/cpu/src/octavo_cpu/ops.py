"""The index of this platform's kernels: what is registered, and with which priority."""

from __future__ import annotations

from octavo.plugin import KernelRegistry
from octavo_cpu.attention import PagedAttention


def register(registry: KernelRegistry) -> None:
    """Register every kernel of the pure-torch tier."""
    registry.attention(PagedAttention, priority=10)
