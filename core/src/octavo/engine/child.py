"""What a process that Octavo starts does first: the engine, and the workers of further ranks."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading

from octavo import logs


def settle(log_level: int) -> None:
    """Leave interrupts to the parent, which decides when this process ends; end with it if it dies; log as it does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, name="octavo-parent-watch", daemon=True).start()
    logs.set_up(log_level)


def _exit_with_parent() -> None:
    """A process whose parent is gone serves nobody: leave at once, in the middle of a step if need be."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
