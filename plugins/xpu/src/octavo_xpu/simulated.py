"""The platform without its hardware, as "xpu_simulated": the same kernels, launched on Intel's OpenCL CPU device.

    pip install intel-opencl-rt
    OCTAVO_EXTRA_PLATFORMS=xpu_simulated=octavo_xpu.simulated octavo generate MODEL --platform xpu_simulated

For tests and for writing kernels. Tensors are torch's on the CPU, whose memory the device reads as it is; everything
that is torch's on a GPU (products of plain weights, sampling, streams, graphs) is not exercised. Nothing here is used
by the platform itself.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.plugin import DeviceDesc, KernelRegistry, PlatformCaps, PlatformInfo, Probe, hookimpl

if TYPE_CHECKING:
    from octavo.plugin import Device
    from octavo_xpu.device import SyclDevice

MEMORY = 1 << 30
"""Bytes that it claims to have."""

DRIVER = Path(sys.prefix, "lib", "libintelocl.so")
"""What intel-opencl-rt brings."""


@hookimpl
def platform_info() -> PlatformInfo:
    return PlatformInfo(name="xpu_simulated", api="1.0", version="0.1.0", device_type="cpu")


@hookimpl
def platform_probe() -> Probe:
    from octavo_xpu.kernels.build import NoLibraryError, compiler, runtime_version

    try:
        compiler()
        runtime_version()
    except NoLibraryError as error:
        return Probe(available=False, reason=str(error))
    if not DRIVER.exists():
        return Probe(available=False, reason=f"{DRIVER} is missing: pip install intel-opencl-rt")
    return Probe(available=True, score=0, devices=(DeviceDesc(name="Intel OpenCL CPU device", memory=MEMORY),))


@hookimpl
def platform_caps() -> PlatformCaps:
    from octavo_xpu import COLLECTIVES, FEATURES

    return PlatformCaps(
        dtypes=("bfloat16", "float16", "float32"),
        default_dtype="float32",
        dist_backend="gloo",
        collectives=COLLECTIVES,
        max_world_size=2,
        features=FEATURES,
    )


@hookimpl
def make_device(local_rank: int) -> Device:
    return device()


@hookimpl
def register_kernels(registry: KernelRegistry, device: Device) -> None:
    from octavo_xpu.ops import register

    register(registry, device)


@cache
def device() -> SyclDevice:
    """The CPU with a queue of its own. Raises NoLibraryError."""
    from octavo.plugin import MemInfo
    from octavo_xpu.device import SyclDevice
    from octavo_xpu.native import Runtime

    made = SyclDevice("cpu", memory=lambda: MemInfo(total=MEMORY, free=MEMORY))
    address = cpu_queue()
    # torch's operators on the CPU read a tensor as soon as they are called.
    made.runtime = Runtime(lambda: address, wait=True, emulate=True)
    made.runtime.describe()
    return made


@cache
def cpu_queue() -> int:
    """Address of a queue on Intel's CPU device. Raises NoLibraryError if the driver is not found."""
    from octavo_xpu.kernels.build import NoLibraryError
    from octavo_xpu.native import last_error, load

    # The loader of OpenCL drivers looks into the system's folder, where packages of Python install nothing.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "intel.icd").write_text(f"{DRIVER}\n")
        before = os.environ.get("OCL_ICD_VENDORS")
        os.environ["OCL_ICD_VENDORS"] = folder
        try:
            address = load().octavo_xpu_cpu_queue()
        finally:
            if before is None:
                del os.environ["OCL_ICD_VENDORS"]
            else:
                os.environ["OCL_ICD_VENDORS"] = before
    if not address:
        raise NoLibraryError(f"no OpenCL CPU device: {last_error()}")
    queue: int = address
    return queue
