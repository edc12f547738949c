"""The other ranks of an engine as rank 0 sees them: processes that it starts, meets, sends every step to, and watches.

    rank 0, in the engine's process                rank r, spawned (see `follower`)
      Ranks.meet(stage)     <── Reached ──  meet(stage)         all are there, so that a collective may begin
                            ──── GO ─────>
      Ranks.send(step)      ─── Batch ───>  launch, collect
      a thread watches      <── Failed ───  what went wrong, then exit
                            <─── exit ────
      Ranks.close           ─── STOP ────>  close, exit

One pipe a rank and no files. A rank that fails or dies is noticed here by its words or its exit, never by a timeout.
Imports no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Protocol

import msgspec

from octavo import errors
from octavo.active_platform import PlatformLock
from octavo.config import EngineConfig
from octavo.engine.messages import Failed
from octavo.errors import EngineError
from octavo.plugin.data import WorkerLaunch

log = logging.getLogger("octavo.ranks")

GO, STOP = b"go", b"stop"
PROGRESS_S = 10.0
"""How often a wait for other ranks says whom it waits for."""
BLAME_S = 2.0
"""A lost connection is seen at once, the exit of the process behind it a little later."""
UNBLOCK_S = 5.0
"""A main thread that has not noticed a lost rank by then waits for it on the device: its collectives are aborted.
If it is still waiting after the same time again, nothing but ending the process helps."""
STOP_S = 10.0
"""Ranks told to stop end their step first; after this they are killed."""


class Peers(Protocol):
    """The other ranks, while a worker is built. local_rank: the worker's device among those its process sees."""

    @property
    def local_rank(self) -> int: ...

    def meet(self, stage: str, state: str = "") -> None:
        """Wait until all ranks are at this stage. `state` must be equal on all. Raises what another rank met."""
        ...

    def join(self, backend: str) -> None:
        """Form the process group of torch.distributed; behind a `meet`."""
        ...


class Alone:
    """The `Peers` of the only rank."""

    local_rank = 0

    def meet(self, stage: str, state: str = "") -> None:
        """Nobody to wait for."""

    def join(self, backend: str) -> None:
        """Nobody to join."""


