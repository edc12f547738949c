"""One Intel GPU as a `Device`, with the kernels that are compiled for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from octavo.plugin import DeviceDesc
from octavo.plugin.torch import TorchDevice
from octavo_xpu.native import Queue, Runtime


class SyclDevice(TorchDevice):
    """A torch device whose memory SYCL kernels read. `runtime` launches them."""

    runtime: Runtime


class XpuDevice(SyclDevice):
    """GPU `index` of those that the process sees. Streams, events, memory and pinning are torch's own."""

    def __init__(self, index: int = 0) -> None:
        super().__init__("xpu", index)
        self.runtime = Runtime(self._queue())

    def describe(self) -> DeviceDesc:
        """compute_units: Xe cores, of which torch speaks as sub-slices."""
        units = torch.xpu.get_device_properties(self.index).gpu_subslice_count
        return replace(super().describe(), compute_units=units)

    def _queue(self) -> Queue:
        """Kernels go where torch's own operators go: while a step is recorded, that is the stream that records."""
        current: Any = torch.xpu.current_stream
        index = self.index
        return lambda: int(current(index).sycl_queue)
