"""Kernels are compiled before their first use, many at a time, while weights are read.

    this thread    bind a layer, submit | read weights ............... | finish | first launch
    the pool                            | compile | compile | ...
                                        | compile | compile | ...

What is submitted runs at once, as it will run in a step, but launches nothing and computes nothing: its tensors are on
the device "meta", and its `Overlap` only compiles. Triton's `AsyncCompileMode` has the pool do that, and puts kernels
into Triton's cache, where launches find them. Triton 3.6 does so only in the end: a launch before `finish` compiles its
kernel once more.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
import triton

from octavo.plugin import (
    AttentionSpec,
    AttnBatch,
    AttnLayer,
    BatchKey,
    BatchLimits,
    Device,
    DeviceDesc,
    KVView,
    LinearSpec,
    start_step,
)
from octavo.plugin.recording import recorded_shapes
from octavo.triton.attention_backend import TritonAttention
from octavo.triton.overlap import Overlap

Tensor = torch.Tensor

META = torch.device("meta")
MOST_THREADS = 12
MOST_TOKENS = 256
"""Products of more tokens have no kernels of Triton's."""


class Loading(Executor):
    """Threads of a device that compile kernels and load them. Loading counts: Triton 3.6 has a C compiler build the
    launcher of each signature then, which takes as long as a small kernel."""

    def __init__(self, num_threads: int, device: Device) -> None:
        self._pool = ThreadPoolExecutor(num_threads, "octavo-compile", initializer=device.activate)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def loaded() -> Any:
            kernel = fn(*args, **kwargs)
            _ = kernel.run  # what a launch calls: it is made when it is first asked for
            return kernel

        return self._pool.submit(loaded)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


