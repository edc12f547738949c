"""Whole steps as HIP graphs: core's recorder over torch.cuda, which is HIP in a ROCm build."""

from __future__ import annotations

import torch

from octavo.plugin.recording import StepRecorder


class HipGraphs(StepRecorder):
    """Implements `octavo.plugin.GraphRunner`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(
            device,
            torch.cuda,
            make_graph=lambda: torch.cuda.CUDAGraph(),
            give_back=lambda index, pool: torch._C._cuda_endAllocateToPool(index, pool),
        )
