"""One AMD card as a `Device`."""

from __future__ import annotations

import torch

from octavo.plugin import Device
from octavo.plugin.torch import TorchDevice
from octavo_rocm.targets import Target, target_of


class RocmDevice(TorchDevice):
    """Card `index` of those that the process sees. Torch's HIP build calls it "cuda", and gives all that CUDA's does.

    Raises RuntimeError with any other build: it would drive another vendor's card.
    """

    def __init__(self, index: int = 0) -> None:
        if torch.version.hip is None:
            raise RuntimeError("the installed torch is not a ROCm build; install torch from an index of ROCm builds")
        super().__init__("cuda", index)

    @property
    def arch(self) -> str:
        """As HIP names it, with features: "gfx942:sramecc+:xnack-"."""
        return str(torch.cuda.get_device_properties(self.index).gcnArchName)


def target_for(device: Device) -> Target | None:
    """What the kernels of a device are compiled for; None if it is no AMD card, as when they are interpreted."""
    arch = getattr(device, "arch", None)
    return None if arch is None else target_of(arch)
