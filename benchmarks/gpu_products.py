"""Products of few tokens on a card, as a step runs them: each behind an add_rms_norm, weights not in the cache.

    PYTHONPATH=core/src:plugins/cuda/src python benchmarks/gpu_products.py [--only gate_up] [--seconds 150]

Both sides are pairs of add_rms_norm and a product in one CUDA graph: torch's product (and act_and_mul where it is
gated), against Triton's with early starts. Every kernel is checked against float32 first; a wrong one is not timed.
Kernels are compiled in processes of their own before anything is timed. Ends with the table of
`octavo_cuda/tuning_products.py`; with OUT in the environment, writes all that it prints to $OUT/gpu_products.txt.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton

from octavo.ops.activation import ACTIVATIONS
from octavo.triton.activation import act_and_mul
from octavo.triton.gemv import GemvConfig, gemv, make_counters
from octavo.triton.norm import add_rms_norm
from octavo.triton.overlap import IN_ORDER, Overlap
from octavo.triton.skinny import SkinnyConfig, padded_rows, skinny
from octavo_cuda.overlap import overlap_for
from octavo_cuda.tuning_products import H200

Tensor = torch.Tensor
Config = GemvConfig | SkinnyConfig
Call = Callable[[], object]

DEVICE = torch.device("cuda")
CORES = 132
SHARED_MEMORY = 224 * 1024
CACHE_BYTES = 256 << 20
TOKENS = (16, 32, 64, 128, 1, 2, 4, 8)  # 16 before 8: the best cuts of 16 tokens are those worth trying with fewer
ALLOWED = 1e-2
WORTH = 1.02
"""The least gain for which a product is Triton's."""


@dataclass(frozen=True)
class Shape:
    """A layer's product. gate: the kind of its activation, or None."""

    name: str
    num_out: int
    num_in: int
    gate: str | None = None


SHAPES = (
    Shape("gate_up", 28672, 4096, "silu"),
    Shape("qkv", 6144, 4096),
    Shape("o", 4096, 4096),
    Shape("down", 4096, 14336),
    Shape("head", 128256, 4096),
    Shape("qwen3 gate_up", 6144, 1024, "silu"),
    Shape("qwen3 down", 1024, 3072),
    Shape("qwen3 qkv", 4096, 1024),
    Shape("qwen3 o", 1024, 2048),
    Shape("qwen3 head", 151936, 1024),
)
"""Llama-8B's and Qwen3-0.6B's, the most important first."""


