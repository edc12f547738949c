"""Compile every launch of the op kernels for chips that are not here. Run as a script, without the interpreter.

A launch is caught where Triton would start it: its arguments give the signature, so that what is compiled is what the
functions of octavo.triton launch. Prints one line a failure; exits with their number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import octavo.ops  # noqa: F401  (fills the catalogue)
from octavo.ops.catalogue import CATALOGUE
from octavo.triton import activation, bookkeeping, gemv, int4, logits, norm, quantize, rope, sampling, skinny, topk_topp

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
NATIVE_FP8 = {"sm_90", "sm_100", "gfx942"}
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}
Launch = tuple[Any, ASTSource, dict[str, Any]]


def describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def catch_launches(into: list[Launch]) -> None:
    """From now on, a kernel's launch is only written down."""

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        options = {n: values.pop(n) for n in kwargs if n not in kernel.arg_names}
        constant = {p.name for p in kernel.params if p.is_constexpr or values[p.name] is None}
        signature = {n: "constexpr" if n in constant else describe(values[n]) for n in kernel.arg_names}
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(kernel.arg_names)
            if n not in constant and (signature[n][0] == "*" or (signature[n] == "i32" and values[n] % 16 == 0))
        }
        constants = {n: values[n] for n in constant}
        into.append((kernel, ASTSource(kernel, signature, constants, aligned), options))

    triton.JITFunction.run = run


