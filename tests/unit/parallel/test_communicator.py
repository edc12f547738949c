"""Core's collectives over gloo, in a group of one: the conformance kit's tier 5 has two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from octavo.config import make_config
from octavo.plugin import GroupSpec
from octavo.plugin.torch import TorchCommunicator
from octavo.runner import worker

ALONE = GroupSpec(name="all", ranks=(0,), backend="gloo")


@pytest.fixture(autouse=True)
def joined(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_group_of_one_gives_back_what_it_gets() -> None:
    comm = TorchCommunicator(ALONE, torch.device("cpu"))
    t = torch.arange(6.0).view(2, 3)
    assert torch.equal(comm.all_reduce(t.clone()), t)
    assert torch.equal(comm.all_gather(t, 1), t)
    assert torch.equal(comm.reduce_scatter(t, 0), t)
    comm.barrier()


@pytest.mark.parametrize(
    ("device", "named"), [(None, None), (torch.device("cpu"), None), (torch.device("meta", 3), [3])]
)
def test_a_barrier_names_the_device_where_there_are_several(
    device: torch.device | None, named: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else torch takes one by the rank's number."""
    asked: list[object] = []
    comm = TorchCommunicator(ALONE, device)
    monkeypatch.setattr(dist, "barrier", lambda group, device_ids: asked.append(device_ids))
    comm.barrier()
    assert asked == [named]


def test_a_platform_without_collectives_of_its_own_gets_these_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("meta", 3)
    device: Any = SimpleNamespace(torch_device=card, inference=nullcontext)
    caps = SimpleNamespace(dist_backend="gloo")
    platform: Any = SimpleNamespace(caps=caps, make_communicator=lambda group, device: None)
    peers: Any = SimpleNamespace(meet=lambda stage: None, join=lambda backend: None)
    monkeypatch.setattr(worker, "TorchCommunicator", lambda group, device: (group.ranks, group.backend, device))
    monkeypatch.setattr(worker, "open_channels", lambda comm, device: None)
    made: object = worker.make_communicator(make_config(tensor_parallel_size=2), platform, device, peers)
    assert made == ((0, 1), "gloo", card)
