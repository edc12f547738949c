"""How kernels of a device begin, and hand each other what they stored.

Starting a kernel while the one before it still runs, where a device can:
A kernel usually starts when the one before it has ended, and the device idles for about a microsecond in between. With
an `Overlap` it starts early: what lies before `START()` in it runs meanwhile. That may read what no kernel of a step
writes (weights, tables), and nothing else; every program of the kernel has to call `START()` once, before it returns.

    FETCH(weights)              # constant: on their way while the kernel before ends
    START()                     # here the kernel before has ended and its writes are visible
    x = tl.load(...)            # the result of the kernel before

Where programs of a kernel leave sums for the last of them to add up, one thread of each counts it in, behind a barrier.
Its release covers what other threads stored if the device's memory model makes barriers and releases cumulative, or if
the barrier waits until memory has it. Where neither holds, each thread has to wait for its own before: `PUBLISH()`.
Attention's decode kernel has a fence of its own, for devices without an instruction to wait with: atomics, which need
memory for it (`AttentionTuning.decode_fence`).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl  # noqa: F401  (the interpreter wants to see it beside every device function)

SECTOR = 32
"""Bytes that one pointer given to `Overlap.fetch` stands for: the least that chips read from memory."""


@triton.jit
def start_in_order():
    """The device already started this kernel after the one before had ended."""


@triton.jit
def fetch_nothing(pointers):
    """Without an early start there is no time to use."""


@triton.jit
def publish_by_barrier():
    """A barrier, and the release of one thread behind it, cover what all threads stored."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What a platform does around kernels.

    start: a device function without arguments. fetch: a device function of a tensor of pointers, which brings the
    `SECTOR` bytes at each into the chip's cache without waiting for them. publish: a device function without arguments,
    behind which memory has what the thread stored. options: of the launch.
    compile_only: nothing is launched; kernels are only compiled, see `launch`.
    """

    start: Any = start_in_order
    fetch: Any = fetch_nothing
    publish: Any = publish_by_barrier
    options: Mapping[str, Any] = field(default_factory=dict)
    compile_only: bool = False

    @property
    def early(self) -> bool:
        """Whether kernels start early at all."""
        return self.start is not start_in_order

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Launch `kernel` on `grid`: how the functions of `octavo.triton` that take an overlap start all their kernels.

        With `compile_only` Triton compiles it for these arguments, as the same call without would, and touches none of
        them: tensors may be without memory (device "meta"), as only their types and alignment count.
        """
        if self.compile_only:
            kernel.warmup(*args, grid=grid, **constants)
        else:
            kernel[grid](*args, **constants)


IN_ORDER = Overlap()
"""No overlap: for devices that have none, and for the interpreter."""
