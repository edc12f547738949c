"""Two ranks as real processes, which do one collective at a time when told to: what tier 5 asks.

    test                       rank 0                    rank 1
     ── Task ──>             communicator  <─────>  communicator
     <── result or error ──    on the platform's devices

The test waits for both answers with a limit, so that a collective that one rank never enters is a failure by name, and
no test hangs. `wanted` is what the results must be, computed from all ranks' inputs on the CPU.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import torch

from octavo.parallel.ranks import environment, worker_env
from octavo.plugin import BatchKey, Communicator, GroupSpec

if TYPE_CHECKING:
    from octavo.active_platform import ActivePlatform, PlatformLock
    from octavo.testing.conformance.subject import Subject

SIZE = 2
START_S, ANSWER_S = 180.0, 60.0
"""How long ranks may take to import and join, and for one collective."""

Tensors = list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """One collective on one shape. splits: splits[i][j] rows go from rank i to rank j (all_to_all).

    strided: the tensor is a column slice of a wider one. captured: recorded once, then replayed on two inputs.
    rounds: numbers whose sums are not exact.
    """

    collective: str
    shape: tuple[int, ...]
    dtype: str
    dim: int = 0
    src: int = 0
    splits: tuple[tuple[int, ...], ...] = ()
    strided: bool = False
    captured: bool = False
    rounds: bool = False

    def __str__(self) -> str:
        notes = [text for text, is_so in (("strided", self.strided), ("captured", self.captured)) if is_so]
        notes += [f"dim {self.dim}"] if self.dim else []
        notes += [f"splits {self.splits}"] if self.splits else []
        return f"{self.collective} of {self.dtype} {self.shape}" + "".join(f", {note}" for note in notes)


def given(task: Task, rank: int, turn: int = 0) -> torch.Tensor:
    """A rank's input: small whole numbers, so that sums are exact in every dtype and order, unless it `rounds`."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    shape = task.shape
    if task.splits:
        shape = (sum(task.splits[rank]), *shape[1:])
    width = (*shape[:-1], 2 * shape[-1]) if task.strided else shape
    numbers = torch.randint(0, 9, width, generator=generator) - (4 if task.dtype != "uint8" else 0)
    if task.rounds:
        numbers = torch.randn(width, generator=generator)
    numbers = numbers.to(getattr(torch, task.dtype))
    return numbers[..., : shape[-1]] if task.strided else numbers


def wanted(task: Task, rank: int, turn: int = 0) -> torch.Tensor:
    """The result on one rank."""
    inputs = [given(task, other, turn) for other in range(SIZE)]
    match task.collective:
        case "all_reduce":
            return torch.stack(inputs).sum(0).to(inputs[0].dtype)
        case "reduce_scatter":
            return torch.stack(inputs).sum(0).to(inputs[0].dtype).chunk(SIZE, dim=task.dim)[rank]
        case "all_gather":
            return torch.cat(inputs, dim=task.dim)
        case "all_to_all":
            pieces = [torch.split(tensor, list(splits)) for tensor, splits in zip(inputs, task.splits, strict=True)]
            return torch.cat([piece[rank] for piece in pieces])
        case "broadcast":
            return inputs[task.src]
    assert task.collective == "send_recv", task.collective
    return inputs[1 - rank]


def do(comm: Communicator, task: Task, t: torch.Tensor) -> torch.Tensor:
    """One collective on a communicator."""
    match task.collective:
        case "all_reduce":
            return comm.all_reduce(t)
        case "reduce_scatter":
            return comm.reduce_scatter(t, task.dim)
        case "all_gather":
            return comm.all_gather(t, task.dim)
        case "all_to_all":
            out_splits = [splits[comm.rank] for splits in task.splits]
            return comm.all_to_all(t, task.splits[comm.rank], out_splits)
        case "broadcast":
            return comm.broadcast(t, task.src)
    assert task.collective == "send_recv", task.collective
    if comm.rank == 0:
        comm.send(t, 1)
        return comm.recv(t, 1)
    received = comm.recv(t, 0)
    comm.send(t, 0)
    return received


