"""The CPU as a `Device`: threads, memory and its description."""

from __future__ import annotations

import torch

from octavo.plugin import DeviceDesc, MemInfo
from octavo.plugin.torch import TorchDevice
from octavo_cpu import host


class CpuDevice(TorchDevice):
    """One worker's share of the machine.

    num_workers: how many share the machine's memory, each of them the same part.
    num_threads: OpenMP threads of torch in this process, set by `activate`.
    wide_copy: whether linear kernels may keep a second copy of a weight, in a wider format, for batches.
    native_bf16: whether bfloat16 products run in hardware; linear kernels choose by it.
    """

    def __init__(self, index: int = 0, *, num_threads: int, num_workers: int = 1, wide_copy: bool = True) -> None:
        super().__init__("cpu", index, memory=lambda: host.memory(num_workers))
        self.num_threads = num_threads
        self.wide_copy = wide_copy
        self.native_bf16 = host.has_native_bf16()

    def activate(self) -> None:
        torch.set_num_threads(self.num_threads)

    def reset_peak(self) -> None:
        host.reset_peak()

    def describe(self) -> DeviceDesc:
        info: MemInfo = self.memory()
        return DeviceDesc(name=host.cpu_name(), index=self.index, memory=info.total, compute_units=self.num_threads)
