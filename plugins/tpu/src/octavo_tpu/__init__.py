"""The Google TPU platform of Octavo: the hooks. Imports nothing heavy; torch comes with `make_device`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from octavo.plugin import (
    BucketSpec,
    ConfigPatch,
    Device,
    GraphRunner,
    KernelRegistry,
    KVLayout,
    KVSpec,
    OptionSpec,
    PlatformCaps,
    PlatformInfo,
    Probe,
    ScheduleLimits,
    hookimpl,
)
from octavo_tpu.runtimes import NEEDED, TORCH_XLA, Runtime, choose, missing_software, open_device, runtime_choice

if TYPE_CHECKING:
    from octavo.plugin import EngineConfig

VERSION = "0.1.0"
SCORE = 80

BUCKETS = BucketSpec(
    num_tokens=(16, 32, 64, 128, 256, 512, 1024, 2048),
    num_seqs=(8, 16, 32, 64, 128, 256),
)
"""Every step is padded to one of these: each shape is compiled by itself, for seconds to a minute on a real model.
Powers of two, as a step of twice the size costs less than twice as long, and a compilation more than all that saves."""

BLOCK_SIZE = 64
"""Tokens of a KV block unless the user says otherwise: the attention kernel fetches one block at a time, and smaller
fetches leave the memory idle between them."""


def chip_count(text: str) -> int:
    """Parse the option `chips`."""
    if (count := int(text)) < 1:
        raise ValueError("must be at least 1")
    return count


@hookimpl
def platform_info() -> PlatformInfo:
    options = {
        "runtime": OptionSpec(
            type=runtime_choice,
            default="auto",
            help="auto | torch_tpu | torch_xla: what gives torch its TPU; auto takes the one that is installed",
        ),
        "chips": OptionSpec(
            type=chip_count,
            default=1,
            help="chips of this machine that one model is divided over, each holding its part; needs runtime torch_xla",
        ),
        "cache_dir": OptionSpec(
            type=str,
            default="",
            help="folder for compiled steps, which later starts load; default: torch_tpu has its own, torch_xla none",
        ),
        "hbm_bytes": OptionSpec(
            type=int, default=0, help="memory of a chip in bytes, where the runtime cannot tell; 0: ask the runtime"
        ),
    }
    return PlatformInfo(
        name="tpu", api="1.0", version=VERSION, device_type="tpu", options=options, backend=tuple(NEEDED)
    )


@hookimpl
def platform_probe() -> Probe:
    from octavo_tpu.chips import find_chips

    chips = find_chips()
    if not chips:
        return Probe(available=False, reason="no TPU chip among the PCI devices that this machine hands to programs")
    if reason := missing_software():
        return Probe(available=False, reason=reason)
    return Probe(available=True, score=SCORE, devices=tuple(chips))


@hookimpl
def platform_caps(options: Mapping[str, object]) -> PlatformCaps:
    return PlatformCaps(
        dtypes=("bfloat16", "float32"),
        default_dtype="bfloat16",
        graph="aot",
        shapes="bucketed",
        buckets=BUCKETS,
        # A fetch of fewer than 16 tokens would not fill a tile of bfloat16.
        schedule=ScheduleLimits(block_sizes=(16, 32, 64, 128, 256)),
        features=frozenset({"prefix_cache", "chunked_prefill", "structured"}),
        extras={**options, "runtime": choose(str(options["runtime"]))},
    )


@hookimpl
def platform_configure(config: EngineConfig, caps: PlatformCaps) -> Sequence[ConfigPatch]:
    compiled = "the largest compiled shape"
    ahead = "the runtime queues a step while the one before computes"
    waits = "the runtime's copies to the host wait for the step"
    run_ahead, reason = (0, waits) if caps.extras["runtime"] == TORCH_XLA else (1, ahead)
    patches = [
        ConfigPatch(field="cache.block_size", value=BLOCK_SIZE, reason="larger pages keep the memory busy"),
        ConfigPatch(field="scheduler.run_ahead", value=run_ahead, reason=reason),
    ]
    if config.scheduler.max_num_seqs > BUCKETS.num_seqs[-1]:
        patches.append(ConfigPatch(field="scheduler.max_num_seqs", value=BUCKETS.num_seqs[-1], reason=compiled))
    if config.scheduler.max_num_batched_tokens > BUCKETS.num_tokens[-1]:
        patches.append(
            ConfigPatch(field="scheduler.max_num_batched_tokens", value=BUCKETS.num_tokens[-1], reason=compiled)
        )
    return patches


@hookimpl
def make_device(local_rank: int, caps: PlatformCaps) -> Device:
    return open_device(local_rank, caps.extras)


@hookimpl
def register_kernels(registry: KernelRegistry, device: Device) -> None:
    from octavo_tpu.ops import register

    register(registry, device)


@hookimpl
def kv_layout(spec: KVSpec, device: Device) -> KVLayout:
    layout = KVLayout(block_size=spec.block_size, dtype=spec.dtype, order="BHNC")
    if getattr(device, "chips", 1) == 1:
        return layout
    from octavo_tpu.xla_sharding import divided_kv

    return replace(layout, alloc=divided_kv)


@hookimpl
def make_graph_runner(config: EngineConfig, device: Device) -> GraphRunner | None:
    if config.platform.enforce_eager:
        return None
    from octavo_tpu.graphs import CompiledSteps

    return CompiledSteps(cast(Runtime, device))
