"""The index of this platform's kernels: what is registered, and with which priority."""

from __future__ import annotations

import logging

from octavo.plugin import Device, KernelRegistry
from octavo_cuda.device import CudaDevice
from octavo_cuda.linear import CublasLinear

log = logging.getLogger("octavo.cuda")


def register(registry: KernelRegistry, device: Device, *, triton: bool) -> None:
    """Register every kernel. triton: whether Triton is installed; without it only matrix products have kernels."""
    registry.linear(CublasLinear, priority=10)
    if not triton:
        log.warning(
            "Triton is not installed: attention and small ops run on core's slow references; pip install triton"
        )
        return
    register_triton(registry, device)


def register_triton(registry: KernelRegistry, device: Device) -> None:
    """Core's portable kernels with this card's measurements, and what needs one of them."""
    from octavo.triton.attention_backend import TritonAttention
    from octavo.triton.ops import register_ops
    from octavo_cuda.attention import Fa3Attention
    from octavo_cuda.attention_flashinfer import FlashInferAttention
    from octavo_cuda.attention_phases import AutoAttention
    from octavo_cuda.compile_ahead import CompileAhead
    from octavo_cuda.fp8 import Fp8Linear
    from octavo_cuda.int4 import Int4Linear
    from octavo_cuda.linear import TritonLinear
    from octavo_cuda.overlap import overlap_for
    from octavo_cuda.tuning import tuning_for

    tuning = tuning_for(device.describe().name)
    overlap = overlap_for(getattr(device, "capability", (0, 0)))
    ahead = CompileAhead(device)
    if isinstance(device, CudaDevice):
        device.ahead = ahead
    triton_attention = ahead.attention(TritonAttention.with_tuning(tuning.attention, overlap))
    registry.attention(AutoAttention.of(Fa3Attention, FlashInferAttention, triton_attention), priority=40)
    registry.attention(Fa3Attention, priority=30)
    registry.attention(FlashInferAttention, priority=20)
    registry.attention(triton_attention, priority=10)
    registry.linear(ahead.linear(Fp8Linear), priority=30)
    registry.linear(ahead.linear(Int4Linear), priority=30)
    registry.linear(ahead.linear(TritonLinear.with_table(tuning.products)), priority=20)
    register_ops(registry, priority=10, overlap=overlap, fp8=True)
