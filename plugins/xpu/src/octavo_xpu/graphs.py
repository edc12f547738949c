"""Whole steps as SYCL command graphs: core's recorder over torch.xpu."""

from __future__ import annotations

from typing import Any

import torch

from octavo.plugin.recording import StepRecorder


def why_not() -> str:
    """Why steps cannot be recorded with this torch; empty if they can."""
    if not hasattr(torch.xpu, "XPUGraph"):
        return f"torch {torch.__version__} has no torch.xpu.XPUGraph"
    return ""


class Graph:
    """torch's XPUGraph with the arguments of CUDA's: SYCL records one queue and never what other threads do."""

    def __init__(self) -> None:
        self._graph: Any = torch.xpu.XPUGraph()
        self.capture_end = self._graph.capture_end
        self.replay = self._graph.replay
        self.reset = self._graph.reset

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self._graph.capture_begin(pool=pool)


class XpuGraphs(StepRecorder):
    """Implements `octavo.plugin.GraphRunner`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(
            device,
            torch.xpu,
            make_graph=Graph,
            give_back=lambda index, pool: None,  # torch.xpu offers nothing that would
            lends=False,
        )
