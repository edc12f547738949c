"""Torch helpers for plugins: a device and collectives that most platforms can use as they are.

With `octavo.plugin.models` the only part of the door that imports torch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from octavo.errors import UnsupportedModelError
from octavo.plugin.data import DeviceDesc, GroupSpec, MemInfo
from octavo.plugin.specs import QuantScheme

__all__ = [
    "HOST",
    "NullEvent",
    "NullStream",
    "ScaledRows",
    "TorchCommunicator",
    "TorchDevice",
    "core_scheme",
    "dequantize_weight",
    "has_int4_groups",
    "int4_groups",
    "lazy_zeros",
    "quantize_rows",
    "renamed",
]

HOST = torch.device("cpu").type
"""Torch's name for the memory that the host itself computes in: it has no streams, no pinning and no index."""


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that cost nothing until they are touched where the host's allocator gives zero pages; else torch.zeros."""
    if device.type != HOST:
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(*shape)


class NullStream:
    """The stream of a platform without streams: all work is done when the call returns."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def wait_event(self, event: Any) -> None:
        """Every event has happened."""


class NullEvent:
    """The event of a platform without streams."""

    def record(self, stream: Any = None) -> None:
        """Happened."""

    def synchronize(self) -> None:
        """Happened."""

    def query(self) -> bool:
        return True


class TorchDevice:
    """A `Device` over a torch backend module (`torch.<kind>`), found by the device's torch type.

    kind: torch device type; memory: () -> MemInfo where the backend has no `mem_get_info`.
    What the backend lacks (streams, pinning, peak counters) becomes a null object.
    """

    def __init__(self, kind: str, index: int = 0, *, memory: Callable[[], MemInfo] | None = None) -> None:
        self.type = kind
        self.index = index
        self._module = None if kind == HOST else torch.get_device_module(kind)
        self._memory = memory
        self._device = torch.device(kind) if kind == HOST else torch.device(kind, index)

    @property
    def torch_device(self) -> torch.device:
        return self._device

    def _backend(self, name: str) -> Any:
        return getattr(self._module, name, None)

    def activate(self) -> None:
        if set_device := self._backend("set_device"):
            set_device(self.index)

    def synchronize(self) -> None:
        if sync := self._backend("synchronize"):
            sync(self.index)

    def stream(self, priority: int = 0) -> Any:
        make = self._backend("Stream")
        return make(device=self._device, priority=priority) if make else NullStream()

    def event(self) -> Any:
        make = self._backend("Event")
        return make() if make else NullEvent()

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        use = self._backend("stream")
        return use(stream) if use and not isinstance(stream, NullStream) else contextlib.nullcontext()

    def memory(self) -> MemInfo:
        if self._memory is not None:
            return self._memory()
        info = self._backend("mem_get_info")
        if info is None:
            raise RuntimeError(f"torch.{self.type} has no mem_get_info; pass memory= to TorchDevice")
        free, total = info(self.index)
        peak = self._backend("max_memory_allocated")
        reserved = self._backend("memory_reserved")
        return MemInfo(
            total=total,
            free=free,
            peak_torch=peak(self.index) if peak else 0,
            non_torch=max(0, total - free - (reserved(self.index) if reserved else 0)),
        )

    def reset_peak(self) -> None:
        if reset := self._backend("reset_peak_memory_stats"):
            reset(self.index)

    def empty_cache(self) -> None:
        if empty := self._backend("empty_cache"):
            empty()

    def pin(self, t: torch.Tensor) -> torch.Tensor:
        return t if self._module is None else t.pin_memory()

    def inference(self) -> AbstractContextManager[Any]:
        return torch.inference_mode()

    def describe(self) -> DeviceDesc:
        props = self._backend("get_device_properties")
        if props is None:
            return DeviceDesc(name=self.type, index=self.index, memory=self.memory().total)
        p = props(self.index)
        return DeviceDesc(
            name=getattr(p, "name", self.type),
            index=self.index,
            memory=getattr(p, "total_memory", 0),
            compute_units=getattr(p, "multi_processor_count", 0),
            uuid=str(getattr(p, "uuid", "")),
        )


class TorchCommunicator:
    """A `Communicator` over a process group of torch.distributed; core has initialised the default one.

    device: this rank's. A barrier names it, as some backends would take one by the rank's number.
    Ranks in `src` and `dst` are places in the group. Tensors keep their dtype; all_reduce and broadcast work in place.
    Strided tensors are sent as contiguous copies: backends refuse them or, as gloo does, send what lies between.
    """

    def __init__(self, spec: GroupSpec, device: torch.device | None = None) -> None:
        self.rank = spec.rank
        self.size = spec.size
        self.group = dist.new_group(list(spec.ranks), backend=spec.backend)
        self._ranks = spec.ranks
        self._device_ids = None if device is None or device.index is None else [device.index]

    def all_reduce(self, t: Tensor) -> Tensor:
        if not t.is_contiguous():
            return t.copy_(self.all_reduce(t.contiguous()))
        dist.all_reduce(t, group=self.group)
        return t

    def all_gather(self, t: Tensor, dim: int) -> Tensor:
        """Pieces of equal shape, joined along `dim` in rank order."""
        pieces = t.new_empty((self.size * t.shape[0], *t.shape[1:]))
        renamed("all_gather_single", "all_gather_into_tensor")(pieces, t.contiguous(), group=self.group)
        return pieces if dim == 0 else torch.cat(pieces.chunk(self.size), dim=dim)

    def reduce_scatter(self, t: Tensor, dim: int) -> Tensor:
        """The sum's piece of this rank along `dim`, whose size the group size must divide."""
        pieces = t.chunk(self.size, dim=dim)
        out = torch.empty_like(pieces[0], memory_format=torch.contiguous_format)
        renamed("reduce_scatter_single", "reduce_scatter_tensor")(out, torch.cat(pieces), group=self.group)
        return out

    def all_to_all(self, t: Tensor, in_splits: Sequence[int], out_splits: Sequence[int]) -> Tensor:
        """Rows of t [sum(in_splits), ...] go to ranks in order; returns [sum(out_splits), ...]."""
        out = t.new_empty((sum(out_splits), *t.shape[1:]))
        dist.all_to_all_single(out, t.contiguous(), list(out_splits), list(in_splits), group=self.group)
        return out

    def broadcast(self, t: Tensor, src: int) -> Tensor:
        if not t.is_contiguous():
            return t.copy_(self.broadcast(t.contiguous(), src))
        dist.broadcast(t, src=self._ranks[src], group=self.group)
        return t

    def send(self, t: Tensor, dst: int) -> None:
        dist.send(t.contiguous(), dst=self._ranks[dst], group=self.group)

    def recv(self, like: Tensor, src: int) -> Tensor:
        out = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(out, src=self._ranks[src], group=self.group)
        return out

    def barrier(self) -> None:
        dist.barrier(group=self.group, device_ids=self._device_ids)

    def close(self) -> None:
        dist.destroy_process_group(self.group)


