"""A platform for tests: core's Triton kernels around the model, interpreted, with the fake platform's attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from octavo.config import EngineConfig
from octavo.plugin import (
    BatchKey,
    BatchLimits,
    Device,
    GraphRunner,
    KernelRegistry,
    PlatformCaps,
    PlatformInfo,
    hookimpl,
)
from octavo.testing.refdev import platform_probe  # noqa: F401  (a hook of this module too)
from octavo.testing.refdev_device import RefDevice
from octavo.testing.refdev_kernels import RefAttention


class RunsAsRecorded:
    """A `GraphRunner` whose replay is the recorded function itself: Triton's interpreter cannot be captured."""

    def __init__(self) -> None:
        self.prepared: list[BatchKey] = []

    def keys(self, limits: BatchLimits) -> Sequence[BatchKey]:
        most = limits.max_num_seqs
        decodes = [BatchKey(num_tokens=n, num_seqs=n, max_q_len=1) for n in (1, 2, 4, most)]
        return [*decodes, *(BatchKey(num_tokens=n, num_seqs=min(n, most)) for n in (16, 64, 600))]

    def prepare(self, key: BatchKey, fn: Callable[[], Any]) -> Callable[[], Any]:
        fn()
        self.prepared.append(key)
        return fn

    def run(self, handle: Callable[[], Any]) -> Any:
        return handle()

    def close(self) -> None:
        """Nothing is held."""


@hookimpl
def platform_info() -> PlatformInfo:
    return PlatformInfo(name="interpreted", api="1.0", version="1", device_type="cpu")


@hookimpl
def platform_caps() -> PlatformCaps:
    return PlatformCaps(
        dtypes=("float32", "bfloat16"), default_dtype="float32", streams=True, triton=True, graph="capture"
    )


@hookimpl
def make_device(local_rank: int) -> Device:
    return RefDevice(local_rank, memory=1 << 30)


@hookimpl
def register_kernels(registry: KernelRegistry) -> None:
    from octavo.triton import bookkeeping, sampling

    registry.attention(RefAttention, priority=10)  # Triton's own takes minutes where it is interpreted
    for fn in (bookkeeping.begin_step, bookkeeping.commit_tokens, sampling.greedy, sampling.sample):
        registry.op(fn.__name__, fn, provider="triton", priority=10, inplace=True)


@hookimpl
def make_graph_runner(config: EngineConfig) -> GraphRunner:
    return RunsAsRecorded()
