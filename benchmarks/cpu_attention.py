"""Attention of the CPU platform, compiled and by torch, beside torch's own operator over plain keys and values.

    python benchmarks/cpu_attention.py [--seconds 1] [--dtype bfloat16] [--kv-dtype int8] [--case NAME ...]

Ratios above 1 mean that the compiled kernel is faster. The sides take turns, and layers with caches of their own take
turns, so that a step finds no more in the processor's caches than in serving. Medians. GB/s counts keys and values
once; GFLOP/s counts the pairs that causality leaves. Prints Markdown, as kept in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from octavo.ops.attention import narrowed
from octavo.plugin import AttentionSpec, AttnBatch, AttnLayer, BatchLimits, KVPlan, KVView
from octavo.runner.kvcache import allocate
from octavo.testing.conformance.paged import kv_spec_of, leading_decodes
from octavo_cpu import host, native
from octavo_cpu.attention import PagedAttention
from octavo_cpu.attention_native import NativeAttention
from octavo_cpu.device import CpuDevice

MODELS = {"SmolLM2-135M": (9, 3, 64), "Llama-1B": (32, 8, 64), "8B": (32, 8, 128)}
"""(query heads, kv heads, head_dim)."""

ROTATED_BYTES = 256 << 20

Lens = Sequence[tuple[int, int]]
"""(context after the step, new tokens) of each sequence."""

CASES: dict[str, Lens] = {
    "decode 1 x 512": [(512, 1)],
    "decode 1 x 8192": [(8192, 1)],
    "decode 64 x 512": [(512, 1)] * 64,
    "decode 64, 64 to 1024": [(64 + 15 * i, 1) for i in range(64)],
    "decode 64, 32 to 768": [(32 + 736 * i // 63, 1) for i in range(64)],
    "prefill 128": [(128, 128)],
    "prefill 512": [(512, 512)],
    "prefill 2048": [(2048, 2048)],
    "chunk of 512 at 4096": [(4096, 512)],
    "mixed: 32 x 512 decodes, 2 x 256 prompts": [*[(512, 1)] * 32, (256, 256), (256, 256)],
}


class Step:
    """One step over several layers' caches, blocks scattered."""

    def __init__(self, spec: AttentionSpec, lens: Lens, device: CpuDevice) -> None:
        rng, size, dtype = np.random.default_rng(0), spec.block_size, getattr(torch, spec.dtype)
        self.spec, self.lens = spec, lens
        kv_lens, new = (np.array(x, np.int32) for x in zip(*lens, strict=True))
        starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        counts = -(-kv_lens // size)
        ids = rng.permutation(int(counts.sum())).astype(np.int32) + 1
        table = np.zeros((len(lens), int(counts.max())), np.int32)
        for row, count, end in zip(table, counts, np.cumsum(counts), strict=True):
            row[:count] = ids[end - count : end]
        positions = [np.arange(n - t, n) for n, t in lens]
        slots = np.concatenate([row[p // size] * size + p % size for row, p in zip(table, positions, strict=True)])
        self.batch = AttnBatch(
            num_tokens=int(starts[-1]),
            num_seqs=len(lens),
            num_decodes=leading_decodes([(0, int(t)) for t in new]),
            max_q_len=int(new.max()),
            max_kv_len=int(kv_lens.max()),
            q_starts=torch.from_numpy(starts),
            kv_lens=torch.from_numpy(kv_lens),
            block_table=torch.from_numpy(table),
            slots=torch.from_numpy(slots.astype(np.int64)),
            q_starts_host=starts,
            kv_lens_host=kv_lens,
        )
        self.layers = int(np.clip(-(-ROTATED_BYTES // self.bytes), 1, 64))
        self.plan = KVPlan(spec=kv_spec_of(spec), num_layers=self.layers, num_blocks=1 + int(counts.sum()))
        self.device = device
        self.q, self.k, self.v = (
            torch.randn(int(starts[-1]), heads, spec.head_dim).to(dtype)
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        self.out = torch.empty_like(self.q)

    @property
    def bytes(self) -> int:
        """Of the keys and values that one layer has to read."""
        size: int = getattr(torch, self.spec.kv_dtype).itemsize
        return 2 * self.spec.num_kv_heads * kv_spec_of(self.spec).content * size * sum(n for n, _ in self.lens)

    @property
    def flops(self) -> int:
        pairs = sum(t * n - t * (t - 1) // 2 for n, t in self.lens)
        return 4 * self.spec.num_heads * self.spec.head_dim * pairs

    def caches(self, backend: type[NativeAttention] | type[PagedAttention]) -> list[KVView]:
        views = allocate(self.plan, backend.kv_layout(self.plan.spec), self.device)
        for view in views:
            for cache in (view.k, view.v):
                cache.copy_(narrowed(torch.randn(*cache.shape[:3], self.spec.head_dim), cache.dtype))
        return views

    def paged(self, backend: type[NativeAttention] | type[PagedAttention]) -> Callable[[int], object]:
        """A layer's attention, new keys and values written by it."""
        limits = BatchLimits(max_num_tokens=4096, max_num_seqs=64, max_model_len=16384)
        instance, caches = backend(self.spec, limits, self.device), self.caches(backend)
        plan = instance.plan(self.batch, graph=False)
        layers = [AttnLayer(index=i) for i in range(self.layers)]
        return lambda i: instance.run(layers[i], self.q, self.k, self.v, caches[i], plan, self.out)

    def sdpa(self) -> Callable[[int], object] | None:
        """torch's operator over contiguous keys and values [S, Hkv, L, D], if all sequences are alike."""
        spec, (length, new) = self.spec, self.lens[0]
        if len(set(self.lens)) > 1 or spec.kv_dtype != spec.dtype or new not in (1, length):
            return None
        seqs, heads, group = len(self.lens), spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
        shape = (seqs, heads, length, spec.head_dim)
        kv = [[torch.randn(shape).to(self.q.dtype) for _ in range(2)] for _ in range(self.layers)]
        if new == 1:
            q = self.q.view(seqs, heads, group, spec.head_dim)
            return lambda i: F.scaled_dot_product_attention(q, *kv[i], scale=spec.scale)
        q = self.q.view(seqs, length, spec.num_heads, spec.head_dim).transpose(1, 2)
        return lambda i: F.scaled_dot_product_attention(q, *kv[i], is_causal=True, scale=spec.scale, enable_gqa=True)

    def calls(self) -> dict[str, Callable[[int], object]]:
        calls = {"cpu_native": self.paged(NativeAttention)}
        if PagedAttention.supports(self.spec, self.device):
            calls["cpu_paged"] = self.paged(PagedAttention)
        if (sdpa := self.sdpa()) is not None:
            calls["sdpa"] = sdpa
        return calls


def medians(calls: dict[str, Callable[[int], object]], layers: int, seconds: float) -> dict[str, float]:
    """Microseconds of a layer, layers and sides in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(0)
    end, layer = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or len(times["cpu_native"]) < 3:
        layer = (layer + 1) % layers
        for name, call in calls.items():
            start = time.perf_counter()
            call(layer)
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="time for one row")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-dtype", help="the same as --dtype by default")
    parser.add_argument("--case", nargs="*", choices=list(CASES), help="only these")
    parser.add_argument("--model", nargs="*", choices=list(MODELS), default=["SmolLM2-135M"])
    args = parser.parse_args()
    device = CpuDevice(num_threads=host.thread_count(None))
    device.activate()
    isa = native.load().octavo_isa().decode()
    print(f"{host.cpu_name()}, {device.num_threads} threads, {isa}, torch {torch.__version__}, {args.dtype}\n")
    print("| model | step | cpu_native us | GB/s | GFLOP/s | plan us | against cpu_paged | against sdpa |")
    print("|---" * 8 + "|")
    with torch.inference_mode():
        for model in args.model:
            num_heads, num_kv_heads, dim = MODELS[model]
            spec = AttentionSpec(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=dim,
                scale=dim**-0.5,
                dtype=args.dtype,
                kv_dtype=args.kv_dtype or args.dtype,
                block_size=16,
            )
            for name in args.case or CASES:
                step = Step(spec, CASES[name], device)
                found = medians(step.calls(), step.layers, args.seconds)
                backend = NativeAttention(spec, BatchLimits(max_num_tokens=1, max_num_seqs=1, max_model_len=1), device)
                plan = partial(backend.plan, step.batch, graph=True)
                planning = medians({"cpu_native": lambda _, plan=plan: plan()}, 1, 0.02)["cpu_native"]
                ours = found["cpu_native"]
                cells = [model, name, f"{ours:.0f}", f"{step.bytes / ours / 1e3:.1f}", f"{step.flops / ours / 1e3:.0f}"]
                cells += [f"{planning:.1f}"]
                cells += [f"{found[side] / ours:.2f}" if side in found else "" for side in ("cpu_paged", "sdpa")]
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
