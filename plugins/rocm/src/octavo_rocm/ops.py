"""The index of this platform's kernels: what is registered, and with which priority."""

from __future__ import annotations

import logging

from octavo.plugin import Device, KernelRegistry
from octavo_rocm.device import target_for
from octavo_rocm.gguf import GgufLinear
from octavo_rocm.linear import HipblasltLinear, HipLinear, TritonLinear

log = logging.getLogger("octavo.rocm")

FNUZ = "float8_e4m3fnuz"


def register(registry: KernelRegistry, device: Device, *, triton: bool, hip: bool) -> None:
    """Register every kernel. triton: whether Triton is installed. hip: whether HIP kernels may be compiled."""
    registry.linear(HipblasltLinear, priority=10)
    if hip:
        # First, as `hip` would take the same weights unpacked.
        registry.linear(GgufLinear, priority=26)
        registry.linear(HipLinear, priority=25)
    if not triton:
        log.warning(
            "Triton is not installed: attention and small ops run on core's slow references; pip install triton"
        )
        return
    register_triton(registry, device, hip=hip)


def register_triton(registry: KernelRegistry, device: Device, *, hip: bool) -> None:
    """Core's portable kernels in the sizes of this card, and what needs one of them."""
    from octavo.triton.ops import register_ops
    from octavo_rocm.attention import attention_for
    from octavo_rocm.fp8 import FnuzLinear, Fp8Linear
    from octavo_rocm.int4 import Int4Linear

    registry.attention(attention_for(device), priority=10)
    registry.linear(FnuzLinear, priority=31)
    registry.linear(Fp8Linear, priority=30)
    registry.linear(Int4Linear.with_hip(hip), priority=30)
    registry.linear(TritonLinear, priority=20)
    # The op gives OCP numbers; where products take others, they quantize themselves.
    target = target_for(device)
    register_ops(registry, priority=10, fp8=target is None or target.fp8_dtype != FNUZ)
