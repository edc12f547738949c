"""Compiles the attention kernels for one GPU without having it, and prints what came out. A process of its own, as the
tests' process interprets Triton.

    python compile_attention.py sm_90 float16 ...     -> one JSON line for each kernel
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.plugin import AttentionSpec, AttnBatch, BatchLimits, DeviceDesc, MemInfo
from octavo.plugin.torch import TorchDevice
from octavo.triton.attention_backend import TritonAttention
from octavo.triton.attention_decode import deal_kernel, decode_kernel
from octavo.triton.attention_prefill import prefill_kernel
from octavo.triton.attention_tuning import AttentionTuning
from octavo.triton.attention_write import kv_write_kernel, largest
from octavo.triton.overlap import IN_ORDER, Overlap

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), AttentionTuning()),
    "sm_90": (GPUTarget("cuda", 90, 32), AttentionTuning(decode_fence=False)),
    "sm_100": (GPUTarget("cuda", 100, 32), AttentionTuning(decode_fence=False)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), AttentionTuning(shared_memory=48 * 1024)),
}
MATRIX_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma", "v_mfma")
SHORT_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8e4nv"}
PLAIN = AttentionSpec(
    num_heads=32, num_kv_heads=8, head_dim=128, scale=0.1, dtype="bfloat16", kv_dtype="bfloat16", block_size=16
)
VARIANTS = {
    "plain": PLAIN,
    "all": replace(PLAIN, window=128, softcap=30.0, sinks=True, dtype="float16", kv_dtype="float16", head_dim=64),
    "wide": replace(PLAIN, num_kv_heads=4, head_dim=256),
    "float32": replace(PLAIN, dtype="float32", kv_dtype="float32"),
    "narrow": replace(PLAIN, kv_dtype="float8_e4m3fn"),
}


class Device(TorchDevice):
    """As many compute units as a large GPU has, and no memory to ask for."""

    def __init__(self) -> None:
        super().__init__("cpu", memory=lambda: MemInfo(total=0, free=0))

    def describe(self) -> DeviceDesc:
        return DeviceDesc(name="absent", compute_units=132)


def main(target_name: str, variant: str, overlap: Overlap = IN_ORDER) -> None:
    target, tuning = TARGETS[target_name]
    spec = VARIANTS[variant]
    limits = BatchLimits(max_num_tokens=8192, max_num_seqs=256, max_model_len=8192)
    backend = TritonAttention.with_tuning(tuning, overlap)(spec, limits, Device())
    plan = backend.plan(mixed_batch(), graph=True)
    narrow = SHORT_NAMES[spec.kv_dtype]
    wide = SHORT_NAMES[spec.dtype]
    types = dict.fromkeys(("q", "k", "v", "out"), f"*{wide}")
    types |= {"k_cache": f"*{narrow}", "v_cache": f"*{narrow}", "sums": "*fp32", "tops": "*fp32", "slots": "*i64"}
    types |= dict.fromkeys(("block_table", "q_starts", "kv_lens", "arrivals", "fences", "served", "shares"), "*i32")
    types |= {"scale": "fp32", "sinks": "*fp32", "k_scales": "*fp32", "v_scales": "*fp32"}
    absent: dict[str, Any] = {} if spec.sinks else {"sinks": None}
    absent |= {} if spec.kv_dtype != spec.dtype else {"k_scales": None, "v_scales": None}
    write = {"LIMIT": largest(getattr(torch, spec.kv_dtype)), "HKV": spec.num_kv_heads, "BLOCK_H": spec.num_kv_heads}
    write |= {"D": spec.head_dim, "N": spec.block_size, "START": overlap.start, **overlap.options}
    write |= {"k_scales": None, "v_scales": None}
    for kernel, constants in (
        (deal_kernel, dict(plan.deal)),
        (decode_kernel, {**plan.decode, **absent}),
        (prefill_kernel, {**plan.prefill, **absent}),
        (kv_write_kernel, write),
    ):
        options = {name: constants.pop(name) for name in list(constants) if name not in kernel.arg_names}
        signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
        # What the launcher would find of the arguments: pointers and strides that sixteen divides.
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, (name, kind) in enumerate(signature.items())
            if kind.startswith("*") or "stride_" in name.removeprefix("table_")
        }
        source = ASTSource(kernel, signature, constants, aligned)
        built = triton.compile(source, target=target, options=options)
        text = str(built.asm.get("ptx") or built.asm.get("amdgcn"))
        found = [name for name in MATRIX_INSTRUCTIONS if name in text]
        binary = len(built.asm.get("cubin") or built.asm.get("hsaco") or b"")
        line = {"kernel": kernel.__name__, "shared": built.metadata.shared, "matrix": found, "binary": binary}
        print(json.dumps(line), flush=True)


def mixed_batch() -> AttnBatch:
    none = torch.zeros(65, dtype=torch.int32)
    host = np.zeros(65, np.int32)
    return AttnBatch(
        num_tokens=8192,
        num_seqs=64,
        num_decodes=0,
        max_q_len=8192,
        max_kv_len=8192,
        q_starts=none,
        kv_lens=none,
        block_table=none.view(65, 1),
        slots=none.long(),
        q_starts_host=host,
        kv_lens_host=host,
    )


if __name__ == "__main__":
    for name in sys.argv[2:]:
        main(sys.argv[1], name)
