"""A kernel pack over the package `vllm-xpu-kernels`: its paged attention, which runs in the matrix units.

It is asked for by `--attention-backend vllm_xpu`, never chosen by itself: nobody has seen it run from here.
"""

from __future__ import annotations

from octavo.plugin import KernelRegistry, hookimpl

API = "1.0"
PLATFORMS = frozenset({"xpu"})


@hookimpl
def register_kernels(registry: KernelRegistry) -> None:
    from octavo_xpu.attention_vllm import VllmXpuAttention

    registry.attention(VllmXpuAttention, priority=-10)
