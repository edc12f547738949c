"""What the kernel says of the machine's GPUs, through sysfs: no driver library is opened, and no torch.

Torch's Intel GPUs are those of the kernel drivers `xe` and `i915` for which Level Zero has a user-space driver.
ZE_AFFINITY_MASK is applied here as Level Zero does, so that a probe promises what the process will get.
"""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from octavo.plugin import DeviceDesc

SYSFS = Path("/sys/class/drm")
INTEL = "0x8086"
DRIVERS = ("xe", "i915")
VISIBLE = "ZE_AFFINITY_MASK"
LOADER = "ze_loader"
GPU_DRIVER = "ze_intel_gpu"

NAMES = {
    "0x0b69": "Intel Data Center GPU Max",
    "0x0bd": "Intel Data Center GPU Max",
    "0x0be": "Intel Data Center GPU Max",
    "0x56c": "Intel Data Center GPU Flex",
    "0x56": "Intel Arc A-series",
    "0xe20": "Intel Arc B-series",
    "0xe21": "Intel Arc Pro B-series",
    "0x64": "Intel Arc (Lunar Lake)",
    "0x7d": "Intel Arc (Meteor or Arrow Lake)",
}
"""Beginnings of PCI device ids -> a name for people, the longest that fits. sysfs has no names."""


def gpus(sysfs: Path | None = None) -> list[DeviceDesc]:
    """Intel GPUs with a kernel driver that torch can use, in the order of their PCI addresses, as Level Zero numbers
    them; those that ZE_AFFINITY_MASK hides are left out."""
    found = []
    for node in sorted((sysfs or SYSFS).glob("renderD*")):
        device = node / "device"
        if read(device / "vendor") != INTEL or (device / "driver").resolve().name not in DRIVERS:
            continue
        found.append((device.resolve().name, name_of(read(device / "device")), memory_of(device)))
    described = [
        DeviceDesc(name=name, index=index, memory=memory, pci=pci)
        for index, (pci, name, memory) in enumerate(sorted(found))
    ]
    return visible(described, os.environ.get(VISIBLE))


def read(path: Path) -> str:
    """A file's text, or nothing where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def name_of(device_id: str) -> str:
    """A GPU's name by its PCI id."""
    fits = [start for start in NAMES if device_id.startswith(start)]
    return NAMES[max(fits, key=len)] if fits else f"Intel GPU {device_id}"


def memory_of(device: Path) -> int:
    """Bytes of the GPU's own memory; 0 where it uses the host's, or does not tell.

    i915 tells it (lmem_total_bytes, in some kernels); else it is the largest PCI window, which resizable BARs make as
    large as the memory."""
    if told := read(device / "lmem_total_bytes"):
        return int(told)
    windows = [line.split() for line in read(device / "resource").splitlines()]
    sizes = [int(end, 16) - int(start, 16) + 1 for start, end, *_ in windows if int(end, 16)]
    largest = max(sizes, default=0)
    return largest if largest > 1 << 30 else 0


def visible(found: Sequence[DeviceDesc], mask: str | None) -> list[DeviceDesc]:
    """What ZE_AFFINITY_MASK leaves: numbers, or "number.tile", of which torch sees the tile as a device."""
    if not mask:
        return list(found)
    chosen = {int(number) for word in mask.split(",") if (number := word.strip().partition(".")[0]).isdecimal()}
    return [desc for desc in found if desc.index in chosen]


def missing_software() -> str:
    """What a process needs besides the kernel driver and has not got; empty if it has all."""
    if ctypes.util.find_library(LOADER) is None:
        return "the Level Zero loader (libze_loader.so.1) is not installed; on Debian: apt install libze1"
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return "torch is not installed"
    if "+" in torch and not torch.partition("+")[2].startswith("xpu"):
        return f"torch {torch} is not an XPU build: pip install torch --index-url https://download.pytorch.org/whl/xpu"
    return ""