def cases() -> Iterator[tuple[str, bool, Callable[[], Any]]]:
    """(name, whether it needs a chip with fp8 conversions, the call)."""
    dtype = torch.bfloat16
    x, weight, wide = torch.zeros(4, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype), torch.zeros(4096)
    for w in (weight, wide):
        yield "rms_norm", False, lambda w=w: norm.rms_norm(x, w, 1e-6)
        yield "add_rms_norm", False, lambda w=w: norm.add_rms_norm(x, x.clone(), w, 1e-6)
    yield (
        "rms_norm of heads",
        False,
        lambda: norm.rms_norm(torch.zeros(4, 8, 128, dtype=dtype)[:, 2:], weight[:128], 1e-6),
    )
    for kind in ("silu", "gelu", "gelu_tanh"):
        yield f"act_and_mul {kind}", False, lambda kind=kind: activation.act_and_mul(x, kind)
        yield f"act_and_mul_fp8 {kind}", True, lambda kind=kind: activation.act_and_mul_fp8(x, kind)
    yield "add_rms_norm_fp8", True, lambda: norm.add_rms_norm_fp8(x, x.clone(), weight, 1e-6)
    yield "quantize_fp8", True, lambda: quantize.quantize_fp8(x)
    yield "quantize_fp8 of a wide row", True, lambda: quantize.quantize_fp8(torch.zeros(4, 14336, dtype=dtype))

    positions = torch.zeros(4, dtype=torch.int64)
    heads = torch.zeros(4, 12, 128, dtype=dtype)
    for rotated in (128, 64):
        table = torch.zeros(32, rotated, dtype=dtype)
        yield "rope", False, lambda t=table: rope.rope(heads[:, :8], heads[:, 8:10], positions, t)
        for rows in (None, 1, 8):
            q, k = (None, None) if rows is None else (torch.zeros(128 * n, dtype=dtype) for n in (rows, min(rows, 2)))
            yield (
                f"qkv_norm_rope norm {rows}",
                False,
                lambda t=table, q=q, k=k: rope.qkv_norm_rope(heads.flatten(1), positions, t, q, k, 1e-6, 8, 2),
            )
            for kind in (dtype, torch.float8_e4m3fn):
                cache = torch.zeros(2, 2, 16, 128, dtype=kind)
                rest = (1e-6, 8, 2, cache, cache, positions, *(() if kind is dtype else (weight.float(), 1.0)))
                yield (
                    f"qkv_norm_rope_write norm {rows} {kind}",
                    kind is not dtype,
                    lambda t=table, q=q, k=k, rest=rest: rope.qkv_norm_rope_write(
                        heads.flatten(1), positions, t, q, k, *rest
                    ),
                )
    yield (
        "qkv_norm_rope unrotated",
        False,
        lambda: rope.qkv_norm_rope(heads.flatten(1), positions, None, weight[:128], weight[:128], 1e-6, 8, 2),
    )

    vocab = 128256
    for rows in (4, 2000):  # split rows, and one program a row
        values, ones = torch.empty(1, vocab).expand(rows, vocab), torch.ones(rows)
        ints = torch.zeros(rows, dtype=torch.int64)
        yield "greedy", False, lambda v=values: sampling.greedy(v)
        yield "sample", False, lambda v=values, o=ones, i=ints: sampling.sample(v, o, i, i)
        narrow = torch.empty(1, vocab, dtype=dtype).expand(rows, vocab)
        yield "sample of a table", False, lambda v=narrow, o=ones, i=ints: sampling.sample(v, o, i, i, i)
    ones, ints, values = torch.ones(4), torch.zeros(4, dtype=torch.int64), torch.zeros(4, 1000)
    counts, prompt = torch.zeros(4, 1000, dtype=torch.int32), torch.zeros(4, 1000, dtype=torch.bool)
    yield "penalties", False, lambda: logits.penalties(values, counts, prompt, ones, ones, ones)
    yield "apply_bitmask", False, lambda: logits.apply_bitmask(values, counts)
    yield "apply_bitmask of rows", False, lambda: logits.apply_bitmask(values, counts, ints)
    yield "min_p", False, lambda: logits.min_p(values, ones)
    yield "topk_topp", False, lambda: topk_topp.topk_topp(values, ints, ones)
    for op in ("begin_step", "commit_tokens"):
        for number, sample in enumerate(CATALOGUE[op].samples("bfloat16")):
            yield f"{op} {number}", False, lambda op=op, sample=sample: getattr(bookkeeping, op)(*sample)

    for rows, kind, split_k in ((1, torch.float16, 1), (1, torch.bfloat16, 4), (4, torch.bfloat16, 4)):
        config = gemv.GemvConfig(block_n=16, block_k=128, split_k=split_k, dot=rows > 1)
        a, bias = torch.zeros(rows, 1024, dtype=kind), torch.zeros(512, dtype=kind) if split_k > 1 else None
        scale = torch.zeros(512)
        codes = torch.zeros(512, 1024, dtype=torch.uint8)
        name = f"M={rows} {kind} split {split_k}"
        yield (
            f"gemv {name}",
            False,
            lambda a=a, b=bias, c=config: gemv.gemv(a, torch.zeros(512, 1024, dtype=a.dtype), b, config=c),
        )
        yield (
            f"gemv_fp8 {name}",
            True,
            lambda a=a, w=codes, s=scale, b=bias, c=config: gemv.gemv_fp8(
                a, w.view(torch.float8_e4m3fn), s, b, config=c
            ),
        )
    many = torch.zeros(40, 1024, dtype=dtype)
    yield "skinny fp8", True, lambda: skinny.skinny(many, codes.view(torch.float8_e4m3fn), scale=scale, gate="silu")
    nibbles, groups = torch.zeros(512, 1100 // 32 * 32, dtype=torch.uint8), torch.zeros(512, 1100 // 32)
    weight4 = int4.pack(nibbles, groups, groups)
    for rows, gate in ((1, None), (40, "silu")):
        a = torch.zeros(rows, weight4.num_in, dtype=dtype)
        yield f"int4 M={rows} {gate}", False, lambda a=a, g=gate: int4.product(a, weight4, gate=g)
    yield "int4 unpacked", False, lambda: int4.unpack(weight4, dtype)


def main() -> int:
    launches: list[Launch] = []
    catch_launches(launches)
    failures = compiled = 0
    chosen = sys.argv[1:] or list(TARGETS)
    for name, needs_fp8, call in cases():
        launches.clear()
        call()
        assert launches, f"{name} launches nothing"
        for kernel, source, options in launches:
            for target in chosen:
                if needs_fp8 and target not in NATIVE_FP8:
                    continue
                compiled += 1
                try:
                    triton.compile(source, target=TARGETS[target], options=options)
                except Exception as error:
                    failures += 1
                    print(f"{name}: {kernel.__name__} for {target}: {type(error).__name__}: {error}")
    print(f"{compiled} compiled, {failures} failed")
    return failures


if __name__ == "__main__":
    sys.exit(min(main(), 100))
