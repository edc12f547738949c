"""One NVIDIA card as a `Device`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from octavo.plugin import DeviceDesc
from octavo.plugin.torch import TorchDevice

if TYPE_CHECKING:
    from octavo_cuda.compile_ahead import CompileAhead


class CudaDevice(TorchDevice):
    """Card `index` of those that the process sees. Streams, events, memory and pinning are torch's own."""

    def __init__(self, index: int = 0) -> None:
        super().__init__("cuda", index)
        self.ahead: CompileAhead | None = None
        """What compiles kernels ahead of their use, once they are registered."""

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
