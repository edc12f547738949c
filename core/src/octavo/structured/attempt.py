"""Whether a grammar compiles within a time and memory limit: tried in a forked child, which can be killed.

Libraries cannot be stopped from outside, and a short regular expression may take them hours. A spec that compiles here
is compiled again by the parent, on a thread.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from octavo.errors import RequestError

MEMORY_BYTES = 2 << 30
"""Address space that one grammar may take beyond the parent's."""


class Verdict(msgspec.Struct, frozen=True):
    """What came of an attempt. message "": it compiles; field "": the failure is not the request's fault."""

    message: str = ""
    field: str = ""


@dataclass
class Attempt:
    """A child that compiles. Its `pipe` is readable when it has ended."""

    compile: Callable[[], object]
    timeout: float
    what: str
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.pipe, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.write(write, msgspec.msgpack.encode(_try(self.compile, self.timeout, self.what)))
            finally:
                os._exit(0)
        os.close(write)

    @property
    def deadline(self) -> float:
        """When the child is to be killed (monotonic seconds)."""
        return self.started + self.timeout

    def finish(self) -> Verdict:
        """The verdict of a child that has ended or is past its deadline; frees what it held."""
        late = time.monotonic() >= self.deadline
        os.kill(self.pid, signal.SIGKILL)  # nothing if it has exited: it is a zombie until it is waited for
        os.waitpid(self.pid, 0)
        answer = os.read(self.pipe, 1 << 16)
        os.close(self.pipe)
        if answer:
            return msgspec.msgpack.decode(answer, type=Verdict)
        if late:
            return Verdict(f"{self.what} takes more than {self.timeout:g} s to compile: make it simpler", self.what)
        return Verdict(f"{self.what} cannot be compiled: the grammar library crashed on it", self.what)


def _try(compile: Callable[[], object], timeout: float, what: str) -> Verdict:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(timeout) + 2)  # should the parent be gone
    os.nice(10)
    _limit_memory()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries say of it goes to the client, not into the log
    try:
        compile()
    except RequestError as error:
        return Verdict(str(error), error.field)
    except MemoryError:
        return Verdict(f"{what} needs more than {MEMORY_BYTES >> 20} MiB to compile: make it simpler", what)
    except RecursionError:
        return Verdict(f"{what} is nested too deeply", what)
    except Exception as error:  # whatever a library thinks of: the request goes on no further
        return Verdict(f"{what} cannot be compiled: {type(error).__name__}: {error}"[:400], what)
    return Verdict()


def _limit_memory() -> None:
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # a system without /proc
        return
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
