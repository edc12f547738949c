"""One NVIDIA card as a `Device`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from octavo.plugin import DeviceDesc
from octavo.plugin.torch import TorchDevice


class CudaDevice(TorchDevice):
    """Card `index` of those that the process sees. Streams, events, memory and pinning are torch's own."""

    def __init__(self, index: int = 0) -> None:
        super().__init__("cuda", index)

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability: (9, 0) for Hopper."""
        return torch.cuda.get_device_capability(self.index)

    def describe(self) -> DeviceDesc:
        p: Any = torch.cuda.get_device_properties(self.index)
        if not hasattr(p, "pci_bus_id"):  # an older torch
            return super().describe()
        pci = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
        return dataclasses.replace(super().describe(), pci=pci)
