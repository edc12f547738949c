"""Which ops of the catalogue have a Triton kernel, for platforms to register all at once."""

from __future__ import annotations

from functools import partial
from typing import Any

from octavo.plugin import KernelRegistry
from octavo.triton import activation, bookkeeping, logits, norm, rope, sampling, topk_topp
from octavo.triton.overlap import IN_ORDER, Overlap

PROVIDER = "triton"

STEP: tuple[tuple[Any, bool], ...] = (
    (norm.rms_norm, False),
    (norm.add_rms_norm, True),
    (rope.rope, False),
    (rope.qkv_norm_rope, True),
    (rope.qkv_norm_rope_write, True),
    (activation.act_and_mul, False),
    (bookkeeping.begin_step, True),
    (bookkeeping.commit_tokens, True),
    (sampling.greedy, False),
    (sampling.sample, False),
)
"""(kernel, whether it works in place): what every step runs, so that each can start before the one before it ends."""

SELDOM = (logits.penalties, logits.min_p, logits.apply_bitmask, topk_topp.topk_topp)
"""What some requests ask for. All work in place."""


def register_ops(registry: KernelRegistry, *, priority: int, overlap: Overlap = IN_ORDER, fp8: bool) -> None:
    """Register the kernel of every op that has one. fp8: also the one that gives OCP's float8_e4m3fn.

    overlap: how the device starts a kernel before the one before it has ended.
    """
    step = (*STEP, (norm.add_rms_norm_fp8, True)) if fp8 else STEP
    for fn, inplace in step:
        registry.op(fn.__name__, partial(fn, overlap=overlap), provider=PROVIDER, priority=priority, inplace=inplace)
    for fn in SELDOM:
        registry.op(fn.__name__, fn, provider=PROVIDER, priority=priority, inplace=True)
