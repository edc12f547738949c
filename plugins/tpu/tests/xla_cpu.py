"""The platform "tpu" executed on the CPU: torch_tpu over XLA's CPU plugin for PJRT. The one place that knows how.

    export TORCH_DEVICE_BACKEND_AUTOLOAD=0   # else torch_tpu looks for chips while torch is imported
    OCTAVO_EXTRA_PLATFORMS=tpu_on_cpu=xla_cpu PYTHONPATH=plugins/tpu/tests octavo plugin check tpu_on_cpu

It is octavo_tpu's own hooks but for four: a name of its own, a probe that wants the simulator instead of a chip, caps
with memory for it, and a device that first points the runtime at it. Everything else of torch_tpu is as on a TPU: its
operators, its lazy execution, its compiler's front end. XLA:CPU takes the place of XLA:TPU behind it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import octavo_tpu
from octavo.plugin import Device, PlatformCaps, PlatformInfo, Probe, hookimpl
from octavo_tpu import kv_layout, make_graph_runner, platform_configure, register_kernels
from octavo_tpu.runtimes import TORCH_TPU, open_device

__all__ = ["kv_layout", "make_graph_runner", "platform_configure", "register_kernels"]

MEMORY = 2 << 30
REAL = "OCTAVO_TEST_PJRT"
PLUGIN = "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so"
HASTE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""For LLVM, behind XLA's own passes: tests wait for the compiler, not for what it makes."""


@hookimpl
def platform_info() -> PlatformInfo:
    return replace(octavo_tpu.platform_info(), name="tpu_on_cpu")


@hookimpl
def platform_probe() -> Probe:
    missing = [name for name in ("torch_tpu", "xla_plugins") if find_spec(name) is None]
    return Probe(available=not missing, score=1, reason=f"not installed: {', '.join(missing)}" if missing else "")


@hookimpl
def platform_caps(options: Mapping[str, object]) -> PlatformCaps:
    return octavo_tpu.platform_caps({**options, "runtime": TORCH_TPU, "hbm_bytes": options["hbm_bytes"] or MEMORY})


@hookimpl
def make_device(local_rank: int, caps: PlatformCaps) -> Device:
    start()
    return open_device(local_rank, caps.extras)


def start() -> None:
    """Give torch the device "tpu", executed on the CPU. Once a process, before anything else imports torch_tpu."""
    if "torch_tpu" in sys.modules:
        if os.environ.get(REAL) is None:
            raise RuntimeError("torch_tpu has taken libtpu already: set TORCH_DEVICE_BACKEND_AUTOLOAD=0")
        return
    site = Path(sysconfig.get_paths()["purelib"])
    os.environ[REAL] = str(site / PLUGIN)
    os.environ["TPU_LIBRARY_PATH"] = str(build_proxy(site / Path(PLUGIN).parent / "include"))
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("XLA_FLAGS", HASTE)
    import libtpu

    libtpu.configure_library_path = lambda: None  # torch_tpu calls it when imported, and would lose the path above
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of torch while it is imported
        from torch_tpu import _loader

        _loader._init_device("tpu")


def num_programs() -> int:
    """Programs that this process compiled so far: the runtime's, outside of whole steps, and torch.compile's graphs."""
    import torch

    graphs: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return torch.tpu._get_cache_misses() + graphs  # type: ignore[attr-defined, no-any-return]


def build_proxy(include: Path) -> Path:
    """The C proxy beside this file, compiled; kept in a folder of the user's for the next process."""
    source = Path(__file__).with_name("pjrt_proxy.c")
    key = sha256(source.read_bytes()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"octavo-pjrt-proxy-{os.getuid()}" / f"{key}.so"
    if not target.exists():
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}")
        command = ["cc", "-shared", "-fPIC", "-O1", f"-I{include}", str(source), "-o", str(part), "-ldl"]
        subprocess.run(command, check=True)
        part.replace(target)  # complete or absent, also for processes that start now
    return target
