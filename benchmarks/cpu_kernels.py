"""The CPU platform's kernels against what they replace, side by side in one run: ratios above 1 mean ours is faster.

    OMP_NUM_THREADS=1 python benchmarks/cpu_kernels.py [--seconds 0.3] [--family linear|attention|ops] [--big]

Both sides of a row are called in turn and the fastest call of each counts, so that a busy machine disturbs both alike.
Prints Markdown, as kept in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from octavo.ops import activation as core_activation
from octavo.ops import norm as core_norm
from octavo.ops import rope as core_rope
from octavo.ops.attention import ReferenceAttention
from octavo.plugin import AttentionSpec, AttnBatch, AttnLayer, BatchLimits, KVView, LinearSpec
from octavo.plugin.torch import core_scheme
from octavo_cpu import activation, host, native, norm, rope
from octavo_cpu.attention import PagedAttention
from octavo_cpu.device import CpuDevice
from octavo_cpu.linear import Int4Linear, OneDnnLinear, packed, packs, plain, widened
from octavo_cpu.linear_native import GgufLinear, PlainLinear

Call = Callable[[], object]
Row = tuple[str, dict[str, Call]]

SMOLLM2 = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
BIG = ((4096, 4096), (14336, 4096))
TOKENS = (1, 2, 4, 8, 16, 64, 512)


def fastest(calls: dict[str, Call], seconds: float) -> dict[str, float]:
    """Microseconds of the fastest call of each, called in turn for `seconds`."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], (time.perf_counter() - start) * 1e6)
    return best


def table(title: str, rows: Iterator[Row], seconds: float) -> None:
    """One Markdown table; the first call of a row is what the others are compared with."""
    print(f"\n## {title}\n", flush=True)
    header: list[str] = []
    for label, calls in rows:
        best = fastest(calls, seconds)
        base = next(iter(best))
        if list(best) != header:
            header = list(best)
            print(f"\n| case | {base} us | " + " | ".join(f"{name} x" for name in header[1:]) + " |")
            print("|---" * (len(header) + 1) + "|")
        ratios = " | ".join(f"{best[base] / best[name]:.2f}" for name in header[1:])
        print(f"| {label} | {best[base]:.0f} | {ratios} |", flush=True)


def linear_rows(device: CpuDevice, shapes: tuple[tuple[int, int], ...], dtype: torch.dtype) -> Iterator[Row]:
    """F.linear against each form on its own, and against the kernel that chooses among them."""
    name = str(dtype).removeprefix("torch.")
    for n, k in shapes:
        weight = (torch.randn(n, k) / k**0.5).to(dtype)
        spec = LinearSpec(in_features=k, out_features=n, act_dtype=name, out_dtype=name)
        kernel = OneDnnLinear()
        ours = kernel.prepare({"weight": weight}, spec, device)
        forms = {"F.linear": plain(weight)}
        if packs(dtype):
            forms["packed"] = packed(weight)
        if PlainLinear.supports(spec, device):
            forms["compiled"] = PlainLinear().prepare({"weight": weight}, spec, device)
        if dtype != torch.float32:
            forms["widened"] = widened(weight)
        for tokens in TOKENS:
            if n * tokens > 1 << 23:
                continue
            x = torch.randn(tokens, k).to(dtype)
            calls: dict[str, Call] = {form: partial(multiply, x, None) for form, multiply in forms.items()}
            yield f"{n}x{k}, {tokens} tokens", {**calls, "kernel": partial(kernel.apply, x, ours, None)}


