"""Whole steps as tapes: recorded once per shape, run again by one call of the compiled library.

    prepare          keeps the step
    the first run    runs it, and takes down every call of a compiled function
    later runs       make the same calls in C++: no Python, no torch, nothing allocated

A step that torch computes something in cannot be taken down: it runs in Python for good, and the log says why.
"""

from __future__ import annotations

import ctypes
import logging
import math
import weakref
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.plugin import BatchKey, BatchLimits
from octavo.plugin.contracts import Step
from octavo_cpu import native
from octavo_cpu.communicator import check_ranks

log = logging.getLogger(__name__)

ALIGNMENT = 64
SEGMENT_BYTES = 1 << 20
"""The least memory that an arena takes at a time."""

DECODE_STEPS = ((16, 1), (32, 4), (64, 8), (128, 16), (1 << 30, 32))
"""(up to, distance): batch sizes of decode steps. A padded row costs its share of the arithmetic, so that the distance
is at most a fifth of the size."""

aten = torch.ops.aten


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes of decode steps that are recorded: 1, 2, 3, ... 16, 20, ... and the largest."""
    sizes: list[int] = []
    size = 0
    for limit, distance in DECODE_STEPS:
        while size < min(limit, max_num_seqs):
            size = min((size // distance + 1) * distance, max_num_seqs)
            sizes.append(size)
    return sizes


class ReplayArgs(ctypes.Structure):
    """`octavo::ReplayArgs`."""

    _fields_ = (
        ("functions", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("num_calls", ctypes.c_int64),
    )


def aligned(num_bytes: int) -> int:
    """The least multiple of `ALIGNMENT` that is at least `num_bytes`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Tape:
    """The calls of one step, in order. Implements `native.Recorder`; `close` before the first `replay`."""

    def __init__(self) -> None:
        self._functions: list[int] = []
        self._args: list[bytes] = []

    def append(self, function: int, args: bytes) -> None:
        self._functions.append(function)
        self._args.append(args)

    def close(self) -> None:
        """Lay the calls out as the library reads them."""
        functions = np.array(self._functions, np.uintp)
        offsets = np.array([0, *accumulate(aligned(len(a)) for a in self._args)], np.int64)
        args = np.zeros(int(offsets[-1]), np.uint8)
        for offset, call in zip(offsets.tolist(), self._args, strict=False):
            args[offset : offset + len(call)] = np.frombuffer(call, np.uint8)
        self._arrays = functions, args, offsets
        self._replayed = ReplayArgs(functions.ctypes.data, args.ctypes.data, offsets.ctypes.data, len(functions))
        self._replay = native.step_function("replay")

    def replay(self) -> None:
        """Make all calls again. Raises ConnectionError if a rank was lost in one of them."""
        self._replay(self._replayed)
        check_ranks()


class Segment:
    """Memory out of which blocks are taken, each the lowest that is free; a block is free again when its array dies."""

    def __init__(self, num_bytes: int) -> None:
        memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        self.memory = memory[start : start + num_bytes]
        self._taken: list[tuple[int, int]] = []

    def take(self, num_bytes: int) -> NDArray[np.uint8] | None:
        """An array of that size, a multiple of `ALIGNMENT`; None if there is no gap for it."""
        at = 0
        for start, end in self._taken:
            if start - at >= num_bytes:
                break
            at = end
        if at + num_bytes > len(self.memory):
            return None
        block = (at, at + num_bytes)
        insort(self._taken, block)
        array = self.memory[at : at + num_bytes]
        weakref.finalize(array, self._taken.remove, block).atexit = False
        return array

    def reset(self) -> None:
        """Take every block back. What still dies of them changes nothing."""
        self._taken = []


