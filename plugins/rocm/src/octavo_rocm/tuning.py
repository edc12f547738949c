"""The sizes that core's Triton kernels run with, by target. Chosen by arithmetic, not measured: no card was at hand.

Triton's AMD compiler keeps num_stages - 1 tiles of a loop in shared memory (LDS), of which a workgroup has 64 KiB but
on CDNA4; every entry is compiled in tests/test_rocm_compiled.py and must fit. A wave of CDNA has twice the threads of
one of RDNA, so half as many do the same work.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import triton
import triton.language as tl

from octavo.plugin import Device
from octavo.triton import gemv, int4, skinny
from octavo.triton.attention_tuning import AttentionTuning, DecodeCut
from octavo.triton.linear_tuning import ProductTuning
from octavo.triton.overlap import Overlap
from octavo_rocm.device import target_for
from octavo_rocm.targets import TARGETS

STAGES = 2
"""One tile on its way while one is multiplied; more would only take LDS from other workgroups."""

LEAST_BLOCK = 16
"""Rows of W that a matrix unit takes."""

Config = TypeVar("Config", gemv.GemvConfig, int4.Int4Config)

KIB = 1024
CDNA = AttentionTuning(
    shared_memory=48 * KIB,  # of 64: queries and what is exchanged between lanes take the rest
    decode_rows=16,
    decode=DecodeCut(block=64, warps=2, stages=STAGES, programs_per_unit=4),
    decode_few=((16, DecodeCut(block=64, warps=4, stages=STAGES, programs_per_unit=2, min_tiles=1)),),
    prefill_rows=128,
    prefill_block=64,
    prefill_warps=4,
    prefill_stages=STAGES,
)
# A lane has 256 registers, half of CDNA's: with 4 waves, or larger tiles of wide heads, they would spill.
RDNA = replace(
    CDNA,
    shared_memory=16 * KIB,
    decode=DecodeCut(block=32, warps=8, stages=STAGES, programs_per_unit=2),
    decode_few=((16, DecodeCut(block=32, warps=8, stages=STAGES, programs_per_unit=2, min_tiles=1)),),
    prefill_rows=64,
    prefill_block=32,
    prefill_warps=8,
)
ATTENTION: Mapping[str, AttentionTuning] = {
    "gfx90a": CDNA,
    "gfx942": CDNA,
    "gfx950": replace(CDNA, shared_memory=128 * KIB),
    "gfx1100": RDNA,
    "gfx1201": RDNA,
}


@dataclass(frozen=True, kw_only=True)
class Tuning(ProductTuning):
    """For one card. overlap carries the target's launch options of kernels with products. skinny_tokens: a guess of
    where hipBLASLt, which gives all of K to one program, catches up."""

    attention: AttentionTuning = AttentionTuning()
    skinny_tokens: int = 64

    def gemv(self, num_out: int, num_in: int, tokens: int) -> gemv.GemvConfig:
        return for_waves(super().gemv(num_out, num_in, tokens))

    def int4(self, num_out: int, num_in: int, tokens: int) -> int4.Int4Config:
        return for_waves(super().int4(num_out, num_in, tokens))

    def skinny(self, num_out: int, num_in: int, tokens: int, *, itemsize: int) -> skinny.SkinnyConfig:
        return replace(super().skinny(num_out, num_in, tokens, itemsize=itemsize), num_stages=STAGES)


def for_waves(config: Config) -> Config:
    """The cut with as many stages as fit, and a wave for each 16 rows of W where the matrix unit multiplies."""
    num_warps = max(1, config.block_n // LEAST_BLOCK) if config.dot else config.num_warps
    return replace(config, num_warps=num_warps, num_stages=STAGES)


@triton.jit
def wait_for_stores():
    """Until the chip's memory has what this wave stored; CDNA's instructions."""
    tl.inline_asm_elementwise(
        "s_waitcnt vmcnt(0)", "=v,v,~{memory}", [tl.arange(0, 64)], dtype=tl.int32, is_pure=False, pack=1
    )


def tuning_for(device: Device) -> Tuning:
    """Of the device's target; the kernels' defaults where they are interpreted."""
    target = target_for(device)
    if target is None:
        return Tuning()
    units = max(device.describe().compute_units, 1)
    overlap = Overlap(options=target.launch)
    # CDNA's barrier is compiled without a wait for the stores of other waves. The interpreter stores at once.
    if not target.barrier_waits and not gemv.INTERPRETED:
        overlap = replace(overlap, publish=wait_for_stores)
    return Tuning(attention=ATTENTION[target.name], overlap=overlap, units=units)


assert ATTENTION.keys() == TARGETS.keys(), "every target has its sizes"
