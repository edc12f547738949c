"""The platform without a card, as "rocm_interpreted": its kernels over the host's memory, as if it were a gfx950.

    cd plugins/rocm/tests
    PYTHONPATH=. TRITON_INTERPRET=1 OCTAVO_EXTRA_PLATFORMS=rocm_interpreted=rocm_interpreted \\
        octavo plugin check rocm_interpreted --config conformance-interpreted.toml

Triton's kernels run in its interpreter, in the sizes of the target; the HIP kernels, from the same source, on the CPU
(`host_hip`). A recorded step is run again, not replayed. What torch's HIP build does on a card (its own products,
streams, graphs) is torch's CPU build here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.plugin import (
    BatchKey,
    BatchLimits,
    DeviceDesc,
    GraphRunner,
    KernelRegistry,
    PlatformCaps,
    PlatformInfo,
    Probe,
    hookimpl,
)

if TYPE_CHECKING:
    from octavo.plugin import Device

MEMORY = 1 << 30
"""Bytes that it claims to have."""
UNITS = 4
"""Compute units that it claims to have: few, as small samples have few programs to give them."""
ARCH = "gfx950"
"""Its fp8 is OCP's: of other kinds, Triton's interpreter and torch on a CPU know nothing."""


@hookimpl
def platform_info() -> PlatformInfo:
    return PlatformInfo(name="rocm_interpreted", api="1.0", version="0.1.0", device_type="cpu")


@hookimpl
def platform_probe() -> Probe:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return Probe(available=False, reason="set TRITON_INTERPRET=1: Triton's kernels are to be interpreted")
    if shutil.which("g++") is None:
        return Probe(available=False, reason="g++ is missing, which builds the HIP kernels for the host")
    return Probe(available=True, score=0, devices=(DeviceDesc(name=f"{ARCH}, interpreted", memory=MEMORY),))


@hookimpl
def platform_caps() -> PlatformCaps:
    import octavo_rocm
    from octavo_rocm.targets import TARGETS

    # The host has no streams, and without RCCL there is one rank.
    alone = {"streams": False, "dist_backend": None, "collectives": frozenset(), "max_world_size": 1}
    return replace(octavo_rocm.platform_caps({}), fp8=TARGETS[ARCH].fp8, **alone)


@hookimpl
def make_device(local_rank: int) -> Device:
    return card()


@hookimpl
def register_kernels(registry: KernelRegistry, device: Device) -> None:
    from octavo_rocm.ops import register

    register(registry, device, triton=True, hip=True)


@hookimpl
def make_graph_runner() -> GraphRunner:
    return Again()


@cache
def card() -> Device:
    """The host, as if it were a card to the kernels."""
    from octavo.plugin import MemInfo
    from octavo.plugin.torch import TorchDevice

    class HostCard(TorchDevice):
        arch = ARCH

        def __init__(self) -> None:
            super().__init__("cpu", memory=lambda: MemInfo(total=MEMORY, free=MEMORY))
            self.type = "cuda"

        def describe(self) -> DeviceDesc:
            return DeviceDesc(name=f"{ARCH}, interpreted", memory=MEMORY, compute_units=UNITS)

    serve_hip_on_host()
    return HostCard()


@cache
def serve_hip_on_host() -> Any:
    """Let the plugin's ops take tensors of the host, and its self-test be made there. What is returned, a library of
    torch's, keeps it so."""
    import torch
    from host_hip import host_products

    from octavo_rocm import products, torch_ops

    built = cache(host_products)

    def gemv(x: Any, weight: Any, groups: Any, bias: Any, weight_format: str) -> Any:
        return built(weight_format, x.dtype).gemv(x, weight, groups, bias)

    def unpack(weight: Any, groups: Any, num_in: int, weight_format: str, dtype: Any) -> Any:
        return built(weight_format, dtype).unpack(weight, groups, num_in, dtype)

    def objection(index: int, weight_format: str, dtype: str) -> str:
        kind = getattr(torch, dtype)
        return products.self_test(built(weight_format, kind), weight_format, kind, torch.device("cpu"))

    library = torch.library.Library(torch_ops.LIBRARY.ns, "IMPL")
    library.impl("gemv", gemv, "CPU")
    library.impl("unpack", unpack, "CPU")
    products.card_objection = cache(objection)
    return library


class Again:
    """A graph runner that calls the step it was given, once recorded, for every replay."""

    used: ClassVar[set[BatchKey]] = set()

    def keys(self, limits: BatchLimits) -> Sequence[BatchKey]:
        from octavo.plugin.recording import recorded_shapes

        return recorded_shapes(limits)

    def prepare(self, key: BatchKey, fn: Callable[[], Any]) -> Callable[[], Any]:
        fn()

        def step() -> Any:
            self.used.add(key)
            return fn()

        return step

    def run(self, handle: Callable[[], Any]) -> Any:
        return handle()

    def close(self) -> None:
        """Nothing is held."""
