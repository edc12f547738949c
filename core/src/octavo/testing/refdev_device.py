"""The device of the fake platform, and its emulation of captured steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from octavo.plugin import BatchKey, BatchLimits, DeviceDesc, MemInfo
from octavo.plugin.torch import TorchDevice


class RefStream:
    """A queue that is always empty: work is done when it is queued. Waiting for an event that never happens fails."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def wait_event(self, event: RefEvent) -> None:
        if not event.recorded:
            raise RuntimeError("a stream waits for an event that was never recorded")


class RefEvent:
    """Happens when recorded; asking before that shows a misuse that real devices forgive and then race on."""

    def __init__(self) -> None:
        self.recorded = False

    def record(self, stream: Any = None) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        if not self.recorded:
            raise RuntimeError("synchronize on an event that was never recorded")

    def query(self) -> bool:
        return self.recorded


class RefDevice(TorchDevice):
    """CPU tensors under the name "refdev". memory: bytes it claims to have."""

    def __init__(self, index: int, *, memory: int) -> None:
        super().__init__("cpu", memory=lambda: MemInfo(total=memory, free=memory))
        self.type = "refdev"
        self.index = index

    def stream(self, priority: int = 0) -> RefStream:
        return RefStream()

    def event(self) -> RefEvent:
        return RefEvent()

    def describe(self) -> DeviceDesc:
        return DeviceDesc(name="reference device", index=self.index, memory=self.memory().total)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators and notes them, as a capturing stream does.

    What a real capture forbids is forbidden here: reading a value on the host, and shapes that depend on values.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if depends_on_values(func, args):
            raise RuntimeError(f"{func} cannot be captured: its result depends on values that only the device knows")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, tree_flatten(out)[0]))
        return out


def depends_on_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator reads values on the host, or has a result whose shape depends on values."""
    if func is torch.ops.aten.index.Tensor:
        # Tagged as dynamic for the sake of masks; with integer indices its shape is known.
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


class CaptureRunner:
    """Replays the very operators of the captured step on the very tensors: Python of the step does not run again, its
    constants are baked in, and results appear at the same addresses. What breaks on a capturing device breaks here."""

    def keys(self, limits: BatchLimits) -> Sequence[BatchKey]:
        most = min(limits.max_num_seqs, limits.max_num_tokens)
        sizes = [size for size in (1, 2, 4, 8, 16) if size < most] + [most]
        decodes = [BatchKey(num_tokens=size, num_seqs=size, max_q_len=1) for size in sizes]
        # One shape for steps that also hold the parts of prompts, as its attention takes any mixture.
        mixed = min(32, limits.max_num_tokens)
        return [*decodes, BatchKey(num_tokens=mixed, num_seqs=min(4, most))]

    def prepare(self, key: BatchKey, fn: Any) -> tuple[Recorder, Any]:
        with Recorder() as recorder:
            outputs = fn()
        return recorder, outputs

    def run(self, handle: tuple[Recorder, Any]) -> Any:
        recorder, outputs = handle
        for func, args, kwargs, recorded in recorder.calls:
            fresh = tree_flatten(func(*args, **kwargs))[0]
            for old, new in zip(recorded, fresh, strict=True):
                # Views and in-place operators gave the recorded memory again; everything else must land there.
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
                elif hasattr(new, "wait"):  # of a collective, which the next operator needs done
                    new.wait()
        return outputs

    def close(self) -> None:
        """Captured steps die with their handles."""
