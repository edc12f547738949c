"""The index of this platform's kernels: what is registered, and with which priority."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.plugin import Device, KernelRegistry, OpContext, Support
from octavo_xpu import triton_kernels
from octavo_xpu.attention import SyclAttention
from octavo_xpu.device import SyclDevice
from octavo_xpu.linear import Int4Linear, Int8Linear, OneDnnLinear
from octavo_xpu.linear_int8 import Int8Int8Linear
from octavo_xpu.small import SmallOps, takes_dtype, takes_heads

PROVIDER = "sycl"


def register(registry: KernelRegistry, device: Device, *, sycl: bool = True, triton: bool = False) -> None:
    """Register every kernel for a device with a SYCL runtime. sycl, triton: what compiles for it; products of plain
    weights are torch's own."""
    assert isinstance(device, SyclDevice)
    registry.linear(OneDnnLinear, priority=10)
    if sycl:
        register_sycl(registry, SmallOps(device.runtime))
    if triton:
        triton_kernels.register(registry)


def register_sycl(registry: KernelRegistry, small: SmallOps) -> None:
    """Those of `kernels`."""
    registry.attention(SyclAttention, priority=10)
    registry.linear(Int4Linear, priority=20)
    registry.linear(Int8Linear, priority=20)
    registry.linear(Int8Int8Linear, priority=20)
    ops: tuple[tuple[Callable[..., Any], Callable[[OpContext], Support], bool], ...] = (
        (small.rms_norm, takes_dtype, False),
        (small.add_rms_norm, takes_dtype, True),
        (small.act_and_mul, takes_dtype, False),
        (small.rope, takes_dtype, False),
        (small.kv_write, takes_dtype, True),
        (small.qkv_norm_rope, takes_heads, True),
        (small.qkv_norm_rope_write, takes_heads, True),
    )
    for fn, supports, inplace in ops:
        registry.op(fn.__name__, fn, provider=PROVIDER, priority=10, supports=supports, inplace=inplace)