class Reached(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank is at this stage of start-up; see `Peers.meet`."""

    stage: str
    state: str


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Reached | Failed).decode


class Ranks:
    """Ranks 1 .. N - 1. Made by `start_ranks`; one thread uses it, its own thread watches."""

    local_rank = 0

    def __init__(self, processes: Mapping[int, BaseProcess], pipes: Mapping[int, Connection], port: socket.socket):
        self._processes, self._pipes = processes, pipes
        self._living = dict(processes)
        self._port = port
        self._reached: dict[int, Reached] = {}
        self._failure: tuple[type[Exception], str] | None = None
        self._news = threading.Condition()
        self._noticed = threading.Event()
        self._closing = False
        self._inside = False
        self._leave: Callable[[], None] = lambda: None
        for process in processes.values():
            atexit.register(process.kill)
        self._watcher = threading.Thread(target=self._watch, name="octavo-rank-watch", daemon=True)
        self._watcher.start()

    # -- start-up: see Peers --

    def meet(self, stage: str, state: str = "") -> None:
        with self._news:
            while self._failure is None and (late := self._not_at(stage)):
                if not self._news.wait(PROGRESS_S):
                    log.info("waiting for rank %s to reach: %s", ", ".join(map(str, late)), stage)
        self.check()
        for rank, reached in sorted(self._reached.items()):
            if reached.state != state:
                raise EngineError(f"rank {rank} differs from rank 0 ({stage}): {reached.state}, not {state}")
        self._send(GO)

    def join(self, backend: str) -> None:
        from octavo.parallel.communicator import abandon, join

        port = self._port.getsockname()[1]
        join(0, len(self._processes) + 1, backend=backend, port=port, listener=self._port)
        self._leave = abandon

    def _not_at(self, stage: str) -> list[int]:
        return [r for r in self._processes if r not in self._reached or self._reached[r].stage != stage]

    # -- serving --

    def send(self, step: bytes) -> None:
        """Hand a step to every rank. Raises the failure of a rank that is gone."""
        self.check()
        self._send(step)

    def check(self) -> None:
        """Raise what happened to another rank, if something did."""
        if self._failure is not None:
            self._noticed.set()
            kind, message = self._failure
            raise kind(message)

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """What this rank meets inside, other than errors made for users, is another rank's failure if there is one."""
        outer, self._inside = self._inside, True
        try:
            yield
        except errors.OctavoError:
            raise
        except Exception as error:
            with self._news:
                self._news.wait_for(lambda: self._failure is not None, BLAME_S)
            if self._failure is None:
                raise
            self._noticed.set()
            kind, message = self._failure
            raise kind(message) from error
        finally:
            self._inside = outer

    def _send(self, message: bytes) -> None:
        with self.blamed():
            for pipe in self._pipes.values():
                pipe.send_bytes(message)

    # -- the end --

    @property
    def failed(self) -> bool:
        """Whether a rank is lost, so that nobody may wait for the others any more."""
        return self._failure is not None

    def stop(self) -> None:
        """Tell the ranks to end; `close` waits until they have."""
        self._closing = True
        self._noticed.set()
        for pipe in self._pipes.values():
            with contextlib.suppress(OSError):  # it is gone already
                pipe.send_bytes(STOP)

    def close(self) -> None:
        """End all ranks: after `stop` they have time to do it themselves. Safe to call twice."""
        orderly = self._closing and not self.failed
        self._closing = True
        self._noticed.set()
        if orderly:
            self._watcher.join(STOP_S)
        for rank, process in list(self._living.items()):
            if orderly:
                log.warning("rank %d did not stop within %g s and is killed", rank, STOP_S)
            process.kill()
        self._watcher.join()
        for process in self._processes.values():
            atexit.unregister(process.kill)
        for pipe in self._pipes.values():
            pipe.close()
        self._port.close()

    def abandon(self) -> None:
        """Leave the process group without the others, when a rank is lost, so that what waits for it ends.

        Libraries wait meanwhile for recorded steps that use the group and may never end: not for longer than this does.
        """
        leaving = threading.Thread(target=self._leave, name="octavo-abandon", daemon=True)
        leaving.start()
        leaving.join(UNBLOCK_S)

    # -- the watching thread --

    def _watch(self) -> None:
        """Take in what ranks say until all have exited. Only this thread waits for the processes."""
        talking = dict(self._pipes)
        living = self._living
        while living:
            waiting: list[Connection | int] = [*talking.values(), *(p.sentinel for p in living.values())]
            ready = multiprocessing.connection.wait(waiting)
            for rank in [r for r, pipe in talking.items() if pipe in ready]:
                self._hear(rank, talking)
            for rank in [r for r, process in living.items() if process.sentinel in ready]:
                while rank in talking and talking[rank].poll():  # its last words
                    self._hear(rank, talking)
                process = living[rank]
                process.join()
                del living[rank]
                if not self._closing:
                    self._fail(EngineError, self._obituary(rank, process.exitcode or 0))

    def _hear(self, rank: int, talking: dict[int, Connection]) -> None:
        try:
            message = _decode(talking[rank].recv_bytes())
        except (EOFError, OSError):
            del talking[rank]
            return
        if isinstance(message, Failed):
            kind = getattr(errors, message.kind, EngineError)
            self._fail(kind, f"rank {rank}: {message.message}")
            return
        with self._news:
            self._reached[rank] = message
            self._news.notify_all()

    def _obituary(self, rank: int, code: int) -> str:
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        hint = "; it may have run out of memory" if code == -signal.SIGKILL else ""
        if rank not in self._reached and code > 0:
            hint = (
                "; its output says why. A script that makes an LLM needs `if __name__ == '__main__':` around its code"
            )
        return f"the process of rank {rank} has ended ({how}){hint}"

    def _fail(self, kind: type[Exception], message: str) -> None:
        with self._news:
            if self._failure is not None or self._closing:
                return
            self._failure = (kind, message)
            self._news.notify_all()
        threading.Thread(target=self._unblock, args=(message,), name="octavo-unblock", daemon=True).start()

    def _unblock(self, message: str) -> None:
        """Get the main thread out of a collective that the lost rank will never complete, if it is in one."""
        if self._noticed.wait(UNBLOCK_S) or not self._inside:
            return
        log.error("%s; collectives that wait for it are aborted", message)
        self.abandon()
        if not self._noticed.wait(UNBLOCK_S) and multiprocessing.parent_process() is not None:
            log.critical("%s, and the device of rank 0 still waits for it: this process ends", message)
            os._exit(1)


def start_ranks(config: EngineConfig, lock: PlatformLock, launch: WorkerLaunch) -> Ranks:
    """Start the processes of ranks 1 .. N - 1 on this machine; rank 0 is the caller."""
    from octavo.parallel.follower import follow

    size = config.parallel.tensor_parallel_size
    port = socket.create_server(("127.0.0.1", 0))
    context = multiprocessing.get_context(launch.start_method)
    log_level = logging.getLogger("octavo").getEffectiveLevel()
    processes: dict[int, BaseProcess] = {}
    pipes: dict[int, Connection] = {}
    if launch.env is not None:
        os.environ.update(launch.env(0, size))
    for rank in range(1, size):
        pipes[rank], theirs = context.Pipe()
        own = replace(config, parallel=replace(config.parallel, rank=rank))
        local_rank = 0 if launch.visible_env else rank
        processes[rank] = context.Process(  # type: ignore[attr-defined]
            target=follow,
            args=(own, lock, theirs, port.getsockname()[1], local_rank, log_level),
            name=f"octavo-rank-{rank}",
            daemon=launch.daemon,
        )
        with environment(worker_env(launch, rank, size)):
            processes[rank].start()
        theirs.close()
    return Ranks(processes, pipes, port)


def worker_env(launch: WorkerLaunch, rank: int, size: int) -> dict[str, str]:
    """What a worker's environment has beyond this process's: the platform's wishes, and the devices it may see."""
    env = dict(launch.env(rank, size)) if launch.env is not None else {}
    if launch.visible_env:
        each = launch.devices_per_worker
        seen = os.environ.get(launch.visible_env)
        devices = seen.split(",") if seen else [str(i) for i in range(size * each)]
        env[launch.visible_env] = ",".join(devices[rank * each : (rank + 1) * each])
    return env


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the processes started inside."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
