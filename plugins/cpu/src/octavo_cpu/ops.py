"""The index of this platform's kernels: what is registered, and with which priority."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.plugin import KernelRegistry
from octavo_cpu import native, ops_native, sampling_native
from octavo_cpu.activation import act_and_mul
from octavo_cpu.attention import PagedAttention
from octavo_cpu.attention_native import NativeAttention
from octavo_cpu.linear import Int4Linear, OneDnnLinear
from octavo_cpu.linear_native import GgufLinear, Int4GroupsLinear, Int8Linear, PlainLinear
from octavo_cpu.norm import add_rms_norm, rms_norm
from octavo_cpu.rope import qkv_norm_rope, rope, supports_qkv

PROVIDER, COMPILED = "cpu", "cpu_native"

NATIVE_OPS: dict[str, Callable[..., Any]] = {
    "rms_norm": ops_native.rms_norm,
    "act_and_mul": ops_native.act_and_mul,
    "embedding": ops_native.embedding,
    "embedding_part": ops_native.embedding_part,
    "join": ops_native.join,
    "logits": ops_native.logits,
}
NATIVE_ADDING_OPS: dict[str, Callable[..., Any]] = {
    "add_rms_norm": ops_native.add_rms_norm,
    "scaled_add": ops_native.scaled_add,
}
NATIVE_QKV_OPS: dict[str, Callable[..., Any]] = {
    "qkv_norm_rope": ops_native.qkv_norm_rope,
    "qkv_norm_rope_write": ops_native.qkv_norm_rope_write,
}
NATIVE_STEP_OPS: dict[str, Callable[..., Any]] = {
    "begin_step": sampling_native.begin_step,
    "commit_tokens": sampling_native.commit_tokens,
    "sample": sampling_native.sample,
    "greedy": sampling_native.greedy,
    "topk_topp": sampling_native.topk_topp,
    "min_p": sampling_native.min_p,
}


def register(registry: KernelRegistry) -> None:
    """Register every kernel: those of the compiled library first. Where there is none its attention and products refuse
    and say why; its small ops, which nobody asks about, are left out."""
    registry.attention(NativeAttention, priority=20)
    registry.attention(PagedAttention, priority=10)
    registry.linear(GgufLinear, priority=40)
    registry.linear(Int8Linear, priority=40)
    registry.linear(Int4GroupsLinear, priority=35)
    registry.linear(PlainLinear, priority=30)
    registry.linear(Int4Linear, priority=20)
    registry.linear(OneDnnLinear, priority=10)
    registry.op("rms_norm", rms_norm, provider=PROVIDER, priority=10)
    registry.op("add_rms_norm", add_rms_norm, provider=PROVIDER, priority=10, inplace=True)
    registry.op("rope", rope, provider=PROVIDER, priority=10)
    registry.op("qkv_norm_rope", qkv_norm_rope, provider=PROVIDER, priority=10, supports=supports_qkv)
    registry.op("act_and_mul", act_and_mul, provider=PROVIDER, priority=10)
    if native.why_not():
        return
    for name, fn in NATIVE_OPS.items():
        registry.op(name, fn, provider=COMPILED, priority=20, supports=ops_native.supports)
    for name, fn in NATIVE_ADDING_OPS.items():
        registry.op(name, fn, provider=COMPILED, priority=20, supports=ops_native.supports, inplace=True)
    for name, fn in NATIVE_QKV_OPS.items():
        registry.op(name, fn, provider=COMPILED, priority=20, supports=ops_native.supports_qkv, inplace=True)
    for name, fn in NATIVE_STEP_OPS.items():
        registry.op(name, fn, provider=COMPILED, priority=20, supports=sampling_native.supports)
