"""What the machine is: cores, memory, instruction sets, within the limits this process runs under. Knows no torch.

Linux is read from /proc, /sys and its cgroup; elsewhere the standard library answers as well as it can.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from octavo.plugin import MemInfo

CGROUP = Path("/sys/fs/cgroup")
"""Where a container sees its own limits: version 2 at the root, version 1 in a folder for each controller."""

CPU = Path("/sys/devices/system/cpu")
NODE = Path("/sys/devices/system/node")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
LARGEST_KEPT, MOST_KEPT = 128 << 20, 256 << 20
"""Bytes of one piece, and of all together, that are not returned to the system when they are freed."""

MATRIX_FLAGS = (
    "avx2",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
)
"""The flags that decide which kernels are fast, as Linux spells them."""


def read(path: Path) -> str:
    """The text of a small file; empty if it is not there or may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def key_values(text: str) -> dict[str, int]:
    """Lines `Name: 123 kB` or `name 123` as integers, in bytes where the unit is kB."""
    out = {}
    for line in text.splitlines():
        name, *rest = line.replace(":", " ").split()[:3] or [""]
        if rest and rest[0].isdecimal():
            out[name] = int(rest[0]) * (1024 if rest[1:] == ["kB"] else 1)
    return out


@cache
def cpu_fields() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none."""
    first = read(Path("/proc/cpuinfo")).split("\n\n")[0]
    return {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in first.splitlines())}


def cpu_flags() -> tuple[str, ...]:
    """The instruction sets of this CPU among `MATRIX_FLAGS`."""
    fields = cpu_fields()
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return tuple(f for f in MATRIX_FLAGS if f in flags)


def has_native_bf16() -> bool:
    """Whether bfloat16 products run in hardware; without it torch's bfloat16 matmul is slower than float32's."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(cpu_flags())


def prefers_bf16() -> bool:
    """Whether bfloat16 is the faster model dtype: oneDNN reads packed bfloat16 weights for single tokens with plain
    AVX-512 already, at half the memory traffic of float32, and our kernels widen everything else."""
    return has_native_bf16() or "avx512bw" in cpu_flags()


def cpu_name() -> str:
    """Model and instruction sets, as a person would describe the CPU."""
    model = cpu_fields().get("model name") or platform.processor() or platform.machine()
    return f"{model} ({', '.join(cpu_flags()) or 'instruction sets unknown'})"


def allowed_cpus() -> list[int]:
    """The logical CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_quota(root: Path = CGROUP) -> int | None:
    """Whole CPUs' worth of time that the container may use, at least 1; None without a quota."""
    quota, _, period = read(root / "cpu.max").partition(" ")
    if not quota:
        quota, period = read(root / "cpu/cpu.cfs_quota_us"), read(root / "cpu/cpu.cfs_period_us")
    quota, period = quota.strip(), period.strip()
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return None
    return max(1, int(quota) // int(period))


def cpu_list(text: str) -> list[int]:
    """CPUs as Linux lists them: "0-3,8" is [0, 1, 2, 3, 8]. Raises ValueError for another form."""
    out: list[int] = []
    for part in text.split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        out += range(int(first), int(last or first) + 1)
    return out


def nodes() -> dict[int, set[int]]:
    """The CPUs next to each memory node, those that this process may use. Empty where the system does not tell."""
    allowed = set(allowed_cpus())
    found = {int(p.name[4:]): allowed.intersection(cpu_list(read(p / "cpulist"))) for p in NODE.glob("node[0-9]*")}
    return {node: near for node, near in sorted(found.items()) if near}


def one_of_each_core(cpus: Iterable[int]) -> list[int]:
    """Of CPUs that are hyper-threads of one core the first."""
    cores: dict[str, int] = {}
    for cpu in sorted(cpus):
        cores.setdefault(read(CPU / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu), cpu)
    return list(cores.values())


def physical_cores() -> int:
    """Cores with a CPU that this process may use, hyper-threads counted once, at most the container's quota."""
    cores = len(one_of_each_core(allowed_cpus()))
    return min(cores, cpu_quota() or cores)


def thread_count(asked: int | None, *, num_workers: int = 1) -> int:
    """Threads of one worker: what the user asked for, else OMP_NUM_THREADS, else its share of the physical cores.

    A hyper-thread adds nothing to a loop that keeps a core's vector units busy, and takes from its cache.
    """
    if asked is not None:
        return asked
    env = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if env.isdecimal() and int(env) > 0:
        return int(env)
    return max(1, physical_cores() // num_workers)


def container_memory(root: Path = CGROUP) -> tuple[int, int] | None:
    """(limit, use) of the container in bytes; None without a limit. Page cache that can be dropped is not use."""
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        text = read(root / limit).strip()
        if text.isdecimal():
            droppable = key_values(read(root / stat)).get("inactive_file", 0)
            return int(text), max(0, int(read(root / used) or 0) - droppable)
    return None


def memory(num_workers: int = 1) -> MemInfo:
    """Memory that this process can have, as one of several. `peak_torch` is the most this process held itself, mapped
    files excluded."""
    info = key_values(read(Path("/proc/meminfo")))
    if "MemTotal" in info:
        total, free = info["MemTotal"], info.get("MemAvailable", info.get("MemFree", 0))
    else:
        total, free = memory_elsewhere()
    if limits := container_memory():
        limit, used = limits
        if limit < total:
            total, free = limit, min(free, max(0, limit - used))
    total, free = total // num_workers, free // num_workers
    process = key_values(read(Path("/proc/self/status")))
    own = process.get("RssAnon", 0)
    peak = max(own, process.get("VmHWM", 0) - process.get("RssFile", 0))
    return MemInfo(total=total, free=free, peak_torch=peak, non_torch=max(0, total - free - own))


def reset_peak() -> None:
    """Start VmHWM anew. Where the kernel does not allow it the peak only grows, which is on the safe side."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def keep_freed_memory() -> None:
    """Let the C library, where it is glibc, use again what a step frees. By default it returns large pieces to the
    system at once, which clears every page before it gives it out anew: a twentieth of a step with long prompts."""
    if os.name == "posix" and (set_option := getattr(ctypes.CDLL(None), "mallopt", None)):
        for option, num_bytes in ((M_MMAP_THRESHOLD, LARGEST_KEPT), (M_TRIM_THRESHOLD, MOST_KEPT)):
            set_option(option, num_bytes)


def give_back_freed_memory() -> None:
    """Return to the system what the C library keeps of freed memory, where it can: loading frees a good part of the
    weights' size in pieces, of which glibc returns few by itself."""
    if os.name == "posix" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def memory_elsewhere() -> tuple[int, int]:
    """(total, free) in bytes on macOS and Windows."""
    if os.name == "nt":

        class Status(ctypes.Structure):
            _fields_ = (
                ("length", ctypes.c_ulong),
                ("load", ctypes.c_ulong),
                *((name, ctypes.c_ulonglong) for name in ("total", "free", "pt", "pf", "vt", "vf", "ext")),
            )

        status = Status(length=ctypes.sizeof(Status))
        ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
        return int(status.total), int(status.free)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # macOS tells free memory only through its own tools; half is a safe guess on a machine in use.
    return total, total // 2
