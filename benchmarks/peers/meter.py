"""Times one piece of work, and says who else used the machine meanwhile. Standard library only: it runs in every
engine's environment.

A sample on a disturbed machine is taken again, and the cleanest of a few counts. Everything is read from Linux's /proc.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
CPUS = os.cpu_count() or 1
PROC = Path("/proc")


@dataclass(frozen=True)
class Sample:
    """seconds: wall time. tokens: what the work gave. foreign: share of the machine's CPU time that other processes, or
    the hypervisor (steal), took meanwhile. own_cores: how many cores this engine kept busy."""

    seconds: float
    tokens: int
    foreign: float
    own_cores: float

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class Patience:
    """max_foreign: a sample with a larger foreign share is repeated, up to `retries` times, each after waiting at most
    `wait_s` for the machine to be quiet."""

    max_foreign: float = 0.04
    retries: int = 2
    wait_s: float = 30.0


def measure(work: Callable[[], int], patience: Patience) -> Sample:
    """The cleanest sample of `work`, which returns how many tokens it gave."""
    best: Sample | None = None
    for _ in range(patience.retries + 1):
        wait_for_quiet(patience)
        sample = once(work)
        if best is None or sample.foreign < best.foreign:
            best = sample
        if sample.foreign <= patience.max_foreign:
            break
    assert best is not None
    return best


def once(work: Callable[[], int]) -> Sample:
    """One sample, as it comes."""
    busy, own, start = machine_seconds(), own_seconds(), time.perf_counter()
    tokens = work()
    seconds = time.perf_counter() - start
    own = own_seconds() - own
    foreign = max(0.0, machine_seconds() - busy - own) / (seconds * CPUS)
    return Sample(seconds=seconds, tokens=tokens, foreign=foreign, own_cores=own / seconds)


@contextmanager
def exclusively(lock: Path | None) -> Iterator[None]:
    """Hold the lock, if one is named: several people's measurements on one machine then do not overlap."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def wait_for_quiet(patience: Patience) -> None:
    """Until others leave the machine alone for half a second, or patience ends."""
    end = time.monotonic() + patience.wait_s
    while True:
        busy, own, start = machine_seconds(), own_seconds(), time.monotonic()
        time.sleep(0.5)
        others = machine_seconds() - busy - (own_seconds() - own)
        if others <= patience.max_foreign * CPUS * (time.monotonic() - start) or time.monotonic() > end:
            return


def machine_seconds() -> float:
    """CPU seconds since boot that were not idle, over all CPUs; stolen ones included."""
    fields = (PROC / "stat").read_text().partition("\n")[0].split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / TICK


def own_seconds() -> float:
    """CPU seconds of this process and its living descendants."""
    total = 0
    for pid in family():
        if stat := stat_fields(pid):
            total += int(stat[11]) + int(stat[12])
    return total / TICK


def peak_resident_bytes() -> int:
    """Sum of the largest resident sizes of this process and its living descendants."""
    total = 0
    for pid in family():
        try:
            lines = (PROC / str(pid) / "status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return total


def seconds_since_process_start() -> float:
    """How long this process has existed."""
    stat = stat_fields(os.getpid())
    assert stat is not None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat[19]) / TICK


def family() -> list[int]:
    """This process and its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdecimal() and (stat := stat_fields(int(entry.name))):
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    found, pending = [], [os.getpid()]
    while pending:
        found.append(pending.pop())
        pending += children.get(found[-1], [])
    return found


def stat_fields(pid: int) -> list[str] | None:
    """/proc/PID/stat behind the program's name, whose parentheses may hold anything; None if it is gone."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
