"""A fake platform, "refdev": the CPU under another name, with the habits of hardware that core must cope with.

Steps are padded to buckets, whole steps are captured and replayed with their constants baked in, KV lies in an unusual
order, and one attention backend and one op are its own. It is registered only on request:

    OCTAVO_EXTRA_PLATFORMS=refdev=octavo.testing.refdev octavo serve MODEL --platform refdev
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from octavo.plugin import (
    BucketSpec,
    ConfigPatch,
    DeviceDesc,
    KVLayout,
    KVSpec,
    OptionSpec,
    PlatformCaps,
    PlatformInfo,
    Probe,
    WorkerLaunch,
    hookimpl,
)

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.plugin import Device, GraphRunner, KernelRegistry

BUCKETS = BucketSpec(num_tokens=(4, 8, 16, 32, 64, 128, 256), num_seqs=(1, 2, 4, 8, 16))
MEMORY = 1 << 30


@hookimpl
def platform_info() -> PlatformInfo:
    memory = OptionSpec(type=int, default=MEMORY, help="bytes of device memory to pretend")
    return PlatformInfo(name="refdev", api="1.0", version="1", device_type="cpu", options={"memory": memory})


@hookimpl
def platform_probe() -> Probe:
    return Probe(available=True, score=1, devices=(DeviceDesc(name="reference device", memory=MEMORY),))


@hookimpl
def platform_caps(options: Mapping[str, object]) -> PlatformCaps:
    return PlatformCaps(
        dtypes=("float32", "bfloat16"),
        default_dtype="float32",
        streams=True,
        graph="capture",
        shapes="bucketed",
        buckets=BUCKETS,
        dist_backend="gloo",
        collectives=frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "recv"}),
        max_world_size=2,
        features=frozenset({"prefix_cache", "chunked_prefill", "spec_decode", "structured"}),
        extras={"memory": options["memory"]},
    )


@hookimpl
def platform_configure(config: EngineConfig) -> Sequence[ConfigPatch]:
    reason = "the largest compiled bucket"
    patches = []
    if config.scheduler.max_num_seqs > BUCKETS.num_seqs[-1]:
        patches.append(ConfigPatch(field="scheduler.max_num_seqs", value=BUCKETS.num_seqs[-1], reason=reason))
    if config.scheduler.max_num_batched_tokens > BUCKETS.num_tokens[-1]:
        patches.append(
            ConfigPatch(field="scheduler.max_num_batched_tokens", value=BUCKETS.num_tokens[-1], reason=reason)
        )
    return patches


@hookimpl
def platform_launch() -> WorkerLaunch:
    return WorkerLaunch(env=lambda local_rank, world_size: {"REFDEV_VISIBLE": str(local_rank)})


@hookimpl
def make_device(local_rank: int, caps: PlatformCaps) -> Device:
    from octavo.testing.refdev_device import RefDevice

    return RefDevice(local_rank, memory=int(str(caps.extras["memory"])))


@hookimpl
def register_kernels(registry: KernelRegistry) -> None:
    from octavo.testing.refdev_kernels import RefAttention, rms_norm

    registry.attention(RefAttention, priority=10)
    registry.op("rms_norm", rms_norm, provider="refdev", priority=10)


@hookimpl
def kv_layout(spec: KVSpec) -> KVLayout:
    return KVLayout(block_size=spec.block_size, dtype=spec.dtype, order="BNHC")


@hookimpl
def make_graph_runner(config: EngineConfig) -> GraphRunner | None:
    if config.platform.enforce_eager:
        return None
    from octavo.testing.refdev_device import CaptureRunner

    return CaptureRunner()
