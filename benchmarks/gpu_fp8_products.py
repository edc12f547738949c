"""Products of 9 to 128 tokens in fp8 on a card: core's stream-K kernel in several cuts, against torch's product.

    PYTHONPATH=core/src:plugins/cuda/src python benchmarks/gpu_fp8_products.py [--tokens 16 64] [--seconds 150]

Each side is a chain of pairs, `add_rms_norm_fp8` and a product, over copies of the weight that do not fit the cache, in
one CUDA graph. The gate of gate_up is inside the stream-K kernel and not in torch's time. A cut whose result is wrong
is named, not timed. Kernels are compiled in threads before anything is timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
import torch.nn.functional as F
import triton

from octavo.plugin.torch import quantize_rows
from octavo.triton.gemv import make_counters
from octavo.triton.norm import add_rms_norm_fp8
from octavo.triton.overlap import Overlap
from octavo.triton.skinny import SkinnyConfig, skinny
from octavo_cuda.overlap import overlap_for

SHAPES = (
    ("down", 4096, 14336, None),
    ("gate_up", 28672, 4096, "silu"),
    ("qkv", 6144, 4096, None),
    ("o", 4096, 4096, None),
)
"""Llama-8B's: name, outputs, inputs, gate."""
CUTS = tuple(
    SkinnyConfig(block_n=block_n, block_k=block_k, programs=programs, num_warps=warps, num_stages=stages)
    for block_n, block_k, programs, warps, stages in (
        (64, 256, 132, 4, 4),
        (64, 256, 264, 4, 4),
        (64, 128, 264, 4, 6),
        (64, 128, 264, 4, 8),
        (128, 128, 132, 4, 6),
        (128, 128, 264, 8, 5),
        (128, 128, 132, 8, 8),
        (128, 256, 132, 8, 4),
        (128, 256, 264, 4, 3),
    )
)
CACHE_BYTES = 256 << 20
ALLOWED = 2e-2
"""Of the largest result, against float32 on the same fp8 numbers."""


def recorded_us(call: Callable[[], object], repeats: int = 20) -> float:
    """Microseconds of a call in a CUDA graph; the best of three series."""
    stream, best = torch.cuda.Stream(), float("inf")
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        for _ in range(3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            for _ in range(repeats):
                graph.replay()
            end.record(stream)
            torch.cuda.synchronize()
            best = min(best, begin.elapsed_time(end) / repeats * 1e3)
    return best


def measure(shape: tuple[str, int, int, str | None], tokens: int, pool: ThreadPoolExecutor) -> str:
    """One line: torch's time, then the cuts from the best on."""
    name, num_out, num_in, gate = shape
    overlap = overlap_for(torch.cuda.get_device_capability())
    x, residual = torch.randn(2, tokens, num_in, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(num_in, device="cuda", dtype=torch.bfloat16)
    rows, row_scale = quantize_rows(x)
    weight, scale = quantize_rows(torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16))
    exact = (rows.float() * row_scale) @ (weight.float() * scale).T
    if gate is not None:
        exact = F.silu(exact[:, : num_out // 2]) * exact[:, num_out // 2 :]
    copies = [weight.clone() for _ in range(max(2, CACHE_BYTES // weight.numel()))]
    counters = make_counters(num_out, weight.device)

    def run(cut: SkinnyConfig, w: torch.Tensor, how: Overlap = overlap) -> torch.Tensor:
        return skinny(
            rows,
            w,
            scale=scale[:, 0],
            x_scale=row_scale,
            out_dtype=torch.bfloat16,
            gate=gate,
            config=cut,
            counters=counters,
            overlap=how,
        )

    def theirs() -> None:
        for w in copies:
            values, s, _ = add_rms_norm_fp8(x, residual, norm, 1e-6, overlap=overlap)
            torch._scaled_mm(values, w.T, scale_a=s, scale_b=scale.T, out_dtype=torch.bfloat16, use_fast_accum=True)

    def ours(cut: SkinnyConfig) -> None:
        for w in copies:
            add_rms_norm_fp8(x, residual, norm, 1e-6, overlap=overlap)
            run(cut, w)

    list(pool.map(lambda cut: run(cut, weight, replace(overlap, compile_only=True)), CUTS))
    times = []
    for cut in CUTS:
        try:
            error = ((run(cut, weight).float() - exact).abs().max() / exact.abs().max()).item()
        except triton.runtime.errors.OutOfResources:
            continue
        if error > ALLOWED:
            print(f"{name}, {tokens} tokens: {cut} is wrong by {error:.3f}")
            continue
        times.append((recorded_us(lambda cut=cut: ours(cut)) / len(copies), cut))
    times.sort(key=lambda pair: pair[0])
    best = ", ".join(f"{t:.1f} ({c.block_n}x{c.block_k}, {c.programs} x {c.num_warps} warps)" for t, c in times[:3])
    rate = num_out * num_in / times[0][0] / 1e6
    return f"{name:8} {tokens:4} tokens: torch {recorded_us(theirs) / len(copies):6.1f} us; {best}; {rate:.2f} TB/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 16, 32, 128])
    parser.add_argument("--seconds", type=float, default=150.0, help="start no further product after that")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a card")
    began = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    with ThreadPoolExecutor(14, initializer=torch.cuda.set_device, initargs=(0,)) as pool:
        for tokens in args.tokens:
            for shape in SHAPES:
                if time.monotonic() - began > args.seconds:
                    sys.exit("out of time: the rest is left out")
                print(measure(shape, tokens, pool), flush=True)


if __name__ == "__main__":
    main()
