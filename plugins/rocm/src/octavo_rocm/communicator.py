"""Collectives between cards: RCCL, which torch's HIP build calls "nccl"."""

from __future__ import annotations

import torch
import torch.distributed as dist

from octavo.plugin import GroupSpec
from octavo.plugin.torch import TorchCommunicator


class RcclCommunicator(TorchCommunicator):
    """Implements `octavo.plugin.Communicator` for one card of a group."""

    def __init__(self, spec: GroupSpec, device: torch.device) -> None:
        super().__init__(spec)
        self._device = device

    def barrier(self) -> None:
        # Named, as RCCL would take a card by the rank's number.
        device_ids = [self._device.index] if self._device.type == "cuda" else None
        dist.barrier(group=self.group, device_ids=device_ids)
