"""Host memory of a step: what is sent from it and what arrives in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.plugin import MemInfo
from octavo.plugin.torch import TorchDevice
from octavo.runner import inputs
from octavo.runner.inputs import UPLOAD_BYTES, Staging


class Pinning(TorchDevice):
    """Counts what it pins."""

    def __init__(self) -> None:
        super().__init__("cpu", memory=lambda: MemInfo(total=1 << 30, free=1 << 30))
        self.pinned: list[torch.Tensor] = []

    def pin(self, t: torch.Tensor) -> torch.Tensor:
        self.pinned.append(t)
        return t


def test_what_lies_on_the_host_is_received_as_it_is() -> None:
    here = torch.arange(3)
    assert Staging(Pinning(), 4).receive(here) is here


def test_what_comes_from_a_device_arrives_in_memory_that_the_device_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "HOST", "elsewhere")  # so that a CPU is a device
    device = Pinning()
    staging = Staging(device, 4)
    sent = staging.stage(np.arange(5, dtype=np.int32))
    large = torch.arange(UPLOAD_BYTES, dtype=torch.int64).view(-1, 2)  # more than there is: other memory is taken
    parts = [torch.arange(7), torch.rand(3, 2), large, torch.tensor([1, 2])]
    received = [staging.receive(part) for part in parts]
    for part, copy in zip(parts, received, strict=True):
        assert torch.equal(copy, part)
        assert any(inside(copy, memory) for memory in device.pinned)
    assert sent.tolist() == [0, 1, 2, 3, 4], "nothing is overwritten before the memory is reset"
    assert len(device.pinned) == 3, "the tokens', the first and the larger one"
    staging.reset()
    assert torch.equal(staging.receive(large), large)
    assert len(device.pinned) == 3, "the larger memory is kept"


def inside(part: torch.Tensor, memory: torch.Tensor) -> bool:
    begin, size = memory.data_ptr(), memory.numel() * memory.element_size()
    return begin <= part.data_ptr() < begin + size
