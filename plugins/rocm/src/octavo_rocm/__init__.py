"""The AMD ROCm platform of Octavo: the hooks. Imports nothing heavy; torch comes with `make_device`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from octavo.plugin import (
    ConfigPatch,
    Device,
    GraphRunner,
    KernelRegistry,
    OptionSpec,
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

LARGE_CARD = 64 << 30
"""Bytes from which a card is run as a data-centre card: more rows at once."""


def on_or_off(text: str) -> bool:
    """Parses the text of an option. Raises ValueError for anything but on and off."""
    if text not in ("on", "off"):
        raise ValueError(f"on or off, not {text!r}")
    return text == "on"


@hookimpl
def platform_info() -> PlatformInfo:
    hip = OptionSpec(
        type=on_or_off, default=True, help="products of few tokens by HIP kernels, compiled at start: on, off"
    )
    # Torch's HIP build calls its device "cuda".
    return PlatformInfo(name="rocm", api="1.0", version=VERSION, device_type="cuda", options={"hip_kernels": hip})


@hookimpl
def platform_probe() -> Probe:
    from octavo_rocm.software import missing_software
    from octavo_rocm.targets import SAME_AS, TARGETS, target_of
    from octavo_rocm.topology import VISIBLE, DriverError, cards

    try:
        found = cards()
    except DriverError as error:
        return Probe(available=False, reason=str(error))
    if not found:
        return Probe(available=False, reason=f"the driver shows no card to this process (see {', '.join(VISIBLE)})")
    for card in found:
        if target_of(card.arch) is None:
            known = ", ".join(sorted([*TARGETS, *SAME_AS]))
            reason = f"{card.desc.name} is {card.arch}; served: {known}. Hide it by HIP_VISIBLE_DEVICES"
            return Probe(available=False, reason=reason)
    if reason := missing_software():
        return Probe(available=False, reason=reason)
    return Probe(available=True, score=SCORE, devices=tuple(card.desc for card in found))


@hookimpl
def platform_caps(options: Mapping[str, object]) -> PlatformCaps:
    from octavo_rocm.software import has_triton
    from octavo_rocm.targets import TARGETS, target_of
    from octavo_rocm.topology import DriverError, cards

    try:
        found = cards()
    except DriverError:
        found = []
    # Asked without hardware, as documentation and tests do: what the platform can do on an MI300.
    targets = [target for card in found if (target := target_of(card.arch)) is not None] or [TARGETS["gfx942"]]
    return PlatformCaps(
        dtypes=("bfloat16", "float16", "float32"),
        default_dtype="bfloat16",
        # Triton converts OCP's e4m3 on every target, in software where the matrix units know none or another kind.
        kv_dtypes=("auto", "float8_e4m3fn"),
        fp8=frozenset.intersection(*(target.fp8 for target in targets)),
        streams=True,
        triton=has_triton(),
        graph="capture",
        # Torch's name for RCCL too; the collectives are core's own.
        dist_backend="nccl",
        collectives=frozenset(
            {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv"}
        ),
        max_world_size=max(1, len(found)),
        features=frozenset({"prefix_cache", "chunked_prefill", "spec_decode", "structured"}),
        # The kernels take powers of two; pages below 16 tokens would waste their loads.
        schedule=ScheduleLimits(block_sizes=(16, 32, 64, 128, 256)),
        extras={"hip_kernels": options.get("hip_kernels", True)},
    )


@hookimpl
def platform_configure(config: EngineConfig, caps: PlatformCaps) -> Sequence[ConfigPatch]:
    from octavo_rocm.topology import DriverError, cards

    try:
        memory = min((card.desc.memory for card in cards()), default=0)
    except DriverError:
        memory = 0
    if memory < LARGE_CARD:
        return ()
    reason = f"{memory >> 30} GiB hold the context of more rows, and a step of 512 costs little more than one of 256"
    return (ConfigPatch(field="scheduler.max_num_seqs", value=512, reason=reason),)


@hookimpl
def platform_launch(config: EngineConfig, caps: PlatformCaps) -> WorkerLaunch:
    # Every rank sees all cards and takes its own by number: cards that are hidden cannot be read by their peers.
    return WorkerLaunch(visible_env=None)


@hookimpl
def make_device(local_rank: int, config: EngineConfig, caps: PlatformCaps) -> Device:
    from octavo_rocm.device import RocmDevice

    return RocmDevice(local_rank)


@hookimpl
def register_kernels(registry: KernelRegistry, device: Device, caps: PlatformCaps) -> None:
    from octavo_rocm.ops import register

    register(registry, device, triton=caps.triton, hip=bool(caps.extras.get("hip_kernels", True)))


@hookimpl
def make_graph_runner(config: EngineConfig, device: Device) -> GraphRunner:
    from octavo_rocm.graphs import HipGraphs

    return HipGraphs(device.torch_device)
