"""What the process of a further rank runs: build the same worker, then do every step that rank 0 sends.

All ranks sample alike (their logits are equal, and sampling is keyed by seed and position), so nothing is sent back.
"""

from __future__ import annotations

import contextlib
import logging
import os
from multiprocessing.connection import Connection

from octavo.active_platform import PlatformLock
from octavo.config import EngineConfig
from octavo.discovery import load
from octavo.engine.child import settle
from octavo.engine.messages import Failed
from octavo.engine.pump import describe
from octavo.errors import OctavoError
from octavo.parallel.ranks import GO, STOP, Reached, encode
from octavo.parallel.wire import decode_batch, decode_masks, is_masks
from octavo.plugin.contracts import MaskingExecutor, ModelExecutor

log = logging.getLogger("octavo.ranks")


class Stopped(Exception):
    """Rank 0 wants no more of this rank."""


class Follower:
    """The `octavo.parallel.ranks.Peers` of a rank that is not 0: it knows rank 0 only."""

    def __init__(self, config: EngineConfig, pipe: Connection, port: int, local_rank: int) -> None:
        self.local_rank = local_rank
        self._parallel = config.parallel
        self._pipe, self._port = pipe, port

    def meet(self, stage: str, state: str = "") -> None:
        try:
            self._pipe.send_bytes(encode(Reached(stage=stage, state=state)))
        except OSError:
            raise Stopped from None
        if self.receive() != GO:
            raise Stopped

    def join(self, backend: str) -> None:
        from octavo.parallel.communicator import join

        join(self._parallel.rank, self._parallel.tensor_parallel_size, backend=backend, port=self._port)

    def receive(self) -> bytes:
        """The next message of rank 0."""
        try:
            return self._pipe.recv_bytes()
        except (EOFError, OSError):
            raise Stopped from None

    def tell(self, error: BaseException) -> None:
        """Say what went wrong, if anyone still listens."""
        known = isinstance(error, OctavoError)
        kind, message = (type(error).__name__, str(error)) if known else ("EngineError", describe(error))
        with contextlib.suppress(OSError):
            self._pipe.send_bytes(encode(Failed(kind=kind, message=message)))


def follow(
    config: EngineConfig, lock: PlatformLock, pipe: Connection, port: int, local_rank: int, log_level: int
) -> None:
    """The process, from start to exit. Exit code 1 after a failure, which it has reported."""
    settle(log_level)
    follower = Follower(config, pipe, port, local_rank)
    try:
        work(config, lock, follower)
        code = 0
    except Stopped:
        code = 0
    except Exception as error:
        if not isinstance(error, OctavoError):
            log.exception("rank %d failed", config.parallel.rank)
        follower.tell(error)
        code = 1
    logging.shutdown()
    # Nothing is left to take apart, or what is left may wait for other ranks.
    os._exit(code)


def work(config: EngineConfig, lock: PlatformLock, follower: Follower) -> None:
    """Build, serve until rank 0 says stop, take everything apart."""
    from octavo.parallel.communicator import leave
    from octavo.runner.worker import build_worker, kv_state

    platform = load(lock, options=config.platform.options)
    worker = build_worker(config, platform, peers=follower)
    follower.meet("ready", kv_state(worker))
    assert config.scheduler.run_ahead is not None, "rank 0 decides how far to run ahead"
    serve(worker.executor, follower, run_ahead=config.scheduler.run_ahead)
    worker.executor.close()
    worker.comm.close()
    leave()


def serve(executor: ModelExecutor, follower: Follower, *, run_ahead: int) -> None:
    """Launch what comes; at most `run_ahead` steps stay uncollected when the next is awaited, as on rank 0."""
    pending = 0
    while (message := follower.receive()) != STOP:
        keep = run_ahead
        if is_masks(message):
            assert isinstance(executor, MaskingExecutor)
            executor.mask(decode_masks(message))
        else:
            batch = decode_batch(message)
            executor.launch(batch)
            pending += 1
            keep = max(run_ahead, int(batch.masked))  # its masks are still to come
        while pending > keep:
            executor.collect()
            pending -= 1
    for _ in range(pending):
        executor.collect()
