"""The CPU as a `Device`: threads, memory and its description."""

from __future__ import annotations

import torch

from octavo.plugin import DeviceDesc, MemInfo
from octavo.plugin.torch import TorchDevice
from octavo_cpu import host, native
from octavo_cpu.placement import ANYWHERE, Place, take


class CpuDevice(TorchDevice):
    """One worker's share of the machine.

    num_workers: how many share the machine's memory, each of them the same part.
    num_threads: threads of torch and of the compiled kernels in this process, set by `activate`.
    wide_copy: whether linear kernels may keep a second copy of a weight, in a wider format, for batches.
    int8_activations: auto | always | never: when products may round activations to 8 bits (the platform's option).
    place: the cores and the memory node that `activate` confines this thread, and so its worker, to.
    native_bf16: whether bfloat16 products run in hardware; linear kernels choose by it.
    """

    def __init__(
        self,
        index: int = 0,
        *,
        num_threads: int,
        num_workers: int = 1,
        wide_copy: bool = True,
        int8_activations: str = "auto",
        place: Place = ANYWHERE,
    ) -> None:
        super().__init__("cpu", index, memory=lambda: host.memory(num_workers))
        self.num_threads = num_threads
        self.wide_copy = wide_copy
        self.int8_activations = int8_activations
        self.place = place
        self.native_bf16 = host.has_native_bf16()

    def activate(self) -> None:
        take(self.place)
        torch.set_num_threads(self.num_threads)
        host.keep_freed_memory()
        if not native.why_not():
            if self.place.cpus:
                native.load().octavo_set_threads(1)  # an earlier engine's threads may run elsewhere
            native.load().octavo_set_threads(self.num_threads)

    def reset_peak(self) -> None:
        host.reset_peak()

    def empty_cache(self) -> None:
        host.give_back_freed_memory()

    def describe(self) -> DeviceDesc:
        info: MemInfo = self.memory()
        return DeviceDesc(
            name=host.cpu_name(),
            index=self.index,
            memory=info.total,
            compute_units=self.num_threads,
            numa=self.place.node,
        )
