"""Collectives between GPUs: oneCCL, by torch's backend `xccl`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from octavo.plugin import GroupSpec
from octavo.plugin.torch import TorchCommunicator


class XpuCommunicator(TorchCommunicator):
    """Implements `octavo.plugin.Communicator` for one GPU of a group."""

    def __init__(self, spec: GroupSpec, device: torch.device) -> None:
        super().__init__(spec)
        self._device = device

    def barrier(self) -> None:
        device_ids = [self._device.index] if self._device.type == "xpu" else None
        dist.barrier(group=self.group, device_ids=device_ids)