def int4_rows(device: CpuDevice, shapes: tuple[tuple[int, int], ...]) -> Iterator[Row]:
    """The unpacked bfloat16 weight in oneDNN's hands against four bits."""
    scheme = core_scheme("gguf:Q4_1")
    for n, k in shapes:
        blocks = torch.randint(0, 256, (n, k // 32, 20), dtype=torch.uint8)
        numbers = torch.tensor([0.01, -0.08], dtype=torch.float16).view(torch.uint8)
        blocks[..., :4] = numbers
        rows = {"weight": blocks.flatten(1)}
        spec = LinearSpec(in_features=k, out_features=n, act_dtype="bfloat16", out_dtype="bfloat16", scheme=scheme)
        dense, four = OneDnnLinear(), Int4Linear()
        dense_weight, four_weight = dense.prepare(rows, spec, device), four.prepare(rows, spec, device)
        for tokens in (*TOKENS[:-2], 32, 64):
            if n * tokens > 1 << 23:
                continue
            x = torch.randn(tokens, k).bfloat16()
            yield (
                f"{n}x{k}, {tokens} tokens",
                {
                    "unpacked": partial(dense.apply, x, dense_weight, None),
                    "int4 alone": partial(four_weight.few, x, None),
                    "kernel": partial(four.apply, x, four_weight, None),
                },
            )


def gguf_rows(device: CpuDevice, shapes: tuple[tuple[int, int], ...]) -> Iterator[Row]:
    """The float32 weight in torch's hands against GGUF blocks in their own bits, by the compiled library."""
    for n, k in shapes:
        weight = torch.randn(n, k) / k**0.5
        dense = {"F.linear f32": plain(weight), "packed f32": packed(weight)}
        kernels = {}
        for kind, (columns, size) in native.BLOCKS.items():
            if k % columns:
                continue
            scheme = core_scheme(f"gguf:{kind}")
            spec = LinearSpec(in_features=k, out_features=n, act_dtype="bfloat16", out_dtype="bfloat16", scheme=scheme)
            if answer := GgufLinear.supports(spec, device):
                rows = torch.zeros(n, k // columns * size, dtype=torch.uint8)
                kernels[kind] = GgufLinear().prepare({"weight": rows}, spec, device)
            else:
                print(f"{kind}: {answer.reason}")
        for tokens in TOKENS:
            if n * tokens > 1 << 23:
                continue
            x = torch.randn(tokens, k)
            calls: dict[str, Call] = {name: partial(multiply, x, None) for name, multiply in dense.items()}
            calls |= {name: partial(multiply, x.bfloat16(), None) for name, multiply in kernels.items()}
            yield f"{n}x{k}, {tokens} tokens", calls


def attention_batch(contexts: list[int], new: list[int], block_size: int) -> tuple[AttnBatch, int]:
    """A step over scattered blocks, and the number of blocks."""
    counts = np.array(new, np.int32)
    lens = np.array(contexts, np.int32) + counts
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    needed = -(-lens // block_size)
    ids = np.random.default_rng(0).permutation(int(needed.sum())).astype(np.int32) + 1
    blocks = np.zeros((len(new), int(needed.max())), np.int32)
    slots, taken = [], 0
    for i, count in enumerate(needed):
        blocks[i, :count] = ids[taken : taken + count]
        taken += int(count)
        at = np.arange(contexts[i], lens[i])
        slots.append(blocks[i, at // block_size].astype(np.int64) * block_size + at % block_size)
    batch = AttnBatch(
        num_tokens=int(starts[-1]),
        num_seqs=len(new),
        num_decodes=sum(n == 1 for n in new),
        max_q_len=max(new),
        max_kv_len=int(lens.max()),
        q_starts=torch.from_numpy(starts),
        kv_lens=torch.from_numpy(lens),
        block_table=torch.from_numpy(blocks),
        slots=torch.from_numpy(np.concatenate(slots)),
        q_starts_host=starts,
        kv_lens_host=lens,
    )
    return batch, taken + 1


def attention_rows(device: CpuDevice, dtype: torch.dtype) -> Iterator[Row]:
    """Core's reference against ours, one layer, planning left out."""
    name = str(dtype).removeprefix("torch.")
    rng = np.random.default_rng(1)
    mixed = rng.integers(32, 800, 32).tolist()
    cases = {
        "1 decode of 256": ([255], [1]),
        "1 decode of 1024": ([1023], [1]),
        "16 decodes of 256": ([255] * 16, [1] * 16),
        "32 decodes of 32-800": (mixed, [1] * 32),
        "prompt of 128": ([0], [128]),
        "prompt of 1024": ([0], [1024]),
        "256 new after 768": ([768], [256]),
    }
    for heads, kv_heads, dim in ((9, 3, 64), (32, 8, 128)):
        spec = AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            scale=dim**-0.5,
            dtype=name,
            kv_dtype=name,
            block_size=16,
        )
        limits = BatchLimits(max_num_tokens=2048, max_num_seqs=64, max_model_len=2048)
        for label, (contexts, new) in cases.items():
            batch, num_blocks = attention_batch(contexts, new, 16)
            ours, reference = PagedAttention(spec, limits, device), ReferenceAttention(spec, limits, device)
            q = torch.randn(batch.num_tokens, heads, dim).to(dtype)
            k, v = (torch.randn(batch.num_tokens, kv_heads, dim).to(dtype) for _ in range(2))
            stored = torch.randn(2, num_blocks, 16, kv_heads, dim).to(dtype)
            plain_kv = KVView(k=stored[0].transpose(1, 2).contiguous(), v=stored[1].transpose(1, 2).contiguous())
            kv = KVView(k=stored[0].transpose(1, 2), v=stored[1].transpose(1, 2))
            layer, out = AttnLayer(index=0), torch.empty_like(q)
            yield (
                f"{heads}/{kv_heads} heads of {dim}, {label}",
                {
                    "reference": partial(
                        reference.run, layer, q, k, v, plain_kv, reference.plan(batch, graph=False), out
                    ),
                    "cpu_paged": partial(ours.run, layer, q, k, v, kv, ours.plan(batch, graph=False), out),
                },
            )


def op_rows(dtype: torch.dtype) -> Iterator[Row]:
    """Core's references against ours."""
    bound = SimpleNamespace(rms_norm=core_norm.rms_norm, rope=core_rope.rope)
    for tokens in (1, 16, 512):
        x, residual = torch.randn(tokens, 576).to(dtype), torch.zeros(tokens, 576).to(dtype)
        weight, gate_up = torch.randn(576).to(dtype), torch.randn(tokens, 3072).to(dtype)
        qkv, positions = torch.randn(tokens, 960).to(dtype), torch.arange(tokens)
        table_ = torch.randn(2048, 64).to(dtype)
        rotation = (qkv, positions, table_, None, None, 1e-5, 9, 3)
        yield (
            f"rms_norm, {tokens} tokens",
            {
                "reference": partial(core_norm.rms_norm, x, weight, 1e-5),
                "cpu": partial(norm.rms_norm, x, weight, 1e-5),
            },
        )
        yield (
            f"add_rms_norm, {tokens} tokens",
            {
                "reference": partial(core_norm.add_rms_norm, bound, x, residual, weight, 1e-5),
                "cpu": partial(norm.add_rms_norm, x, residual, weight, 1e-5),
            },
        )
        yield (
            f"qkv_norm_rope, {tokens} tokens",
            {
                "reference": partial(core_rope.qkv_norm_rope, bound, *rotation),
                "cpu": partial(rope.qkv_norm_rope, *rotation),
            },
        )
        yield (
            f"act_and_mul, {tokens} tokens",
            {
                "reference": partial(core_activation.act_and_mul, gate_up, "silu"),
                "cpu": partial(activation.act_and_mul, gate_up, "silu"),
            },
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="time for one row")
    parser.add_argument("--family", choices=("linear", "attention", "ops"), help="only this one")
    parser.add_argument("--big", action="store_true", help="also layers of an 8B model")
    args = parser.parse_args()
    device = CpuDevice(num_threads=host.thread_count(None))
    device.activate()
    shapes = SMOLLM2 + (BIG if args.big else ())
    print(f"{host.cpu_name()}, {device.num_threads} threads, torch {torch.__version__}")
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            if args.family in (None, "linear"):
                table(f"Linear, {dtype}", linear_rows(device, shapes, dtype), args.seconds)
            if args.family in (None, "attention"):
                table(f"Attention, {dtype}", attention_rows(device, dtype), args.seconds)
            if args.family in (None, "ops"):
                table(f"Small ops, {dtype}", op_rows(dtype), args.seconds)
        if args.family in (None, "linear"):
            if packs(torch.bfloat16):
                table("GGUF Q4_1 with bfloat16 activations", int4_rows(device, shapes), args.seconds)
            table("GGUF blocks, compiled", gguf_rows(device, shapes), args.seconds)


if __name__ == "__main__":
    main()
