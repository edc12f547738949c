"""The CPU platform of Octavo: the hooks. Imports nothing heavy; torch comes with `make_device`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from octavo.plugin import (
    Communicator,
    ConfigPatch,
    Device,
    DeviceDesc,
    GraphRunner,
    GroupSpec,
    KernelRegistry,
    OptionSpec,
    PlatformCaps,
    PlatformInfo,
    Probe,
    WorkerLaunch,
    hookimpl,
)

if TYPE_CHECKING:
    from octavo.plugin import EngineConfig

VERSION = "0.1.0"
KV_BYTES = 4 << 30
"""KV memory of all workers unless the user says how much, or what share of the machine, to take."""


def wide_copy_choice(text: str) -> str:
    """Parse the option `wide_copy`."""
    if text not in ("auto", "never"):
        raise ValueError(f"wide_copy must be auto or never, not {text!r}")
    return text


WIDE_COPY = OptionSpec(
    type=wide_copy_choice,
    default="auto",
    help="auto | never: whether a linear layer may keep a second, wider copy of its weight for batches "
    "(several times faster batches and prompts, up to three times the memory of the weights)",
)


def int8_choice(text: str) -> str:
    """Parse the option `int8_activations`."""
    if text not in ("auto", "always", "never"):
        raise ValueError(f"int8_activations must be auto, always or never, not {text!r}")
    return text


INT8_ACTIVATIONS = OptionSpec(
    type=int8_choice,
    default="auto",
    help="auto | always | never: whether GGUF weights are multiplied in their own bits, with activations rounded to 8 "
    "bits (several times faster); auto does so for 16-bit activations and keeps float32 exact",
)


def bind_choice(text: str) -> object:
    """Parse the option `threads_bind`."""
    from octavo_cpu.placement import parse

    return parse(text)


THREADS_BIND = OptionSpec(
    type=bind_choice,
    default="auto",
    help="auto | none | lists of CPUs such as 0-3|4-7, one for each worker: where workers run; auto gives each of "
    "several workers the cores and the memory of its own nodes (NUMA), where the machine has several",
)


@hookimpl
def platform_info() -> PlatformInfo:
    options = {"wide_copy": WIDE_COPY, "int8_activations": INT8_ACTIVATIONS, "threads_bind": THREADS_BIND}
    return PlatformInfo(name="cpu", api="1.0", version=VERSION, device_type="cpu", options=options)


@hookimpl
def platform_probe() -> Probe:
    from importlib.util import find_spec

    from octavo_cpu.host import cpu_name, memory, physical_cores

    if find_spec("torch") is None:
        return Probe(available=False, reason="torch is not installed")
    desc = DeviceDesc(name=cpu_name(), memory=memory().total, compute_units=physical_cores())
    return Probe(available=True, score=0, devices=(desc,))


@hookimpl
def platform_caps(options: Mapping[str, object]) -> PlatformCaps:
    from octavo_cpu import native
    from octavo_cpu.host import prefers_bf16

    return PlatformCaps(
        dtypes=("bfloat16", "float16", "float32"),
        default_dtype="bfloat16" if prefers_bf16() else "float32",
        # Without the compiled library a cache in 8 bits runs on core's reference attention, which is slow.
        kv_dtypes=("auto", "float8_e4m3fn", "int8"),
        dist_backend="gloo",
        collectives=frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "recv"}),
        max_world_size=64,
        graph="none" if native.why_not() else "capture",
        features=frozenset({"prefix_cache", "chunked_prefill", "spec_decode", "structured"}),
        extras={
            "wide_copy": options.get("wide_copy", WIDE_COPY.default),
            "int8_activations": options.get("int8_activations", INT8_ACTIVATIONS.default),
            "threads_bind": options.get("threads_bind", THREADS_BIND.default),
        },
    )


@hookimpl
def platform_configure(config: EngineConfig, caps: PlatformCaps) -> Sequence[ConfigPatch]:
    from octavo_cpu.host import memory

    patches = []
    if "cache.memory_utilization" not in config.user_set:
        patches.append(
            ConfigPatch(
                field="cache.memory_bytes",
                value=min(KV_BYTES, memory().total // 4) // config.parallel.tensor_parallel_size,
                reason="main memory is shared with the operating system, its page cache and other programs",
            )
        )
    patches.append(
        ConfigPatch(
            field="scheduler.run_ahead",
            value=0,
            reason="the host is the device: scheduling a step ahead hides nothing and learns of EOS late",
        )
    )
    return patches


@hookimpl
def platform_launch() -> WorkerLaunch:
    from octavo_cpu.placement import leave

    leave()  # or the new ranks would begin where an earlier engine of this process was put
    return WorkerLaunch()


@hookimpl
def make_device(local_rank: int, config: EngineConfig, caps: PlatformCaps) -> Device:
    from octavo_cpu import placement
    from octavo_cpu.device import CpuDevice
    from octavo_cpu.host import thread_count

    placement.leave()
    num_workers, bind = config.parallel.tensor_parallel_size, caps.extras.get("threads_bind", THREADS_BIND.default)
    place = placement.place_of(config.parallel.rank, num_workers, bind)
    asked = config.platform.threads or (len(place.cpus) if isinstance(bind, tuple) else None)
    num_threads = thread_count(asked, num_workers=num_workers)
    return CpuDevice(
        local_rank,
        num_threads=num_threads,
        num_workers=num_workers,
        wide_copy=caps.extras.get("wide_copy") != "never",
        int8_activations=str(caps.extras.get("int8_activations", INT8_ACTIVATIONS.default)),
        place=place,
    )


@hookimpl
def make_communicator(group: GroupSpec, device: Device) -> Communicator | None:
    from octavo_cpu import native

    if native.why_not():
        return None
    from octavo_cpu.communicator import CpuCommunicator

    return CpuCommunicator(group)


@hookimpl
def register_kernels(registry: KernelRegistry, device: Device, caps: PlatformCaps) -> None:
    from octavo_cpu.ops import register

    register(registry)


@hookimpl
def make_graph_runner() -> GraphRunner | None:
    from octavo_cpu import native

    if native.why_not():
        return None
    from octavo_cpu.tape import TapeRunner

    return TapeRunner()
