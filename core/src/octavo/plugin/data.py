"""What a platform says of itself, as frozen data. Plugins declare; core decides.

Nothing here imports torch. A new field always has a default, and a new capability defaults to "unsupported".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

NONE: frozenset[str] = frozenset()
EMPTY: Mapping[str, object] = MappingProxyType({})

WorkerEvent = Literal["ready", "shutdown"]


@dataclass(frozen=True, kw_only=True)
class OptionSpec:
    """One `--platform-opt KEY=VALUE` of a platform. `type` is the callable that parses the text."""

    type: Callable[[str], object]
    default: object
    help: str


@dataclass(frozen=True, kw_only=True)
class PlatformInfo:
    """Who the plugin is.

    api: the plugin API it was built for, e.g. "1.0".
    device_type: torch device string, or "none" for a platform that brings a whole executor; for people.
    backend: packages that give torch this device, e.g. ("torch_acme",). They may change torch for it, and the report of
        the conformance kit lists what they changed; the plugin itself changes nothing, and neither of them octavo.
    """

    name: str
    api: str
    version: str
    device_type: str
    options: Mapping[str, OptionSpec] = field(default_factory=dict)
    backend: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DeviceDesc:
    """One device as a person would describe it; `octavo plugin list --json` prints all of it. `memory` in bytes."""

    name: str
    index: int = 0
    memory: int = 0
    compute_units: int = 0
    uuid: str = ""
    pci: str = ""
    numa: int | None = None


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Whether the hardware is here. `reason` says why not; `score` ranks platforms (cpu 0, vendors 50-100)."""

    available: bool
    score: int = 0
    reason: str = ""
    devices: tuple[DeviceDesc, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MultipleOf:
    """A size that must be a multiple of `value`."""

    value: int


@dataclass(frozen=True, kw_only=True)
class ScheduleLimits:
    """What a platform cannot do in one step, as data; nobody subclasses the scheduler.

    mix_prefill_decode: False if one step may hold either prefills or decodes.
    max_prefills_per_step: most sequences with more than one scheduled token in one step, drafts not counted.
    token_multiple / seq_multiple: padding of a step's tokens / sequences.
    max_batch_context_tokens: cap on (sequences x longest context) of a decode batch.
    block_sizes: KV block sizes that the attention kernels take.
    """

    mix_prefill_decode: bool = True
    max_prefills_per_step: int | None = None
    token_multiple: int = 1
    seq_multiple: int = 1
    max_batch_context_tokens: int | None = None
    block_sizes: tuple[int | MultipleOf, ...] = (MultipleOf(value=1),)


@dataclass(frozen=True, kw_only=True)
class BucketSpec:
    """The only step shapes a static-shape platform compiles. Steps are padded up to the next bucket.

    num_tokens, num_seqs, max_context: ascending sizes; a step takes the least that holds it in each.
    """

    num_tokens: tuple[int, ...]
    num_seqs: tuple[int, ...]
    max_context: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlatformCaps:
    """What the platform can do. Core branches on these, never on names.

    dtypes: model dtypes by torch name ("bfloat16"); kv_dtypes: dtypes of the KV cache.
    fp8: fp8 formats that the matrix units multiply; triton: Triton's kernels run here. Both are told to kernel packs.
    graph: "capture" (replay of recorded steps), "aot" (compiled ahead), or "none".
    shapes: "bucketed" pads every step to `buckets`.
    features: of "prefix_cache", "chunked_prefill", "spec_decode", "structured".
        "spec_decode": a decode may have a few tokens, as attention takes any number of them for each sequence.
    extras: opaque to core.
    """

    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    default_dtype: str = "bfloat16"
    kv_dtypes: tuple[str, ...] = ("auto",)
    fp8: frozenset[str] = NONE
    streams: bool = False
    triton: bool = False
    graph: Literal["none", "capture", "aot"] = "none"
    shapes: Literal["dynamic", "bucketed"] = "dynamic"
    buckets: BucketSpec | None = None
    dist_backend: str | None = None
    collectives: frozenset[str] = NONE
    max_world_size: int = 1
    features: frozenset[str] = frozenset({"prefix_cache", "chunked_prefill", "structured"})
    schedule: ScheduleLimits = ScheduleLimits()
    extras: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ConfigPatch:
    """A change a platform asks for in the engine config, with its reason. It is always logged.

    field: dotted name of a platform-tunable field, e.g. "cache.memory_utilization".
    A value that the user set wins unless `force`.
    """

    field: str
    value: object
    reason: str
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class WorkerLaunch:
    """How worker processes start. Rank 0 is the engine's own process.

    visible_env: the variable that says which devices a process sees. Every other rank is then shown its own
        `devices_per_worker` only, and `make_device` gets local rank 0. None: all see all and take theirs by local rank.
    env: (local rank, world size) -> a worker's further environment.
    """

    start_method: str = "spawn"
    daemon: bool = True
    visible_env: str | None = None
    devices_per_worker: int = 1
    env: Callable[[int, int], Mapping[str, str]] | None = None


@dataclass(frozen=True, kw_only=True)
class MemInfo:
    """Device memory in bytes. `peak_torch`: most that torch held since `reset_peak`; `non_torch`: the rest in use."""

    total: int
    free: int
    peak_torch: int = 0
    non_torch: int = 0


@dataclass(frozen=True, kw_only=True)
class Support:
    """The answer of a kernel to "can you run this?". Every refusal carries a reason."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


YES = Support(ok=True)


def no(reason: str) -> Support:
    """A refusal with its reason."""
    return Support(ok=False, reason=reason)


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """A group of ranks that communicate. `ranks` are global ranks; `rank` is this process's place in them."""

    name: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    backend: str | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)
