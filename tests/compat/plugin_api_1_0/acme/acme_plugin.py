"""A platform in one file: pretend hardware whose tensors live on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

from octavo.plugin import Device, DeviceDesc, KernelRegistry, MemInfo, PlatformCaps, PlatformInfo, Probe, hookimpl

MEMORY = 2 << 30


@hookimpl
def platform_info() -> PlatformInfo:
    return PlatformInfo(name="acme", api="1.0", version="0.1", device_type="cpu")


@hookimpl
def platform_probe() -> Probe:
    # A real driver's device file; the variable lets this example run where there is none.
    path = Path(os.environ.get("ACME_DEVICE", "/dev/acme0"))
    if not path.exists():
        return Probe(available=False, reason=f"{path} is missing: is the acme driver loaded?")
    return Probe(available=True, score=60, devices=(DeviceDesc(name="Acme One", memory=MEMORY),))


@hookimpl
def platform_caps() -> PlatformCaps:
    return PlatformCaps(dtypes=("bfloat16", "float32"), default_dtype="float32")


@hookimpl
def make_device(local_rank: int) -> Device:
    # A real plugin imports its torch backend here, never at the top, and names its own device type.
    from octavo.plugin.torch import TorchDevice

    return TorchDevice("cpu", local_rank, memory=lambda: MemInfo(total=MEMORY, free=MEMORY))


@hookimpl
def register_kernels(registry: KernelRegistry) -> None:
    from acme_kernels import act_and_mul, takes_silu

    registry.op("act_and_mul", act_and_mul, provider="acme", priority=10, supports=takes_silu)
