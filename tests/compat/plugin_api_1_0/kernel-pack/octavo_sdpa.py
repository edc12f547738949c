"""A kernel pack: attention by torch's scaled_dot_product_attention, for platforms whose tensors torch computes with."""

from __future__ import annotations

from octavo.plugin import KernelRegistry, hookimpl

API = "1.0"
PLATFORMS = frozenset({"acme", "cpu"})


@hookimpl
def register_kernels(registry: KernelRegistry) -> None:
    from octavo_sdpa_attention import SdpaAttention

    # Before the reference, behind whatever a platform brings with a priority; --attention-backend sdpa asks for it.
    registry.attention(SdpaAttention, priority=-10)