class CompileAhead:
    """Compiles in a pool of threads what kernel classes will launch on a device. Without `AsyncCompileMode`, which came
    with Triton 3.5, it does nothing: kernels are compiled at their first use, as all are that nobody asks for."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._submitted: set[Hashable] = set()
        self._begun: tuple[Context, Any, Loading] | None = None

    def submit(self, key: Hashable, launches: Callable[[], object]) -> None:
        """Call `launches`, unless it was called for this key, and compile in the pool what it has compiled."""
        if key in self._submitted or not hasattr(triton, "AsyncCompileMode"):
            return
        self._submitted.add(key)
        if self._begun is None:
            # Entered in a context of its own: what is launched outside of `launches` is compiled at once, as ever.
            pool = Loading(min(MOST_THREADS, len(os.sched_getaffinity(0))), self._device)
            self._begun = copy_context(), triton.AsyncCompileMode(pool, ignore_errors=True), pool
            self._begun[0].run(self._begun[1].__enter__)
        self._begun[0].run(launches)

    def finish(self) -> None:
        """Wait until all that was submitted is on the card. What failed raises its error where it is launched."""
        if self._begun is not None:
            context, mode, pool = self._begun
            self._begun = None
            context.run(mode.__exit__, None, None, None)
            pool.shutdown()

    def linear(self, cls: type[Any]) -> type[Any]:
        """The same `LinearKernel` class, whose kernels are compiled from its first weight of a spec on."""
        ahead = self

        class Ahead(cls):  # type: ignore[misc]
            def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> Any:
                packed = super().prepare(weights, spec, device)
                ahead.submit((cls, spec), lambda: multiply(self, packed, spec))
                return packed

        return named_as(cls, Ahead)

    def attention(self, cls: type[TritonAttention]) -> type[TritonAttention]:
        """The same backend class, whose kernels are compiled from the moment that it is made."""
        ahead = self

        class Ahead(cls):  # type: ignore[valid-type, misc]
            def __init__(self, spec: AttentionSpec, limits: BatchLimits, device: Device) -> None:
                super().__init__(spec, limits, device)
                ahead.submit((cls, spec, limits), lambda: attend(cls, spec, limits, device))

        return named_as(cls, Ahead)


def named_as(cls: type[Any], other: type[Any]) -> type[Any]:
    """`other` under the name of `cls`."""
    other.__name__, other.__qualname__, other.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    other.__doc__ = cls.__doc__
    return other


# -- steps without memory --


def multiply(kernel: Any, packed: Any, spec: LinearSpec) -> None:
    """Apply a weight that `kernel.prepare` made of `spec` to 1, 2, 4, ... tokens: cuts change at powers of two."""
    weight, dtype = without_memory(packed), getattr(torch, spec.act_dtype)
    bias = torch.empty(spec.out_features, dtype=dtype, device=META) if spec.bias else None
    scaled = getattr(kernel, "scaled_rows_from", math.inf) if spec.gate else math.inf
    tokens = 1
    while tokens <= min(spec.max_tokens, MOST_TOKENS):
        x = torch.empty((tokens, spec.in_features), dtype=dtype, device=META)
        kernel.apply(x, weight, bias)
        if tokens >= scaled:
            kernel.apply_scaled(x, weight, bias)
        tokens *= 2


def without_memory(packed: Any) -> Any:
    """A packed weight with its tensors on "meta", and an overlap that compiles only."""
    if isinstance(packed, Tensor):
        return packed.to(META)
    if isinstance(packed, Overlap):
        return replace(packed, compile_only=True)
    if is_dataclass(packed) and not isinstance(packed, type):
        return replace(packed, **{f.name: without_memory(getattr(packed, f.name)) for f in fields(packed)})
    return packed


def attend(cls: type[TritonAttention], spec: AttentionSpec, limits: BatchLimits, device: Device) -> None:
    """Run a layer in every recorded step, and in the largest eager one, which core runs to see its memory."""
    silent = cls.with_tuning(cls.tuning, replace(cls.overlap, compile_only=True))
    shadow: Any = Shadow(device)  # what a backend's constructor asks of a device
    backend = silent(spec, limits, shadow)
    for key in recorded_shapes(limits):
        attend_step(backend, spec, limits, key, graph=True)
    num_seqs = min(limits.max_num_seqs, limits.max_num_tokens)
    longest = min(limits.max_num_tokens // num_seqs, limits.max_model_len - 1)
    largest = BatchKey(num_tokens=num_seqs * longest, num_seqs=num_seqs, max_q_len=longest)
    attend_step(backend, spec, limits, largest, graph=False)


@dataclass(frozen=True)
class Shadow:
    """A device's description, over no memory."""

    device: Device
    torch_device: torch.device = META

    def describe(self) -> DeviceDesc:
        return self.device.describe()


def attend_step(backend: Any, spec: AttentionSpec, limits: BatchLimits, key: BatchKey, *, graph: bool) -> None:
    """One layer of one step of a shape on tensors of "meta", laid out as core lays them out."""
    dtype, kv_dtype = (getattr(torch, name) for name in (spec.dtype, spec.kv_dtype))
    num_seqs, width = key.num_seqs, -(-limits.max_model_len // spec.block_size) + 1

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    batch = AttnBatch(
        num_tokens=key.num_tokens,
        num_seqs=num_seqs,
        num_decodes=num_seqs if key.max_q_len == 1 else 0,
        max_q_len=key.max_q_len or key.num_tokens,
        max_kv_len=limits.max_model_len,
        q_starts=empty(num_seqs + 1, dtype=torch.int32),
        kv_lens=empty(num_seqs, dtype=torch.int32),
        block_table=empty(num_seqs, width, dtype=torch.int32),
        slots=empty(key.num_tokens, dtype=torch.int64),
        q_starts_host=np.zeros(num_seqs + 1, np.int32),
        kv_lens_host=np.zeros(num_seqs, np.int32),
    )
    cache = empty(2, spec.num_kv_heads, spec.block_size, spec.head_dim, dtype=kv_dtype)
    sinks = empty(spec.num_heads, dtype=torch.float32) if spec.sinks else None
    q = empty(key.num_tokens, spec.num_heads, spec.head_dim, dtype=dtype)
    plan = backend.plan(batch, graph=graph)
    start_step(backend, plan)
    backend.run(AttnLayer(index=0, sinks=sinks), q, None, None, KVView(k=cache, v=cache), plan, torch.empty_like(q))
