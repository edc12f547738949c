"""The hooks of the platform "acme_full": pretend hardware whose tensors lie on the CPU, and kernels in C."""

from __future__ import annotations

import os
from pathlib import Path

from octavo.plugin import (
    Communicator,
    Device,
    DeviceDesc,
    GroupSpec,
    KernelRegistry,
    MemInfo,
    PlatformCaps,
    PlatformInfo,
    Probe,
    hookimpl,
)

MEMORY = 2 << 30


@hookimpl
def platform_info() -> PlatformInfo:
    return PlatformInfo(name="acme_full", api="1.0", version="0.1", device_type="cpu")


@hookimpl
def platform_probe() -> Probe:
    # A real driver's device file; the variable lets this example run where there is none.
    path = Path(os.environ.get("ACME_DEVICE", "/dev/acme0"))
    if not path.exists():
        return Probe(available=False, reason=f"{path} is missing: is the acme driver loaded?")
    return Probe(available=True, score=70, devices=(DeviceDesc(name="Acme One", memory=MEMORY),))


@hookimpl
def platform_caps() -> PlatformCaps:
    return PlatformCaps(
        dtypes=("float32",),
        default_dtype="float32",
        dist_backend="gloo",
        collectives=frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "recv"}),
        max_world_size=2,
        features=frozenset({"prefix_cache", "chunked_prefill", "spec_decode", "structured"}),
    )


@hookimpl
def make_device(local_rank: int) -> Device:
    from octavo.plugin.torch import TorchDevice

    return TorchDevice("cpu", local_rank, memory=lambda: MemInfo(total=MEMORY, free=MEMORY))


@hookimpl
def register_kernels(registry: KernelRegistry) -> None:
    from octavo_acme_full.attention import AcmeAttention
    from octavo_acme_full.linear import AcmeLinear
    from octavo_acme_full.ops import rms_norm

    registry.attention(AcmeAttention, priority=10)
    registry.linear(AcmeLinear, priority=10)
    registry.op("rms_norm", rms_norm, provider="acme", priority=10)


@hookimpl
def make_communicator(group: GroupSpec) -> Communicator:
    from octavo_acme_full.communicator import AcmeCommunicator

    return AcmeCommunicator(group)