class Report:
    """Prints, and keeps what was printed."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)
        if folder := os.environ.get("OUT"):
            Path(folder, "gpu_products.txt").write_text("\n".join(self.lines) + "\n")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


def even(blocks: int, slots: int) -> int:
    """As many programs as share the blocks evenly, where that leaves hardly any of the slots unused; else all slots."""
    programs = blocks * (slots // blocks)
    return programs if programs >= 0.9 * slots else slots


def streams(shape: Shape, rows: int) -> Iterator[SkinnyConfig]:
    """Candidates (block_n, block_k, programs a core, warps, stages, fetch) that fill the shared memory."""
    small = shape.num_out * shape.num_in < 8 << 20
    if small:
        cuts = [(n, k, per, w, s, 2) for n, k, w, s in SMALL for per in (1, 2)]
    else:
        cuts = list(LARGE[rows])
    for block_n, block_k, per_core, warps, stages, fetch in cuts:
        blocks = -(-shape.num_out // block_n)
        if shape.num_in % block_k or stages * (block_n + rows) * block_k * 2 > SHARED_MEMORY // per_core:
            continue
        counts = {even(blocks, per_core * CORES)} | ({CORES} if per_core == 1 and not small else set())
        if blocks > 10 * CORES and per_core == 2:
            counts.add(blocks)
        for programs in sorted(counts):
            yield SkinnyConfig(
                block_n=block_n, block_k=block_k, programs=programs, num_warps=warps, num_stages=stages, fetch=fetch
            )


SMALL = ((16, 256, 2, 4), (32, 128, 4, 5), (64, 64, 4, 5), (64, 128, 4, 4))
FEW = (
    (64, 128, 1, 4, 8, 4),
    (64, 128, 2, 4, 4, 0),
    (64, 128, 2, 4, 4, 2),
    (64, 128, 3, 4, 3, 2),
    (128, 64, 2, 4, 5, 3),
    (128, 128, 1, 8, 5, 2),
)
LARGE = {
    16: FEW,
    32: FEW,
    64: (
        (128, 64, 1, 8, 8, 4),
        (128, 64, 2, 4, 4, 3),
        (128, 64, 2, 8, 4, 0),
        (128, 64, 2, 8, 4, 3),
        (64, 64, 2, 4, 6, 4),
        (128, 128, 1, 8, 4, 2),
        (256, 64, 1, 8, 5, 2),
    ),
    128: ((128, 64, 1, 8, 6, 4), (256, 64, 1, 8, 4, 2), (128, 64, 2, 8, 3, 2), (128, 128, 1, 8, 3, 2)),
}


def gemvs(shape: Shape, num_tokens: int) -> Iterator[GemvConfig]:
    """Candidates of up to 8 tokens: some for one, and what the table has."""
    if num_tokens == 1:
        for block_n, block_k, warps in ((4, 1024, 4), (8, 512, 4), (16, 256, 4), (16, 512, 8), (8, 1024, 8)):
            if shape.gate:
                block_n *= 2  # as many outputs
            if shape.num_out // block_n >= CORES and block_k <= shape.num_in:
                for fetch in (2, 8):
                    yield GemvConfig(
                        block_n=block_n, block_k=block_k, num_warps=warps, num_stages=4, dot=False, fetch=fetch
                    )
    for tokens in (1, 4, 8):
        cut = H200.get((shape.num_out, shape.num_in, shape.gate is not None, tokens))
        if isinstance(cut, GemvConfig) and tokens >= num_tokens and (cut.dot or num_tokens == 1):
            yield cut
            return


def product(x: Tensor, w: Tensor, config: Config, gate: str | None, counters: Tensor, overlap: Overlap) -> Tensor:
    run: Any = gemv if isinstance(config, GemvConfig) else skinny
    y: Tensor = run(x, w, gate=gate, config=config, counters=counters, overlap=overlap)
    return y


def exact(x: Tensor, w: Tensor, gate: str | None, bias: Tensor | None = None) -> Tensor:
    """The product in float32, rounded before the gate as the kernels do."""
    y = F.linear(x.float(), w.float(), None if bias is None else bias.float())
    if gate is None:
        return y
    first, second = y.to(x.dtype).float().chunk(2, dim=-1)
    return ACTIVATIONS[gate](first) * second


def error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.float() - expected).norm() / expected.norm())


def early() -> Overlap:
    return overlap_for(torch.cuda.get_device_capability())


# -- compiling, each task in a worker: the very call that will be timed, so that its kernel lies in Triton's cache --

Task = tuple[Shape, int, Config]
_weight: dict[tuple[int, int], Tensor] = {}


def compiled(task: Task) -> str:
    """Why the kernel cannot run; empty if it does."""
    shape, num_tokens, config = task
    size = shape.num_out, shape.num_in
    if size not in _weight:
        _weight.clear()
        _weight[size] = torch.zeros(size, dtype=torch.bfloat16, device=DEVICE)
    x = torch.zeros(num_tokens, shape.num_in, dtype=torch.bfloat16, device=DEVICE)
    try:
        product(x, _weight[size], config, shape.gate, make_counters(shape.num_out, DEVICE), early())
        torch.cuda.synchronize()
    except Exception as problem:  # a cut that needs more shared memory than there is
        return f"{type(problem).__name__}: {str(problem)[:160]}"
    return ""


def compile_all(shapes: Sequence[Shape], until: float, report: Report) -> set[Task]:
    """The tasks whose kernels are ready when `until` seconds have passed."""
    tasks: list[Task] = []
    for shape in shapes:
        tasks += [(shape, tokens, c) for tokens in (1, 4, 8) for c in gemvs(shape, tokens)]
        tasks += [(shape, rows, c) for rows in (16, 64, 32, 128) for c in streams(shape, rows)]
    ready: set[Task] = set()
    workers = max(2, min(14, (os.cpu_count() or 4) - 1))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        answers = pool.imap(compiled, tasks)
        for task in tasks:
            try:
                problem = answers.next(timeout=max(0.1, until - report.seconds))
            except multiprocessing.TimeoutError:
                break
            if problem:
                report(f"    {task}: {problem}")
            else:
                ready.add(task)
        pool.terminate()
    report(f"{len(ready)} of {len(tasks)} kernels are ready after {report.seconds:.0f} s")
    return ready


# -- timing --


def recorded(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()  # products of two streams must not meet on the same counters
    with torch.cuda.stream(torch.cuda.Stream()):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def microseconds(calls: Sequence[Call], *, replays: int = 7) -> float:
    """Median time of one of the calls."""
    graph, times = recorded(calls), []
    for _ in range(replays + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return float(statistics.median(times[1:]))


def table_line(shape: Shape, num_tokens: int, c: Config, ratio: float) -> str:
    """A line of tuning_products.py."""
    if ratio < WORTH:
        cut = "None"
    elif isinstance(c, SkinnyConfig):
        cut = f"stream({c.block_n}, {c.block_k}, {c.programs}, {c.num_warps}, {c.num_stages}, {c.fetch})"
    elif c.dot:
        cut = f"dots({c.block_n}, {c.block_k}, {c.split_k}, {c.num_warps}, {c.num_stages}, {c.fetch})"
    else:
        cut = f"lanes({c.block_n}, {c.block_k}, {c.num_warps}, {c.num_stages}, {c.fetch})"
    return f"    ({shape.num_out}, {shape.num_in}, {shape.gate is not None}, {num_tokens}): {cut},  # {ratio:.2f}"


class Bench:
    """One shape: rotating weights, and pairs of add_rms_norm and a product on them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        size = shape.num_out, shape.num_in
        copies = max(2, min(64, -(-CACHE_BYTES // (2 * shape.num_out * shape.num_in))))
        self.weights = [
            torch.empty(size, dtype=torch.bfloat16, device=DEVICE).normal_(std=shape.num_in**-0.5)
            for _ in range(copies)
        ]
        self.counters = make_counters(shape.num_out, DEVICE)
        self.norm = torch.ones(shape.num_in, dtype=torch.bfloat16, device=DEVICE)
        self.repeats = max(1, -(-20 // copies))

    def pairs(self, x: Tensor, residual: Tensor, overlap: Overlap, run: Callable[[Tensor], object]) -> Sequence[Call]:
        def pair(w: Tensor) -> object:
            add_rms_norm(x, residual, self.norm, 1e-6, overlap=overlap)
            return run(w)

        return [partial(pair, w) for w in self.weights] * self.repeats

    def cublas(self, x: Tensor, overlap: Overlap) -> Callable[[Tensor], Tensor]:
        gate = self.shape.gate
        if gate is None:
            return lambda w: F.linear(x, w)
        return lambda w: act_and_mul(F.linear(x, w), gate, overlap=overlap)

    def compare(self, num_tokens: int, cuts: Sequence[Config], report: Report) -> tuple[dict[Config, float], float]:
        """(time of each right cut, torch's time), in microseconds of a pair."""
        shape, overlap = self.shape, early()
        x, residual = (torch.randn(num_tokens, shape.num_in, device=DEVICE).bfloat16() for _ in range(2))
        in_order = microseconds(self.pairs(x, residual, IN_ORDER, self.cublas(x, IN_ORDER)))
        base = min(in_order, microseconds(self.pairs(x, residual, overlap, self.cublas(x, overlap))))
        timed: dict[Config, float] = {}
        for c in cuts:
            try:
                x.normal_()
                found = error(
                    product(x, self.weights[0], c, shape.gate, self.counters, overlap),
                    exact(x, self.weights[0], shape.gate),
                )
                if not found <= ALLOWED:
                    report(f"    WRONG {shape.name} x {num_tokens}, {c}: error {found:.1e}")
                    continue
                calls = self.pairs(
                    x, residual, overlap, lambda w, c=c: product(x, w, c, shape.gate, self.counters, overlap)
                )
                timed[c] = microseconds(calls, replays=5)
            except Exception as problem:  # reported by name; the other cuts are still of interest
                report(f"    {shape.name} x {num_tokens}, {c}: {type(problem).__name__}: {str(problem)[:160]}")
        if timed:
            best = min(timed, key=timed.__getitem__)
            calls = self.pairs(
                x, residual, IN_ORDER, lambda w: product(x, w, best, shape.gate, self.counters, IN_ORDER)
            )
            megabytes = 2e-6 * shape.num_out * shape.num_in
            report(
                f"{shape.name:13} {shape.num_out}x{shape.num_in} T={num_tokens:<3} torch {base:7.2f} us"
                f" {megabytes / base:.2f} TB/s (in order {in_order:.2f}); ours {timed[best]:7.2f} us"
                f" {megabytes / timed[best]:.2f} TB/s (in order {microseconds(calls, replays=5):.2f});"
                f" ratio {base / timed[best]:.3f}"
            )
            for c, us in sorted(timed.items(), key=lambda entry: entry[1]):
                report(f"      {us:8.2f} {type(c).__name__[:4]} " + " ".join(f"{k}={v}" for k, v in vars(c).items()))
        return timed, base


def tune(shape: Shape, ready: set[Task], until: float, report: Report) -> list[str]:
    """Lines of the table for one shape."""
    bench, lines, of_sixteen = Bench(shape), {}, dict[Config, float]()
    for num_tokens in TOKENS:
        if report.seconds > until:
            report(f"{shape.name} x {num_tokens}: no time left")
            break
        cuts: list[Config] = [c for c in streams(shape, padded_rows(num_tokens)) if num_tokens >= 16]
        if num_tokens < 16:
            cuts = sorted(of_sixteen, key=of_sixteen.__getitem__)[: 1 if num_tokens == 1 else 2]
        cuts = [c for c in cuts if (shape, padded_rows(num_tokens), c) in ready]
        few = [c for c in gemvs(shape, num_tokens) if num_tokens <= 8]
        cuts += [c for c in few if {(shape, t, c) for t in (1, 4, 8)} & ready]
        timed, base = bench.compare(num_tokens, list(dict.fromkeys(cuts)), report)
        if num_tokens == 16:
            of_sixteen = timed
        if timed:
            best = min(timed, key=timed.__getitem__)
            lines[num_tokens] = table_line(shape, num_tokens, best, base / timed[best])
    return [line for _, line in sorted(lines.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--seconds", type=float, default=150, help="time for all; what does not fit is left out")
    options = parser.parse_args()
    report = Report()
    report(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    torch.manual_seed(0)
    shapes = [shape for shape in SHAPES if options.only in shape.name]
    ready = compile_all(shapes, 0.55 * options.seconds, report)
    lines = [line for shape in shapes for line in tune(shape, ready, options.seconds - 5, report)]
    report("H200: Products = {")
    for line in lines:
        report(line)
    report("}")
    report(f"{report.seconds:.0f} s")


if __name__ == "__main__":
    main()
