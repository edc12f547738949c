"""The communicator over gloo: `xccl` needs GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from octavo.plugin import GroupSpec
from octavo_xpu import platform_caps
from octavo_xpu.communicator import XpuCommunicator


@pytest.fixture
def group(tmp_path: Path) -> Iterator[XpuCommunicator]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield XpuCommunicator(GroupSpec(name="all", ranks=(0,), backend="gloo"), torch.device("cpu"))
    dist.destroy_process_group()


def test_a_group_of_one_gives_back_what_it_gets(group: XpuCommunicator) -> None:
    t = torch.arange(6.0).view(2, 3)
    assert torch.equal(group.all_reduce(t.clone()), t)
    assert torch.equal(group.all_gather(t, 1), t)
    assert torch.equal(group.reduce_scatter(t, 0), t)
    group.barrier()


def test_a_barrier_of_gpus_names_its_own(group: XpuCommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise torch guesses the device from the rank."""
    asked: list[object] = []
    monkeypatch.setattr(dist, "barrier", lambda group, device_ids: asked.append(device_ids))
    group._device = torch.device("xpu", 3)
    group.barrier()
    assert asked == [[3]]


def test_collectives_go_through_xccl() -> None:
    assert platform_caps().dist_backend == "xccl"
    assert dist.Backend.XCCL == "xccl"
