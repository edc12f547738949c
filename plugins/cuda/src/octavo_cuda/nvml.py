"""What the driver says of the machine, through NVML: no CUDA context, no torch, a few milliseconds.

NVML lists every card of the machine; CUDA_VISIBLE_DEVICES is applied here by CUDA's own rules, so that a probe promises
what the process will get.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.plugin import DeviceDesc

LIBRARIES = (
    "libnvidia-ml.so.1",
    "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
    "/usr/lib/wsl/lib/libnvidia-ml.so.1",
    "nvml.dll",
)
"""Where drivers put it: the loader's path, containers with a mounted driver, WSL, Windows."""

VISIBLE = "CUDA_VISIBLE_DEVICES"
TEXT_BYTES = 96


class NvmlError(Exception):
    """NVML is absent or refused; the message says which."""


class Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Pci(ctypes.Structure):
    """nvmlPciInfo_t."""

    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


@dataclass(frozen=True, kw_only=True)
class Card:
    """One card: how a person would describe it, and its compute capability (major, minor)."""

    desc: DeviceDesc
    capability: tuple[int, int]


def load_library() -> Any:
    """The driver's NVML. Raises NvmlError if there is none."""
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise NvmlError("no NVIDIA driver: libnvidia-ml.so.1 cannot be loaded")


def cards(library: Any = None) -> list[Card]:
    """The cards that this process may use, in the order of their numbers. Raises NvmlError without a working driver."""
    nvml = library or load_library()
    ask(nvml, "nvmlInit_v2")
    try:
        count = ctypes.c_uint()
        ask(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = [card(nvml, index) for index in range(count.value)]
    finally:
        ask(nvml, "nvmlShutdown")
    return visible(found, os.environ.get(VISIBLE))


def driver_version(library: Any = None) -> str:
    """The driver's version. Raises NvmlError without a working driver."""
    nvml = library or load_library()
    buffer = ctypes.create_string_buffer(TEXT_BYTES)
    ask(nvml, "nvmlInit_v2")
    try:
        ask(nvml, "nvmlSystemGetDriverVersion", buffer, ctypes.c_uint(TEXT_BYTES))
    finally:
        ask(nvml, "nvmlShutdown")
    return buffer.value.decode()


def ask(nvml: Any, function: str, *arguments: Any) -> None:
    """Call NVML. Raises NvmlError with the function and its return code."""
    code = getattr(nvml, function)(*arguments)
    if code != 0:
        raise NvmlError(f"the NVIDIA driver does not answer: {function} returned {code} (try nvidia-smi)")


def card(nvml: Any, index: int) -> Card:
    """Everything about card `index`."""
    handle, memory, pci = ctypes.c_void_p(), Memory(), Pci()
    major, minor = ctypes.c_int(), ctypes.c_int()
    ask(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    # Cards that share the host's memory have none of their own to tell, and some sit on no PCI bus: zeros then.
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    nvml.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci))
    desc = DeviceDesc(
        name=text(nvml, "nvmlDeviceGetName", handle),
        index=index,
        memory=memory.total,
        uuid=text(nvml, "nvmlDeviceGetUUID", handle),
        pci=pci.bus_id.decode(),
    )
    return Card(desc=desc, capability=(major.value, minor.value))


def text(nvml: Any, function: str, handle: ctypes.c_void_p) -> str:
    """What a function answers in words."""
    buffer = ctypes.create_string_buffer(TEXT_BYTES)
    ask(nvml, function, handle, buffer, ctypes.c_uint(TEXT_BYTES))
    return buffer.value.decode()


def visible(found: Sequence[Card], choice: str | None) -> list[Card]:
    """What CUDA_VISIBLE_DEVICES=`choice` leaves: numbers or beginnings of UUIDs, up to the first wrong one.

    A slice of a card (MIG) is taken as it is named, with the least capability there is.
    """
    if choice is None:
        return list(found)
    chosen: list[Card] = []
    for word in choice.split(","):
        word = word.strip()
        if word.isdecimal():
            matches = [card for card in found if card.desc.index == int(word)]
        elif word.startswith("MIG-") and found:
            least = min(found, key=lambda card: card.capability)
            desc = replace(least.desc, name=f"slice of {least.desc.name}", index=len(chosen), memory=0, uuid=word)
            matches = [replace(least, desc=desc)]
        else:
            matches = [card for card in found if word and card.desc.uuid.startswith(word)]
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen += matches
    return chosen
