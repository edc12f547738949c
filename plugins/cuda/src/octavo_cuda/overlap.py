"""Programmatic dependent launch (compute capability 9.0 and later) for core's Triton kernels.

A kernel lets the next one start as soon as all of its own programs run; the next waits, behind its constant reads,
until this one has ended and its writes are visible (CUDA Programming Guide, "Programmatic Dependent Launch").
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.triton.overlap import IN_ORDER, Overlap

SINCE = (9, 0)


@triton.jit
def start_early():
    """Let the next kernel come, then wait for the one before."""
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_to_l2(pointers):
    """Ask for the sector at each pointer; nobody waits for the answer."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


def overlap_for(capability: tuple[int, int]) -> Overlap:
    """How kernels overlap on a card of this compute capability."""
    if capability < SINCE:
        return IN_ORDER
    return Overlap(start=start_early, fetch=fetch_to_l2, options={"launch_pdl": True})