def renamed(new: str, old: str) -> Callable[..., Any]:
    """A collective of torch.distributed under its name since torch 2.13, which warns of the old one."""
    found: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return found


def dequantize_weight(weights: Mapping[str, torch.Tensor], scheme: QuantScheme, dtype: torch.dtype) -> torch.Tensor:
    """The plain weight [N, K] in `dtype` of a quantized one: for kernels that unpack at load what they cannot read.

    weights: the tensors of the scheme, as `LinearKernel.prepare` gets them. Raises UnsupportedModelError for a scheme
    whose format says no way.
    """
    if scheme.dequantize is None:
        raise UnsupportedModelError(
            f"weights packed as {scheme.packing!r} can only be served by a kernel for them: their format has no "
            "`dequantize`; use a platform that brings such a kernel"
        )
    return scheme.dequantize(weights, scheme, dtype)


def has_int4_groups(scheme: QuantScheme | None) -> bool:
    """Whether `int4_groups` reads weights of this scheme."""
    return scheme is not None and scheme.int4_groups is not None


def int4_groups(
    weights: Mapping[str, torch.Tensor], scheme: QuantScheme
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight as 4-bit codes with a scale and an offset for every 32 columns, whatever its packing: for kernels that
    lay them out in their own way.

    (codes uint8 [N, K] in 0..15, scale, offset float32 [N, K / 32]): W[n, k] is codes[n, k] * scale[n, k // 32] +
    offset[n, k // 32]. weights: as for `dequantize_weight`. Only for schemes that `has_int4_groups` says yes to.
    """
    assert scheme.int4_groups is not None, scheme
    return scheme.int4_groups(weights, scheme)


def core_scheme(packing: str) -> QuantScheme:
    """The scheme of one of core's own packings, "gguf:Q4_0" or "online:int8": for the tests of kernels that take it.
    Raises UnsupportedModelError for another."""
    from octavo.quant import gguf_blocks, online

    family, _, kind = packing.partition(":")
    if family == online.FAMILY and kind in online.SCHEMES:
        return online.SCHEMES[kind]
    return gguf_blocks.scheme(kind if family == gguf_blocks.FAMILY else packing)


class ScaledRows(NamedTuple):
    """Activations x [T, K] in 8 bits: `values` [T, K] times `scale` float32 [T, 1]. See `LinearKernel`."""

    values: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


def quantize_rows(x: torch.Tensor, number: str = "fp8_e4m3") -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [R, K], scale float32 [R, 1]) of x [R, K]: what `--quantization fp8`, or for number "int8" `--quantization
    int8`, makes of a plain weight, for the kernels that take the packing "online:fp8" or "online:int8"."""
    from octavo.quant.online import quantize_rows as quantize

    return quantize(x, number)
