"""Whole steps as CUDA graphs: core's recorder over torch.cuda, behind the kernels that are compiled ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo.plugin import BatchKey, Device
from octavo.plugin.contracts import Step
from octavo.plugin.recording import Recorded, StepRecorder

if TYPE_CHECKING:
    from octavo_cuda.compile_ahead import CompileAhead


class CudaGraphs(StepRecorder):
    """Implements `octavo.plugin.GraphRunner`.

    ahead: what is compiled elsewhere is waited for, as a card had better load no code while a step is recorded.
    """

    @classmethod
    def of(cls, device: Device) -> CudaGraphs:
        """Of a device's steps. Waits for its kernels that are compiled ahead: the first launch is near."""
        ahead = getattr(device, "ahead", None)
        if ahead is not None:
            ahead.finish()
        return cls(device.torch_device, ahead)

    def __init__(self, device: torch.device, ahead: CompileAhead | None = None) -> None:
        super().__init__(
            device,
            torch.cuda,
            make_graph=lambda: torch.cuda.CUDAGraph(),
            give_back=lambda index, pool: torch._C._cuda_endAllocateToPool(index, pool),
        )
        self._ahead = ahead

    def prepare(self, key: BatchKey, fn: Step) -> Recorded:
        if self._ahead is not None:
            self._ahead.finish()
        return super().prepare(key, fn)
