"""The public door: all that a plugin may import (with `octavo.testing` and `octavo.triton`).

Import-light: no torch. Beside it: `octavo.plugin.torch` (a device, collectives and weights for platforms of torch),
`octavo.plugin.recording` (steps recorded by a torch backend), `octavo.plugin.models` and `octavo.plugin.parsers` (what
extensions are made of).
"""

from typing import TYPE_CHECKING

from octavo.plugin.contracts import (
    AttentionBackend,
    AttnBatch,
    AttnLayer,
    AttnPlan,
    BatchKey,
    Communicator,
    Device,
    Event,
    ExtensionRegistry,
    GraphRunner,
    KernelRegistry,
    KVView,
    LinearKernel,
    LogitsProcessor,
    MaskingExecutor,
    ModelExecutor,
    MoEKernel,
    Packed,
    Step,
    Stream,
    WorkerView,
    always,
    start_step,
)
from octavo.plugin.data import (
    YES,
    BucketSpec,
    ConfigPatch,
    DeviceDesc,
    GroupSpec,
    MemInfo,
    MultipleOf,
    OptionSpec,
    PlatformCaps,
    PlatformInfo,
    Probe,
    ScheduleLimits,
    Support,
    WorkerEvent,
    WorkerLaunch,
    no,
)
from octavo.plugin.drafter import Drafter, DrafterSpec, DraftInput
from octavo.plugin.hookspecs import hookimpl
from octavo.plugin.quant import Along, MatrixSpec, QuantFormat, QuantLayer, QuantTensor, plain_weight
from octavo.plugin.specs import (
    AttentionSpec,
    BatchLimits,
    KVLayout,
    KVPlan,
    KVSpec,
    LinearSpec,
    MoESpec,
    OpContext,
    QuantScheme,
)
from octavo.plugin.step import Admit, Batch, BlockUpdate, KVGroup, Masks, StepResult, TokenLogprobs
from octavo.plugin.version import PLUGIN_API

if TYPE_CHECKING:
    from octavo.config import EngineConfig

__all__ = [
    "PLUGIN_API",
    "YES",
    "Admit",
    "Along",
    "AttentionBackend",
    "AttentionSpec",
    "AttnBatch",
    "AttnLayer",
    "AttnPlan",
    "Batch",
    "BatchKey",
    "BatchLimits",
    "BlockUpdate",
    "BucketSpec",
    "Communicator",
    "ConfigPatch",
    "Device",
    "DeviceDesc",
    "DraftInput",
    "Drafter",
    "DrafterSpec",
    "EngineConfig",
    "Event",
    "ExtensionRegistry",
    "GraphRunner",
    "GroupSpec",
    "KVGroup",
    "KVLayout",
    "KVPlan",
    "KVSpec",
    "KVView",
    "KernelRegistry",
    "LinearKernel",
    "LinearSpec",
    "LogitsProcessor",
    "MemInfo",
    "MoEKernel",
    "MoESpec",
    "MaskingExecutor",
    "Masks",
    "MatrixSpec",
    "ModelExecutor",
    "MultipleOf",
    "OpContext",
    "OptionSpec",
    "Packed",
    "PlatformCaps",
    "PlatformInfo",
    "Probe",
    "QuantFormat",
    "QuantLayer",
    "QuantScheme",
    "QuantTensor",
    "ScheduleLimits",
    "Step",
    "StepResult",
    "Stream",
    "Support",
    "TokenLogprobs",
    "WorkerEvent",
    "WorkerLaunch",
    "WorkerView",
    "always",
    "start_step",
    "hookimpl",
    "no",
    "plain_weight",
]


def __getattr__(name: str) -> object:
    # octavo.config is built on octavo.plugin.data, so the door can name it only when asked.
    if name == "EngineConfig":
        from octavo.config import EngineConfig

        return EngineConfig
    raise AttributeError(f"module 'octavo.plugin' has no attribute {name!r}")
