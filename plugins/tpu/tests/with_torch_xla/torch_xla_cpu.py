"""The platform "tpu" with the runtime torch_xla, executed on the CPU: torch_xla has XLA:CPU in it.

    export OCTAVO_EXTRA_PLATFORMS=tpu_xla_on_cpu=torch_xla_cpu PYTHONPATH=plugins/tpu/tests/with_torch_xla
    octavo plugin check tpu_xla_on_cpu

It is octavo_tpu's own hooks but for the name, the runtime, and the device: it has `chips` of them, each a share of this
machine's threads. Everything else of torch_xla is as on a TPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec

import octavo_tpu
from octavo.plugin import Device, PlatformCaps, PlatformInfo, Probe, hookimpl
from octavo_tpu import kv_layout, make_graph_runner, platform_configure, register_kernels
from octavo_tpu.runtimes import TORCH_XLA, open_device

__all__ = ["kv_layout", "make_graph_runner", "platform_configure", "register_kernels"]

MEMORY = 2 << 30
HASTE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""For LLVM, behind XLA's own passes: tests wait for the compiler, not for what it makes."""


@hookimpl
def platform_info() -> PlatformInfo:
    return replace(octavo_tpu.platform_info(), name="tpu_xla_on_cpu")


@hookimpl
def platform_probe() -> Probe:
    missing = find_spec(TORCH_XLA) is None
    return Probe(available=not missing, score=1, reason=f"not installed: {TORCH_XLA}" if missing else "")


@hookimpl
def platform_caps(options: Mapping[str, object]) -> PlatformCaps:
    return octavo_tpu.platform_caps({**options, "runtime": TORCH_XLA, "hbm_bytes": options["hbm_bytes"] or MEMORY})


@hookimpl
def make_device(local_rank: int, caps: PlatformCaps) -> Device:
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ.setdefault("XLA_FLAGS", HASTE)
    os.environ["CPU_NUM_DEVICES"] = str(caps.extras["chips"])
    return open_device(local_rank, caps.extras)
