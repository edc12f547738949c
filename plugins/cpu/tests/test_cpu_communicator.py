"""Sums and joins of ranks through shared memory: against gloo, in real processes."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from octavo.plugin import GroupSpec
from octavo.plugin.torch import TorchCommunicator
from octavo_cpu import native
from octavo_cpu.communicator import NO_GROUP, CpuCommunicator
from octavo_cpu.kernels import build

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason="needs the compiled library")

SLOT = 256 << 10
"""Bytes of an exchange: what is larger goes in several."""
SIZES = (0, 1, 3, 1000, SLOT // 4, SLOT // 4 + 1, 3 * SLOT // 2 + 5)

Task = Callable[[CpuCommunicator, Connection], Any]


def rank_main(rank: int, size: int, port: int, task: Task, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    native.load().octavo_set_threads(2 if rank == 0 else 1)  # an odd pair adds alike
    comm = CpuCommunicator(GroupSpec(name="tp", ranks=tuple(range(size)), rank=rank, backend="gloo"))
    pipe.send(task(comm, pipe))
    comm.close()
    pipe.recv()


def run(size: int, task: Task) -> list[Any]:
    """What `task` gives on every rank."""
    with Ranks(size, task) as ranks:
        return [ranks.answer(rank) for rank in range(size)]


class Ranks:
    """Processes that run `task`, and end with the block."""

    def __init__(self, size: int, task: Task) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._store = dist.TCPStore("127.0.0.1", port, size, is_master=True, wait_for_workers=False)
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(rank, size, port, task, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def answer(self, rank: int) -> Any:
        assert self.pipes[rank].poll(60), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send("end")
        for process in self.processes:
            process.join(10)
            process.kill()


def part(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * rank + size % 997)).to(dtype)


def sums(comm: CpuCommunicator, _: Connection) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    found = []
    assert comm._group != NO_GROUP
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
        for size in SIZES:
            own = part(comm.rank, size, dtype)
            ours, theirs = comm.all_reduce(own.clone()), TorchCommunicator.all_reduce(comm, own.clone())
            found.append((f"{dtype} {size}", ours, theirs))
    rows = part(comm.rank, 60, torch.float32).view(6, 10)
    part_of_first = part(0, 60, torch.float32).view(6, 10)
    ours, theirs = comm.all_reduce(rows.clone()[:, ::2].t()), part_of_first[:, ::2].t().clone()
    for rank in range(1, comm.size):
        theirs += part(rank, 60, torch.float32).view(6, 10)[:, ::2].t()
    found.append(("strided", ours, theirs))
    found.append(("strided, from rank 0", comm.broadcast(rows.clone()[:, ::2].t(), 0), part_of_first[:, ::2].t()))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_those_of_gloo_and_equal_on_all_ranks(size: int) -> None:
    answers = run(size, sums)
    assert len(answers[0]) == 4 * len(SIZES) + 2
    for case in zip(*answers, strict=True):
        name, ours, theirs = case[0]
        assert all(torch.equal(other, ours) for _, other, _ in case), f"{name}: ranks differ"
        if size == 2 or ours.dtype == torch.int64:  # one addition, rounded once by both
            assert torch.equal(ours, theirs), name
        else:  # gloo rounds every partial sum to the dtype
            unit = torch.finfo(ours.dtype).eps
            torch.testing.assert_close(ours, theirs, rtol=2 * unit, atol=4 * unit, msg=lambda m, n=name: f"{n}: {m}")


def joins(comm: CpuCommunicator, _: Connection) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    found = []
    for shape in ((5,), (1, 7), (4, 3), (2, 0), (300, 401), (3, 2, 5)):
        for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.uint8):
            for dim in (*range(len(shape)), -1):
                own = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(comm.rank)).to(dtype)
                ours, theirs = comm.all_gather(own, dim), TorchCommunicator.all_gather(comm, own, dim)
                found.append((f"{shape} {dtype} dim {dim}", ours, theirs))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_joins_are_those_of_gloo(size: int) -> None:
    for found in run(size, joins):
        for name, ours, theirs in found:
            assert torch.equal(ours, theirs), name


def many(comm: CpuCommunicator, _: Connection) -> float:
    """Ranks that are early and late in turn never read what is written anew."""
    for step in range(3000):
        if step % 100 == 10 * comm.rank:
            time.sleep(0.002)
        t = comm.all_reduce(torch.full((257,), float(step + comm.rank)))
        assert bool((t == sum(step + rank for rank in range(comm.size))).all()), step
    return float(t[0])


def test_exchanges_in_a_row_do_not_overtake_each_other() -> None:
    assert run(3, many) == [3 * 2999 + 3] * 3


def waits_for_rank_1(comm: CpuCommunicator, pipe: Connection) -> str:
    comm.all_reduce(torch.ones(4))
    if comm.rank == 1:
        pipe.send("ready")
        time.sleep(60)
    try:
        comm.all_reduce(torch.ones(4))
    except ConnectionError as error:
        with pytest.raises(ConnectionError):
            comm.all_gather(torch.ones(4), 0)
        return str(error)
    return "no error"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_dies_is_an_error_by_number_and_not_a_hang(how: signal.Signals) -> None:
    with Ranks(3, waits_for_rank_1) as ranks:
        assert ranks.answer(1) == "ready"
        pid = ranks.processes[1].pid
        assert pid is not None
        os.kill(pid, how)
        for rank in (0, 2):
            assert "process of rank 1 ended" in ranks.answer(rank)


def refused_on_rank_1(comm: CpuCommunicator, _: Connection) -> tuple[int, torch.Tensor]:
    if comm.rank == 1:
        native.load().octavo_group_open = lambda *_: None
    again = GroupSpec(name="again", ranks=tuple(range(comm.size)), rank=comm.rank, backend="gloo")
    second = CpuCommunicator(again)
    return second._group, second.all_reduce(torch.ones(3))


def test_where_one_rank_cannot_share_memory_gloo_serves_all() -> None:
    for group, total in run(2, refused_on_rank_1):
        assert group == NO_GROUP
        assert torch.equal(total, torch.full((3,), 2.0))


def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    program, driver = tmp_path / "ranks", Path(__file__).with_name("sanitized_ranks.cpp")
    flags = ["-std=c++17", "-O1", "-g1", "-pthread", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = [str(driver), *(str(build.HERE / name) for name in ("allreduce.cpp", "threads.cpp"))]
    subprocess.run(["g++", *flags, f"-I{build.HERE}", *sources, "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "good" in done.stdout