class Pair:
    """The test's end. Once a rank hangs or dies, both are ended, and what is asked afterwards says why."""

    def __init__(self, subject: Subject) -> None:
        platform = subject.platform
        launch = platform.launch(subject.config)
        context = multiprocessing.get_context(launch.start_method)
        self._pipes: list[Connection] = []
        self._ranks: list[BaseProcess] = []
        self._over = ""
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(  # type: ignore[attr-defined]
                target=serve, args=(platform.lock, rank, 0 if launch.visible_env else rank, theirs), daemon=True
            )
            with environment(worker_env(launch, rank, SIZE)):
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._ranks.append(process)
        answers = self._answers("opening a port", START_S, (0,))
        if not self._over:
            self._pipes[1].send(answers[0])
            self._answers("making the communicator", START_S)

    def ask(self, task: Task) -> list[Tensors]:
        """Both ranks' results, one tensor for each turn. Raises AssertionError naming the rank and what it raised."""
        assert not self._over, self._over
        for pipe in self._pipes:
            pipe.send(task)
        answers = self._answers(str(task), ANSWER_S)
        assert not self._over, self._over
        for rank in range(SIZE):
            assert not isinstance(answers[rank], str), f"{task}: rank {rank} raised {answers[rank]}"
        return [answers[rank] for rank in range(SIZE)]

    def _answers(self, what: str, limit_s: float, ranks: Sequence[int] = range(SIZE)) -> dict[int, Any]:
        """Rank -> its answer. Looks at all ranks: one that ends leaves the others waiting for it."""
        answers: dict[int, Any] = {}
        end = time.monotonic() + limit_s
        while not self._over and not set(ranks) <= set(answers):
            waited = {self._pipes[rank]: rank for rank in range(SIZE) if rank not in answers}
            ready = wait(list(waited), max(0.0, end - time.monotonic()))
            if not ready:
                silent = " and ".join(f"rank {rank}" for rank in waited.values() if rank in ranks)
                self._end(f"{what}: {silent} gave no answer within {limit_s:.0f} seconds")
            for pipe, rank in waited.items():
                if pipe not in ready or self._over:
                    continue
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    self._end(f"{what}: the process of rank {rank} ended")
                else:
                    if isinstance(answers[rank], Fatal):
                        self._end(f"{what}: rank {rank} raised {answers[rank].text}")
        return answers

    def _end(self, why: str) -> None:
        self._over = why
        for process in self._ranks:
            process.kill()
            process.join()

    def close(self) -> None:
        """End the ranks; idempotent."""
        if self._over:
            return
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._ranks:
            process.join(10)
        self._end("closed")


@dataclass(frozen=True)
class Fatal:
    """What ended a rank before its communicator was there."""

    text: str


def serve(lock: PlatformLock, rank: int, local_rank: int, pipe: Connection) -> None:
    """The process of a rank: load the platform, join, answer tasks until None comes."""
    try:
        platform, device, comm = opened(lock, rank, local_rank, pipe)
    except BaseException as error:
        pipe.send(Fatal(in_words(error)))
        os._exit(1)
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        try:
            with device.inference():
                answer: Tensors | str = results(platform, device, comm, task)
        except Exception as error:
            answer = in_words(error)
        pipe.send(answer)
    comm.close()
    os._exit(0)


def opened(lock: PlatformLock, rank: int, local_rank: int, pipe: Connection) -> tuple[ActivePlatform, Any, Any]:
    """The platform, this rank's device and its communicator, made as a worker makes them."""
    from octavo.config import make_config
    from octavo.discovery import load
    from octavo.parallel.communicator import join
    from octavo.plugin.torch import TorchCommunicator

    platform = load(lock)
    config = platform.configure(make_config(platform=lock.name, tensor_parallel_size=SIZE))[0]
    config = replace(config, parallel=replace(config.parallel, rank=rank))
    device = platform.make_device(local_rank, config)
    device.activate()
    listener = socket.create_server(("127.0.0.1", 0)) if rank == 0 else None
    if listener is not None:
        port = listener.getsockname()[1]
        pipe.send(port)
    else:
        port = pipe.recv()
    backend = platform.caps.dist_backend or "gloo"
    join(rank, SIZE, backend=backend, port=port, listener=listener)
    group = GroupSpec(name="tp", ranks=tuple(range(SIZE)), rank=rank, backend=backend)
    return platform, device, platform.make_communicator(group, device) or TorchCommunicator(group, device.torch_device)


def results(platform: ActivePlatform, device: Any, comm: Communicator, task: Task) -> Tensors:
    """What the collective gives on this rank, on the CPU: one tensor, or one for each replay."""
    if task.collective == "barrier":
        comm.barrier()
        return []
    if not task.captured:
        result = do(comm, task, moved(given(task, comm.rank), device.torch_device))
        device.synchronize()
        return [result.cpu()]
    runner = platform.make_graph_runner(platform.configure(config_of(platform))[0], device)
    assert runner is not None, "capture is claimed, but there is no graph runner"
    x = given(task, comm.rank).to(device.torch_device)

    def step() -> torch.Tensor:
        # A collective may work in place, and a step's input must stay.
        return do(comm, task, x + 0)

    handle = runner.prepare(BatchKey(num_tokens=task.shape[0], num_seqs=1), step)
    found = []
    for turn in (1, 2):
        x.copy_(given(task, comm.rank, turn))
        found.append(runner.run(handle).to("cpu", copy=True))
        device.synchronize()
    runner.close()
    return found


def config_of(platform: ActivePlatform) -> Any:
    from octavo.config import make_config

    return make_config(platform=platform.name, tensor_parallel_size=SIZE)


def moved(t: torch.Tensor, target: torch.device) -> torch.Tensor:
    """A copy on the device that is strided as `t` is."""
    if t.is_contiguous():
        return t.to(target, copy=True)
    wide = torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype, device=target)
    wide[..., : t.shape[-1]] = t.to(target)
    return wide[..., : t.shape[-1]]


def in_words(error: BaseException) -> str:
    """Its type and its first line: what a report has room for."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
