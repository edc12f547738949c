"""Everything a platform plugin may implement. Three hooks are mandatory; every other one has a default in core.

Hooks run at start-up, never on the step path. Core calls them only through `octavo.discovery.ActivePlatform`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pluggy

from octavo.plugin.contracts import (
    Communicator,
    Device,
    ExtensionRegistry,
    GraphRunner,
    KernelRegistry,
    ModelExecutor,
    WorkerView,
)
from octavo.plugin.data import (
    ConfigPatch,
    GroupSpec,
    PlatformCaps,
    PlatformInfo,
    Probe,
    WorkerEvent,
    WorkerLaunch,
)
from octavo.plugin.specs import KVLayout, KVSpec

if TYPE_CHECKING:
    from octavo.config import EngineConfig

PROJECT = "octavo"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

MANDATORY = ("platform_info", "platform_probe", "make_device")


@hookspec(firstresult=True)
def platform_info() -> PlatformInfo | None:
    """Mandatory. Who the plugin is. Must not import torch or an SDK."""


@hookspec(firstresult=True)
def platform_probe() -> Probe | None:
    """Mandatory. Whether the hardware is here: under a second, no device context, never raises for absence."""


@hookspec(firstresult=True)
def make_device(local_rank: int, config: EngineConfig, caps: PlatformCaps) -> Device | None:
    """Mandatory. The device of one worker; the first thing a worker does."""


@hookspec(firstresult=True)
def platform_caps(options: Mapping[str, object]) -> PlatformCaps | None:
    """What the platform can do, given its parsed `--platform-opt`s. Default: conservative caps."""


@hookspec
def platform_configure(config: EngineConfig, caps: PlatformCaps) -> Sequence[ConfigPatch] | None:
    """Changes to the config, each with a reason. Default: none."""


@hookspec(firstresult=True)
def platform_launch(config: EngineConfig, caps: PlatformCaps) -> WorkerLaunch | None:
    """How worker processes start. Default: spawn, one device each, no extra environment."""


@hookspec
def register_kernels(registry: KernelRegistry, device: Device, caps: PlatformCaps) -> None:
    """Register kernels, before the model is built. Also called on kernel packs. Default: all reference."""


@hookspec(firstresult=True)
def kv_layout(spec: KVSpec, device: Device) -> KVLayout | None:
    """How KV lies in memory when the attention backend does not say. Default: BHNC, torch.empty."""


@hookspec(firstresult=True)
def make_communicator(group: GroupSpec, device: Device) -> Communicator | None:
    """Collectives of a group of ranks; the default process group exists. Default: `TorchCommunicator` of
    `octavo.plugin.torch` with `caps.dist_backend`, or gloo."""


@hookspec(firstresult=True)
def make_graph_runner(config: EngineConfig, device: Device) -> GraphRunner | None:
    """Capture or compilation of whole steps. Default: run eagerly."""


@hookspec(firstresult=True)
def make_executor(config: EngineConfig, device: Device) -> ModelExecutor | None:
    """A whole executor in place of core's runner (JAX, MLX, ahead-of-time engines). Default: core's runner."""


@hookspec
def register_extensions(registry: ExtensionRegistry) -> None:
    """What is hardware-neutral, by name: models, quantization formats, parsers, drafters, logits processors. The only
    hook of the group `octavo.extensions`."""


@hookspec
def worker_event(event: WorkerEvent, worker: WorkerView) -> None:
    """A worker of core's runner serves from now on ("ready"), or is about to be taken apart ("shutdown"). An engine
    that falls asleep shuts its workers down, and makes them anew when it wakes up."""
