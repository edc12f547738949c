"""Core's portable Triton kernels on Intel GPUs: for the ops that have no SYCL kernel, and by name for the others.

torch's XPU build brings a Triton with Intel's backend. Sizes here are chosen by arithmetic, not measured: no GPU was at
hand. Local memory is 64 KiB a work-group on Arc and 128 KiB on Data Center GPUs; Triton's warp has 16 or 32 items.

Shapes: T tokens, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from octavo.plugin import Device, KernelRegistry, LinearSpec, Support, no
from octavo_xpu.linear import OneDnnLinear

Tensor = torch.Tensor

PROVIDER = "triton"
BACKEND = "xpu"
PRIORITY = 5
"""Behind every SYCL kernel of this plugin, before core's references."""
KIB = 1024
STAGES = 2
"""Triton's Intel compiler prefetches a tile ahead; it keeps none in local memory."""
MOST_TOKENS = 8
DTYPES = ("bfloat16", "float16")
UNITS = 32
"""Xe cores, where the device does not say: those of an Arc A770."""


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
    from octavo.triton import activation, bookkeeping, logits, norm, rope, sampling, topk_topp

    registry.attention(attention(), priority=PRIORITY)
    registry.linear(TritonLinear, priority=PRIORITY)
    ops: tuple[tuple[Any, bool], ...] = (
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
        (logits.penalties, True),
        (logits.min_p, True),
        (logits.apply_bitmask, True),
        (topk_topp.topk_topp, True),
    )
    for fn, inplace in ops:
        registry.op(fn.__name__, fn, provider=PROVIDER, priority=PRIORITY, inplace=inplace)


@dataclass(frozen=True, kw_only=True)
class ProductWeight:
    """weight [N, K]. cuts: how Triton runs it with 0, 1, 2, ... tokens."""

    weight: Tensor
    cuts: tuple[Any, ...]


class TritonLinear:
    """Triton's product of up to 8 tokens, oneDNN's for more. Asked for by name: nobody has compared them."""

    name: ClassVar[str] = PROVIDER

    @classmethod
    def supports(cls, spec: LinearSpec, device: Device) -> Support:
        if spec.act_dtype not in DTYPES:
            return no(f"multiplies {' and '.join(DTYPES)}, not {spec.act_dtype}")
        return OneDnnLinear.supports(spec, device)

    def prepare(self, weights: Mapping[str, Tensor], spec: LinearSpec, device: Device) -> ProductWeight:
        """weights: as for oneDNN."""
        units = device.describe().compute_units or UNITS
        return ProductWeight(
            weight=OneDnnLinear().prepare(weights, spec, device),
            cuts=(None, *(cut(spec, tokens, units) for tokens in range(1, MOST_TOKENS + 1))),
        )

    def apply(self, x: Tensor, w: ProductWeight, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N]."""
        from octavo.triton.gemv import gemv

        if 0 < x.shape[0] <= MOST_TOKENS:
            return gemv(x.contiguous(), w.weight, bias, config=w.cuts[x.shape[0]])
        return F.linear(x, w.weight, bias)


def cut(spec: LinearSpec, tokens: int, units: int) -> Any:
    """How a product of so many tokens is cut: all of K in one program, so that no two have to meet."""
    from octavo.triton.gemv import default_config

    config = default_config(spec.out_features, spec.in_features, tokens, num_cores=units)
    return replace(config, split_k=1, num_stages=STAGES)
