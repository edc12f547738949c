"""Ctrl-C at a moment of our choosing."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from importlib import import_module

raw = import_module("_signal")
"""What the module `signal` wraps. The wrappers look for an enum of every handler, and fail by way of an exception: a
tenth of a step's Python."""
SIGINT = int(signal.SIGINT)


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold Ctrl-C back until the block is over, then raise KeyboardInterrupt. A second Ctrl-C goes through at once.

    Does nothing on other threads than the main one (they never get KeyboardInterrupt), nor where the program has
    its own handler.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or raw.getsignal(SIGINT) is not signal.default_int_handler:
        yield
        return
    pending = False

    def hold(*_: object) -> None:
        nonlocal pending
        if pending:
            raise KeyboardInterrupt
        pending = True

    raw.signal(SIGINT, hold)
    try:
        yield
    finally:
        raw.signal(SIGINT, signal.default_int_handler)
    if pending:
        raise KeyboardInterrupt
