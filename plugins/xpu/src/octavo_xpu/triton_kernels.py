"""Core's portable Triton kernels on Intel GPUs: for the ops that have no SYCL kernel, and by name for the others.

torch's XPU build brings a Triton with Intel's backend. Sizes here are chosen by arithmetic, not measured: no GPU was at
hand. Local memory is 64 KiB a work-group on Arc and 128 KiB on Data Center GPUs; Triton's warp has 16 or 32 items.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.plugin import Device, KernelRegistry, LinearSpec
from octavo.triton import linear_plain
from octavo_xpu import linear

BACKEND = "xpu"
PRIORITY = 5
"""Behind every SYCL kernel of this plugin, before core's references."""
KIB = 1024
STAGES = 2
"""Triton's Intel compiler prefetches a tile ahead; it keeps none in local memory."""
MOST_TOKENS = 8


def objection() -> str:
    """Why Triton compiles nothing for this process's GPU; empty if it does."""
    try:
        import triton

        target = triton.runtime.driver.active.get_current_target()
    except Exception as error:  # whatever a driver raises: the SYCL kernels do without it
        return f"Triton is of no use here: {type(error).__name__}: {error}"
    if target.backend != BACKEND:
        return f"Triton {triton.__version__} compiles for {target.backend}, not for {BACKEND}"
    return ""


def attention() -> type[Any]:
    """Core's Triton attention in sizes for Intel GPUs."""
    from octavo.triton.attention_backend import TritonAttention
    from octavo.triton.attention_tuning import AttentionTuning, DecodeCut

    tuning = AttentionTuning(
        shared_memory=48 * KIB,  # of 64: what work-items exchange takes the rest
        decode_rows=16,
        decode=DecodeCut(block=32, warps=4, stages=STAGES, programs_per_unit=4),
        decode_few=((16, DecodeCut(block=32, warps=4, stages=STAGES, programs_per_unit=2, min_tiles=1)),),
        prefill_rows=64,
        prefill_block=32,
        prefill_warps=8,
        prefill_stages=STAGES,
    )
    return TritonAttention.with_tuning(tuning)


def register(registry: KernelRegistry) -> None:
    """Register them behind the kernels of this plugin."""
    from octavo.triton.ops import register_ops

    registry.attention(attention(), priority=PRIORITY)
    registry.linear(TritonLinear, priority=PRIORITY)
    register_ops(registry, priority=PRIORITY, fp8=False)


class TritonLinear(linear_plain.TritonLinear):
    """Triton's product of up to 8 tokens, oneDNN's for more. Asked for by name: nobody has compared them."""

    @classmethod
    def refusal(cls, spec: LinearSpec, device: Device) -> str:
        return linear.refusal(spec, device) or linear_plain.few_tokens_refusal(spec)

    @classmethod
    def cuts(cls, spec: LinearSpec, device: Device) -> tuple[Any, ...]:
        units = max(device.describe().compute_units, 1)
        return tuple(cut(spec, tokens, units) for tokens in range(MOST_TOKENS + 1))


def cut(spec: LinearSpec, tokens: int, units: int) -> Any:
    """How a product of so many tokens is cut: all of K in one program, so that no two have to meet. None: it is not."""
    from octavo.triton.gemv import default_config

    if not 0 < tokens <= MOST_TOKENS:
        return None
    config = default_config(spec.out_features, spec.in_features, tokens, num_cores=units)
    return replace(config, split_k=1, num_stages=STAGES)
