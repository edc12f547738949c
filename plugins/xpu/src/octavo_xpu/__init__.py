"""The Intel GPU platform of Octavo: the hooks. Imports nothing heavy; torch comes with `make_device`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from octavo.plugin import (
    Device,
    GraphRunner,
    KernelRegistry,
    PlatformCaps,
    PlatformInfo,
    Probe,
    WorkerLaunch,
    hookimpl,
)

if TYPE_CHECKING:
    from octavo.plugin import EngineConfig

log = logging.getLogger("octavo.xpu")

VERSION = "0.1.0"
SCORE = 70
FEATURES = frozenset({"prefix_cache", "chunked_prefill", "spec_decode", "structured"})
COLLECTIVES = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv"})


@hookimpl
def platform_info() -> PlatformInfo:
    return PlatformInfo(name="xpu", api="1.0", version=VERSION, device_type="xpu")


@hookimpl
def platform_probe() -> Probe:
    from octavo_xpu.drm import gpus, missing_software
    from octavo_xpu.kernels.build import NoLibraryError, compiler, runtime_version

    found = gpus()
    if not found:
        return Probe(
            available=False, reason="no Intel GPU with the driver xe or i915 is visible (see ZE_AFFINITY_MASK)"
        )
    if reason := missing_software():
        return Probe(available=False, reason=reason)
    try:
        compiler()
        runtime_version()
    except NoLibraryError as error:
        return Probe(available=False, reason=str(error))
    return Probe(available=True, score=SCORE, devices=tuple(found))


@hookimpl
def platform_caps() -> PlatformCaps:
    from octavo_xpu.drm import gpus

    return PlatformCaps(
        dtypes=("bfloat16", "float16", "float32"),
        default_dtype="bfloat16",
        streams=True,
        graph="capture",
        # oneCCL, by torch's name; the collectives are core's own.
        dist_backend="xccl",
        collectives=COLLECTIVES,
        max_world_size=max(1, len(gpus())),
        features=FEATURES,
    )


@hookimpl
def platform_launch() -> WorkerLaunch:
    # Every rank sees all GPUs and takes its own by number: oneCCL opens its peers' memory.
    return WorkerLaunch(visible_env=None)


@hookimpl
def make_device(local_rank: int) -> Device:
    from octavo_xpu.device import XpuDevice

    return XpuDevice(local_rank)


@hookimpl
def register_kernels(registry: KernelRegistry, device: Device) -> None:
    from octavo_xpu import triton_kernels
    from octavo_xpu.kernels import build
    from octavo_xpu.ops import register

    if no_sycl := build.objection():
        log.warning("this platform's kernels are left out, torch's own operators are slower: %s", no_sycl)
    if no_triton := triton_kernels.objection():
        log.warning("sampling and bookkeeping run on core's slower references: %s", no_triton)
    register(registry, device, sycl=not no_sycl, triton=not no_triton)


@hookimpl
def make_graph_runner(config: EngineConfig, device: Device) -> GraphRunner | None:
    from octavo_xpu.graphs import XpuGraphs, why_not

    if config.platform.enforce_eager:
        return None
    if reason := why_not():
        log.warning("steps run eagerly, which makes decoding slower: %s", reason)
        return None
    return XpuGraphs(device.torch_device)
