"""One TPU as a `Device`, through torch_tpu. The other runtime is in `xla_device.py`.

The runtime is lazy: an operator notes what is to be done, and what was noted is compiled and run when something needs
it. Copies to the host are asynchronous: their memory holds nothing before an event behind them has happened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from octavo.plugin import DeviceDesc, MemInfo
from octavo.plugin.torch import NullStream, TorchDevice
from octavo_tpu.chips import find_chips

TYPE = "tpu"


class TpuDevice(TorchDevice):
    """Chip `index` of those that the process sees.

    hbm_bytes: its memory, where the runtime cannot tell (0: it must). cache_dir: folder where compiled programs are
    kept; "": where torch keeps its own, a temporary folder of the user. Raises RuntimeError if torch has no TPU.
    """

    def __init__(self, index: int = 0, *, hbm_bytes: int = 0, cache_dir: str = "") -> None:
        if not hasattr(torch, TYPE):
            raise RuntimeError(
                "torch has no TPU backend in this process: torch_tpu loads itself with torch unless "
                "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set or it sees no chip"
            )
        super().__init__(TYPE, index, memory=self._measure)
        self._hbm_bytes = hbm_bytes
        if cache_dir:
            use_cache(Path(cache_dir))
        # Not before it is known that torch_tpu has been loaded: importing parts of it would load it.
        from octavo_tpu.donation import DonatingBackend

        self.compile_backend = DonatingBackend()
        self.has_mosaic = bool(find_chips())
        """Whether Pallas kernels run: their compiler, Mosaic, is part of libtpu."""

    def activate(self) -> None:
        torch.accelerator.set_device_index(self.index)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.index)

    def stream(self, priority: int = 0) -> NullStream:
        """One queue a device: the runtime orders all work by itself."""
        return NullStream()

    def event(self) -> torch.Event:
        return torch.Event(device=TYPE)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Operators outside compiled steps run one by one. Fused with what happens to stand beside them, the same few
        operators would make a new program, and wait for its compilation, in ever new combinations."""
        tpu: Any = getattr(torch, TYPE)
        with torch.inference_mode(), tpu.set_eager_mode(tpu.EagerMode.DEFER_NEVER):
            yield

    def pin(self, t: torch.Tensor) -> torch.Tensor:
        """As it is: the runtime copies through memory of its own."""
        return t

    def _measure(self) -> MemInfo:
        free, total = torch.accelerator.get_memory_info(self.index)
        stats: dict[str, Any] = torch.accelerator.memory_stats(self.index)
        peak = int(stats.get("allocated_bytes.all.peak", 0))
        used = int(stats.get("allocated_bytes.all.current", 0))
        if total == 0:
            if self._hbm_bytes == 0:
                raise RuntimeError(
                    "the runtime does not tell how much memory the device has: --platform-opt hbm_bytes=N"
                )
            total, free = self._hbm_bytes, self._hbm_bytes - used
        return MemInfo(total=total, free=free, peak_torch=peak, non_torch=max(0, total - free - used))

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.index)

    def empty_cache(self) -> None:
        """Nothing is kept: freed buffers go back to the runtime at once."""

    def describe(self) -> DeviceDesc:
        chips = find_chips()
        if self.index < len(chips):
            return chips[self.index]
        return DeviceDesc(name="TPU", index=self.index, memory=self.memory().total)


def use_cache(folder: Path) -> None:
    """Keep compiled programs in a folder: torch keeps what a backend made of a graph, and asks here where."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
