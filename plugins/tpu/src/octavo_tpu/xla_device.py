"""One TPU, or several as one, as a `Device`, through torch_xla. The other runtime is in `device.py`.

A tensor of torch_xla is a name for a buffer: what changes it in place gives it another one. A copy to the host waits
for the device, so behind a step whose tokens were copied nothing is pending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch_xla
import torch_xla.runtime as xr
from torch import Tensor, fx
from torch_xla.experimental.eager import eager_mode_context

from octavo.plugin import DeviceDesc, MemInfo
from octavo.plugin.torch import NullEvent, NullStream
from octavo_tpu.chips import find_chips
from octavo_tpu.xla_program import Program

TYPE = "xla"


class XlaDevice:
    """Chip `index` of those that the process sees; with `chips` more than one all of them, as one device whose weights
    and KV cache are divided (`xla_sharding`).

    hbm_bytes: memory of a chip, where the runtime cannot tell (0: it must). cache_dir: folder in which programs outlive
    the process; "": none. Raises RuntimeError if the process does not see as many chips as it is to use.
    """

    has_mosaic = False
    """The kernel of `kernels/` was never brought into a program of this runtime."""

    def __init__(self, index: int = 0, *, chips: int = 1, hbm_bytes: int = 0, cache_dir: str = "") -> None:
        self.type, self.index, self.chips = TYPE, index, chips
        self._hbm_bytes = hbm_bytes
        self._idle = False  # whether nothing ran since reset_peak
        if cache_dir and not torch_xla._XLAC._xla_computation_cache_is_initialized():
            xr.initialize_cache(cache_dir)
        seen = xr.global_runtime_device_count()
        if chips > 1:
            if seen != chips:
                raise RuntimeError(f"chips={chips}, but torch_xla sees {seen}: it divides work over all that it sees")
            xr.use_spmd()
        self.torch_device: torch.device = torch_xla.device(index)

    def activate(self) -> None:
        torch_xla.device(self.index)

    def synchronize(self) -> None:
        self._idle = False
        torch_xla.sync(wait=True)

    def stream(self, priority: int = 0) -> NullStream:
        """One queue a device."""
        return NullStream()

    def event(self) -> NullEvent:
        """Copies to the host are done when they return."""
        return NullEvent()

    def use_stream(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Operators outside compiled steps run one by one: fused with what happens to stand beside them, they would
        make new programs for ever. Not inference_mode, in which tensors that are views of others cannot follow."""
        self._idle = False
        with torch.no_grad(), eager_mode_context(True):
            yield

    def compile_backend(self, graph: fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        """A backend of torch.compile: the whole graph as one program, made when it is first called."""
        program: Program | None = None

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            nonlocal program
            with eager_mode_context(False):
                if program is None:
                    program = Program(graph, inputs)
                return program()

        return run

    def pin(self, t: Tensor) -> Tensor:
        """As it is: the runtime copies through memory of its own."""
        return t

    def memory(self) -> MemInfo:
        """Of one chip: with several, each holds its part of what is divided and all of the rest.

        peak_torch is what is in use until something runs behind `reset_peak`, then the peak of the whole process, which
        the runtime cannot set back: never less than what was held since, and more if loading held more.
        """
        try:
            stats: dict[str, int] = torch_xla._XLAC._xla_memory_info(str(self.torch_device))
        except RuntimeError as error:
            if self._hbm_bytes == 0:
                raise RuntimeError(
                    f"the runtime does not tell how much memory the device has ({error}): --platform-opt hbm_bytes=N"
                ) from error
            return MemInfo(total=self._hbm_bytes, free=self._hbm_bytes)
        total, used = stats["bytes_limit"], stats["bytes_used"]
        peak = used if self._idle else max(used, stats.get("peak_bytes_used", 0))
        return MemInfo(total=total, free=total - used, peak_torch=peak)

    def reset_peak(self) -> None:
        """See `memory`."""
        self._idle = True

    def empty_cache(self) -> None:
        """Nothing is kept: freed buffers go back to the runtime at once."""

    def describe(self) -> DeviceDesc:
        chips = find_chips()
        if self.index < len(chips):
            return chips[self.index]
        return DeviceDesc(name="TPU", index=self.index, memory=self.memory().total)
