"""Where a worker runs and where its memory lies. Knows no torch.

    node     memory, and the CPUs next to it; what lies on another node is slower to read (NUMA)
    Place    what one worker gets: one CPU of each core of its nodes
    take     confines the calling thread, and every thread it starts from then on, to a place

A thread is not tied to one CPU: the system moves it where another program has taken its own. Linux only.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo_cpu import host

log = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"

POLICY_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""System calls (set_mempolicy, get_mempolicy), for which the C library has no functions."""
DEFAULT_POLICY, PREFERRED_POLICY = 0, 1
MASK_WORDS = 16
"""Of a set of nodes, as unsigned long."""


@dataclass(frozen=True)
class Place:
    """cpus: none leaves the worker where the system puts it. node: the one that all of them belong to, if there is."""

    cpus: tuple[int, ...] = ()
    node: int | None = None


ANYWHERE = Place()


def parse(text: str) -> str | tuple[tuple[int, ...], ...]:
    """The option `threads_bind`. Raises ValueError for what is no list of CPUs, or names one that may not be used."""
    if text in (AUTO, NONE):
        return text
    lists = tuple(tuple(host.cpu_list(part)) for part in text.split("|"))
    if not all(lists):
        raise ValueError("must be auto, none, or lists of CPUs such as 0-3|4-7, one for each worker")
    if unusable := sorted({cpu for cpus in lists for cpu in cpus} - set(host.allowed_cpus())):
        raise ValueError(f"this process may not use CPU {', '.join(map(str, unusable))}")
    return lists


def place_of(worker: int, num_workers: int, bind: object = AUTO) -> Place:
    """One worker's place among several. bind: as `parse` gives it; lists of CPUs are given out in turn.

    auto gives each worker its own where there are several of both, and none gets fewer cores than it otherwise would.
    A single worker keeps the machine.
    """
    nodes = host.nodes()
    if isinstance(bind, tuple):
        cpus = bind[worker % len(bind)]
        return Place(cpus, only(node for node, near in nodes.items() if not near.isdisjoint(cpus)))
    if bind != AUTO or num_workers < 2 or len(nodes) < 2:
        return ANYWHERE
    taken = [nodes_of(w, num_workers, sorted(nodes)) for w in range(num_workers)]
    cores = {node: host.one_of_each_core(near) for node, near in nodes.items()}
    sharing = {node: sum(node in own for own in taken) for node in nodes}
    least = min(sum(len(cores[node]) // sharing[node] for node in own) for own in taken)
    if least < host.physical_cores() // num_workers:
        return ANYWHERE
    own = taken[worker]
    return Place(tuple(cpu for node in own for cpu in cores[node]), only(own))


def nodes_of(worker: int, num_workers: int, nodes: Sequence[int]) -> Sequence[int]:
    """The nodes of a worker: its part of them, or one that it shares with its neighbours."""
    first = worker * len(nodes) // num_workers
    return nodes[first : max(first + 1, (worker + 1) * len(nodes) // num_workers)]


def only(nodes: Iterable[int]) -> int | None:
    """The one element; None of several or none."""
    found = list(nodes)
    return found[0] if len(found) == 1 else None


_outside: dict[int, tuple[set[int], bool]] = {}
"""By thread: the CPUs it had before it was confined, and whether its memory policy was changed too."""


def take(place: Place) -> None:
    """Confine the calling thread to a place, in which all that it starts stays; `leave` undoes it.

    New memory comes from the place's node as long as that has some: a full node is no reason to be killed.
    """
    leave()
    if not place.cpus or not hasattr(os, "sched_setaffinity"):
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, place.cpus)
    _outside[threading.get_native_id()] = before, place.node is not None and prefer(place.node)


def leave() -> None:
    """Give the calling thread back what it had before `take`."""
    cpus, preferring = _outside.pop(threading.get_native_id(), (None, False))
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    if preferring:
        set_policy(DEFAULT_POLICY)


def prefer(node: int) -> bool:
    """Whether new memory of this thread comes from a node first. One who chose a policy before, as numactl does, keeps
    it; where the system refuses, memory still comes from the node of the CPU that touches it first."""
    if policy() != DEFAULT_POLICY:
        return False
    if error := set_policy(PREFERRED_POLICY, node):
        log.info("memory is not bound to node %d: %s", node, os.strerror(error))
    return not error


def policy() -> int | None:
    """The calling thread's memory policy; None where it cannot be asked for."""
    mode = ctypes.c_int()
    return None if system_call(1, ctypes.byref(mode), None, 0, None, 0) else mode.value


def set_policy(mode: int, node: int | None = None) -> int:
    """Returns 0, or the system's error number."""
    if node is None:
        return system_call(0, mode, None, 0)
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    mask = (ctypes.c_ulong * MASK_WORDS)()
    if node >= bits * MASK_WORDS:
        return errno.EINVAL
    mask[node // bits] = 1 << node % bits
    return system_call(0, mode, mask, bits * MASK_WORDS + 1)  # the kernel takes one bit off


def system_call(which: int, *args: object) -> int:
    """One of `POLICY_CALLS`: 0, or its error number."""
    numbers = POLICY_CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if numbers is None:
        return errno.ENOSYS
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    long_args = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return ctypes.get_errno() if call(ctypes.c_long(numbers[which]), *long_args) else 0