class Arena:
    """The memory of all recorded steps: only one of them runs at a time, so that together they need what the largest
    needs. It grows in a recording and never in a replay."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor, whose memory serves again when the last tensor over it is gone."""
        num_bytes = math.prod(shape) * dtype.itemsize
        array = self._take(aligned(num_bytes)) if num_bytes else np.empty(0, np.uint8)
        return torch.from_numpy(array)[:num_bytes].view(dtype).view(tuple(shape))

    def _take(self, num_bytes: int) -> NDArray[np.uint8]:
        for segment in self._segments:
            if (array := segment.take(num_bytes)) is not None:
                return array
        # As much again as there is: many shapes, each a little larger than the last, take twice the largest's memory.
        self._segments.append(Segment(max(num_bytes, self.num_bytes, SEGMENT_BYTES)))
        return self._take(num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of address space; what was never touched takes no memory."""
        return sum(len(segment.memory) for segment in self._segments)

    def reset(self) -> None:
        """Before another recording: what the last one left may be overwritten."""
        for segment in self._segments:
            segment.reset()


def storages(values: Any) -> set[int]:
    """The addresses of the memory behind tensors that are not empty."""
    return {t.untyped_storage().data_ptr() for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.numel()}


@cache
def may_look(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator promises another view of a tensor's memory and nothing else."""
    schema = operator._schema
    looks = [r.alias_info is not None and not r.alias_info.is_write for r in schema.returns]
    return bool(looks) and all(looks) and operator is not aten.lift_fresh.default


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every torch operator of a recording: hands out the arena's memory, and notes what cannot be taken down."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena
        self.computed: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Or torch imports its whole compiler in the middle of the first recorded step: seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (wanted := new_tensor(func, args, kwargs)) is not None:
            return self._arena.empty(*wanted)
        result = func(*args, **kwargs)
        # Some that promise a view, such as `reshape`, copy where there is none.
        if not (may_look(func) and storages(result) <= storages((args, kwargs))):
            self.computed.append(str(func))
        return result


def new_tensor(func: Any, args: Any, kwargs: Any) -> tuple[Sequence[int], torch.dtype] | None:
    """(shape, dtype) if the operator makes a contiguous tensor of undefined content in main memory."""
    if func is aten.empty.memory_format:
        shape, like = args[0], None
    elif func is aten.new_empty.default:
        like, shape = args
    elif func is aten.empty_like.default and args[0].is_contiguous():
        like, shape = args[0], args[0].shape
    else:
        return None
    plain = kwargs.get("memory_format") in (None, torch.contiguous_format, torch.preserve_format)
    device = kwargs.get("device")
    if not plain or (device is not None and torch.device(device).type != "cpu"):
        return None
    dtype = kwargs.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
    return shape, dtype


@dataclass
class Recorded:
    """One shape: its step, and what the first run made of it. computed: operators of torch in it."""

    key: BatchKey
    step: Step
    tape: Tape | None = None
    outputs: Any = None
    computed: tuple[str, ...] = field(default=())


class TapeRunner:
    """Implements `octavo.plugin.GraphRunner`."""

    def __init__(self) -> None:
        self._arena = Arena()
        self._told: set[tuple[str, ...]] = set()

    def keys(self, limits: BatchLimits) -> Sequence[BatchKey]:
        """Decode steps of every size."""
        sizes = decode_sizes(min(limits.max_num_seqs, limits.max_num_tokens))
        return [BatchKey(num_tokens=size, num_seqs=size, max_q_len=1) for size in sizes]

    def prepare(self, key: BatchKey, fn: Step) -> Recorded:
        """Nothing runs yet: the first `run` records, and is a step like any other."""
        return Recorded(key, fn)

    def run(self, handle: Recorded) -> Any:
        """Outputs hold until the next `run`."""
        if handle.tape is not None:
            handle.tape.replay()
            return handle.outputs
        return handle.step() if handle.computed else self._record(handle)

    def _record(self, handle: Recorded) -> Any:
        self._arena.reset()
        tape = Tape()
        native.recording.recorder = tape
        try:
            with Watch(self._arena) as watch:
                outputs = handle.step()
        finally:
            native.recording.recorder = None
        if watch.computed:
            handle.computed = tuple(dict.fromkeys(watch.computed))
            self._tell(handle)
        else:
            tape.close()
            handle.tape, handle.outputs = tape, outputs
        return outputs

    def _tell(self, handle: Recorded) -> None:
        if handle.computed in self._told:
            return
        self._told.add(handle.computed)
        log.warning(
            "steps of %d tokens in %d sequences run without a tape, as torch computes in them: %s",
            handle.key.num_tokens,
            handle.key.num_seqs,
            ", ".join(handle.computed),
        )

    def close(self) -> None:
        """Give the memory back."""
        self._arena = Arena()
