"""The NVIDIA CUDA platform of Octavo: the hooks. Imports nothing heavy; torch comes with `make_device`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from octavo.plugin import (
    Communicator,
    ConfigPatch,
    Device,
    GraphRunner,
    GroupSpec,
    KernelRegistry,
    PlatformCaps,
    PlatformInfo,
    Probe,
    ScheduleLimits,
    WorkerLaunch,
    hookimpl,
)

if TYPE_CHECKING:
    from octavo.plugin import EngineConfig

VERSION = "0.1.0"
SCORE = 80
OLDEST = (7, 5)
"""The oldest compute capability that today's torch and Triton serve (Turing)."""
BF16_SINCE = (8, 0)
FP8_SINCE = (8, 9)

LARGE_CARD = 64 << 30
"""Bytes from which a card is run as a data-centre card: more rows at once, a smaller share left free."""


@hookimpl
def platform_info() -> PlatformInfo:
    return PlatformInfo(name="cuda", api="1.0", version=VERSION, device_type="cuda")


@hookimpl
def platform_probe() -> Probe:
    from octavo_cuda.nvml import NvmlError, cards
    from octavo_cuda.software import missing_software

    try:
        found = cards()
    except NvmlError as error:
        return Probe(available=False, reason=str(error))
    if not found:
        return Probe(available=False, reason="the driver shows no card to this process (see CUDA_VISIBLE_DEVICES)")
    for card in found:
        if card.capability < OLDEST:
            have, need = (".".join(map(str, c)) for c in (card.capability, OLDEST))
            reason = f"{card.desc.name} has compute capability {have}; needed: {need}. Hide it by CUDA_VISIBLE_DEVICES"
            return Probe(available=False, reason=reason)
    if reason := missing_software():
        return Probe(available=False, reason=reason)
    return Probe(available=True, score=SCORE, devices=tuple(card.desc for card in found))


@hookimpl
def platform_caps(options: Mapping[str, object]) -> PlatformCaps:
    from octavo_cuda.nvml import NvmlError, cards
    from octavo_cuda.software import has_triton

    try:
        found = cards()
    except NvmlError:
        found = []  # asked without hardware, as documentation and tests do: what the platform can do at its best
    oldest = min((card.capability for card in found), default=(9, 0))
    half = ("bfloat16", "float16") if oldest >= BF16_SINCE else ("float16",)
    fp8 = oldest >= FP8_SINCE
    return PlatformCaps(
        dtypes=(*half, "float32"),
        default_dtype=half[0],
        kv_dtypes=("auto", "float8_e4m3fn") if fp8 else ("auto",),
        fp8=frozenset({"e4m3fn", "e5m2"}) if fp8 else frozenset(),
        streams=True,
        triton=has_triton(),
        graph="capture",
        dist_backend="nccl",
        collectives=frozenset(
            {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv"}
        ),
        max_world_size=max(1, len(found)),
        features=frozenset({"prefix_cache", "chunked_prefill", "spec_decode", "structured"}),
        # The kernels take powers of two; pages below 16 tokens would waste their loads.
        schedule=ScheduleLimits(block_sizes=(16, 32, 64, 128, 256)),
    )


@hookimpl
def platform_configure(config: EngineConfig, caps: PlatformCaps) -> Sequence[ConfigPatch]:
    from octavo_cuda.nvml import NvmlError, cards

    try:
        memory = min((card.desc.memory for card in cards()), default=0)
    except NvmlError:
        memory = 0
    if memory < LARGE_CARD:
        return ()
    gib = memory >> 30
    return (
        ConfigPatch(
            field="cache.memory_utilization",
            value=0.92,
            reason=f"{0.08 * gib:.0f} of {gib} GiB are enough for recorded steps, libraries and fragmentation",
        ),
        ConfigPatch(
            field="scheduler.max_num_seqs",
            value=512,
            reason=f"{gib} GiB hold the context of more rows, and a step of 512 costs little more than one of 256",
        ),
    )


@hookimpl
def platform_launch(config: EngineConfig, caps: PlatformCaps) -> WorkerLaunch:
    # Every rank sees all cards and takes its own by number: cards that are hidden cannot be read by their peers.
    return WorkerLaunch(visible_env=None)


@hookimpl
def make_device(local_rank: int, config: EngineConfig, caps: PlatformCaps) -> Device:
    from octavo_cuda.device import CudaDevice

    return CudaDevice(local_rank)


@hookimpl
def register_kernels(registry: KernelRegistry, device: Device, caps: PlatformCaps) -> None:
    from octavo_cuda.ops import register

    register(registry, device, triton=caps.triton)


@hookimpl
def make_communicator(group: GroupSpec, device: Device) -> Communicator:
    from octavo_cuda.communicator import CudaCommunicator

    return CudaCommunicator(group, device.torch_device)


@hookimpl
def make_graph_runner(config: EngineConfig, device: Device) -> GraphRunner:
    from octavo_cuda.graphs import CudaGraphs

    return CudaGraphs.of(device)
