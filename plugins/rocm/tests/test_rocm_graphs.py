"""That steps are recorded by torch's HIP backend, and that ranks agree: with stand-ins, and over gloo on CPUs."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from octavo.plugin import BatchKey, GroupSpec
from octavo_rocm import communicator, graphs
from octavo_rocm.communicator import RcclCommunicator
from octavo_rocm.graphs import HipGraphs

KEY = BatchKey(num_tokens=8, num_seqs=8, max_q_len=1)


class FakeHip:
    """torch.cuda of a HIP build as far as recording needs it; notes the order of calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails = False

    def Stream(self, device: object) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: self.log.append("side is done"))

    def current_stream(self, device: object) -> Any:
        return SimpleNamespace(wait_stream=lambda other: self.log.append("current waits for side"))

    def graph_pool_handle(self) -> str:
        return "pool"

    def stream(self, stream: object) -> Any:
        import contextlib

        return contextlib.nullcontext()

    def CUDAGraph(self) -> Any:
        def end() -> None:
            self.log.append("end")
            if self.fails:
                raise RuntimeError("operation failed due to a previous error during capture")

        return SimpleNamespace(
            capture_begin=lambda pool, capture_error_mode: self.log.append(f"begin {pool} {capture_error_mode}"),
            capture_end=end,
            replay=lambda: self.log.append("replay"),
            reset=lambda: self.log.append("reset"),
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeHip:
    hip = FakeHip()
    freed = SimpleNamespace(_cuda_endAllocateToPool=lambda index, pool: hip.log.append(f"{pool} of {index} is free"))
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=hip, _C=freed))
    return hip


def test_a_step_is_recorded_once_and_replayed(fake: FakeHip) -> None:
    runner = HipGraphs(torch.device("cuda", 1))
    handle = runner.prepare(KEY, lambda: fake.log.append("step") or "outputs")
    assert fake.log == [
        "step",
        "side is done",
        "begin pool thread_local",
        "step",
        "end",
        "current waits for side",
    ]
    assert runner.run(handle) == "outputs"
    runner.close()
    assert fake.log[-2:] == ["replay", "reset"]


def test_a_broken_recording_is_named_and_gives_its_pool_back(fake: FakeHip) -> None:
    fake.fails = True
    with pytest.raises(RuntimeError, match=r"8 tokens in 8 sequences .*previous error"):
        HipGraphs(torch.device("cuda", 1)).prepare(KEY, lambda: None)
    assert fake.log[-1] == "pool of 1 is free"


# -- ranks --


def collectives(rank: int, port: int, listener: socket.socket | None, answers: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        port,
        2,
        is_master=listener is not None,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        comm = RcclCommunicator(GroupSpec(name="tp", ranks=(0, 1), rank=rank, backend="gloo"), torch.device("cpu"))
        t = torch.arange(4.0) + 10 * rank
        answers.put((rank, comm.all_reduce(t.clone()).tolist(), comm.all_gather(t, 0).tolist()))
        comm.barrier()
        comm.close()
    finally:
        dist.destroy_process_group()


def test_ranks_sum_and_gather() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    other = context.Process(target=collectives, args=(1, port, None, answers))
    other.start()
    try:
        collectives(0, port, listener, answers)
        got = [answers.get(), answers.get()]
    finally:
        other.join(60)
        other.kill()
    assert sorted(rank for rank, *_ in got) == [0, 1]
    for _, summed, gathered in got:
        assert summed == [10.0, 12.0, 14.0, 16.0]
        assert gathered == [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]


def test_a_barrier_names_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(communicator.dist, "barrier", lambda **arguments: seen.append(arguments["device_ids"]))
    comm = RcclCommunicator.__new__(RcclCommunicator)
    comm.group = None
    for device in (torch.device("cuda", 3), torch.device("cpu")):
        comm._device = device
        comm.barrier()
    assert seen == [[3], None]
