"""Triton kernels against torch on one device, by CUDA-graph replay: ratios above 1 mean ours is faster.

    PYTHONPATH=core/src python benchmarks/gpu_ops.py --device cuda --family ops,int4 [--only llama] [--rows 1,4,8]

Families: ops (norms, rope, activations, fp8), sampling, gemv-fp8, int4 (both against bf16 torch); for bf16 products
see gpu_products.py.
Weights rotate among copies larger than the L2 cache. Every kernel is checked against its reference first; a wrong one
is not timed. The products' families try several cuts of a shape and end with a tuning table as a Python literal.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from octavo.ops import activation as ref_activation
from octavo.ops import norm as ref_norm
from octavo.ops import rope as ref_rope
from octavo.ops import sampling as ref_sampling
from octavo.quant.online import quantize_rows
from octavo.triton import activation, gemv, int4, logits, norm, quantize, rope, sampling, topk_topp
from octavo.triton.gemv import GemvConfig
from octavo.triton.int4 import Int4Config

Tensor = torch.Tensor
Cut = GemvConfig | Int4Config
Call = Callable[[], object]
OPS = SimpleNamespace(rms_norm=ref_norm.rms_norm, rope=ref_rope.rope)
SHAPES = {
    "llama-8b qkv": (6144, 4096),
    "llama-8b o": (4096, 4096),
    "llama-8b gate_up": (28672, 4096),
    "llama-8b down": (4096, 14336),
    "llama-8b head": (128256, 4096),
    "qwen3-0.6b qkv": (4096, 1024),
    "qwen3-0.6b o": (1024, 2048),
    "qwen3-0.6b gate_up": (6144, 1024),
    "qwen3-0.6b down": (1024, 3072),
    "qwen3-0.6b head": (151936, 1024),
}
# (block_n, block_k, warps): what a program holds of the weight at once.
LANES = ((4, 1024, 4), (8, 512, 4), (8, 1024, 8), (16, 256, 4), (16, 512, 8), (32, 256, 8))
DOTS = ((16, 256, 1), (16, 256, 2), (32, 128, 2), (32, 256, 4), (64, 128, 4), (64, 256, 8))
INT4_CUTS = ((8, 2), (16, 4), (32, 4), (64, 4), (64, 8), (128, 8))
CACHE_BYTES = 256 << 20


def microseconds(calls: Sequence[Call], device: torch.device, *, replays: int = 11) -> float:
    """Median time of one call; the calls, which rotate over separate inputs, are recorded in one graph."""
    module = torch.get_device_module(device)
    for call in calls:
        call()
    repeats = list(calls) * max(1, 24 // len(calls))
    module.synchronize()
    run: Call
    if hasattr(module, "CUDAGraph"):
        graph = module.CUDAGraph()
        with module.graph(graph):
            for call in repeats:
                call()
        run = graph.replay
    else:

        def run() -> None:
            for call in repeats:
                call()

    times = []
    for _ in range(replays + 2):
        start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        module.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(repeats))
    return float(statistics.median(times[2:]))


def error(ours: object, theirs: object) -> float:
    """Largest of the relative errors |a - b| / |b| of the results, by norm. Filtered logits: of their probabilities,
    since a token at the very border may fall either way."""
    a, b = (v if isinstance(v, tuple) else (v,) for v in (ours, theirs))
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        if torch.isinf(y).any():
            x, y = x.softmax(dim=-1), y.softmax(dim=-1)
        worst = max(worst, float((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-30)))
    return worst


def report(name: str, torch_us: float, ours_us: float, num_bytes: float, note: str) -> None:
    rate = [num_bytes / us / 1e6 for us in (torch_us, ours_us)]
    print(
        f"{name:36} torch {torch_us:9.2f} us {rate[0]:6.2f} TB/s   ours {ours_us:9.2f} us {rate[1]:6.2f} TB/s"
        f"   ratio {torch_us / ours_us:6.2f}   {note}",
        flush=True,
    )


def copies(num_bytes: int) -> int:
    return max(1, min(64, -(-CACHE_BYTES // max(num_bytes, 1))))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op: fresh inputs, our function and torch's on them, the bytes that a row must move, the error allowed."""

    name: str
    inputs: Callable[[], tuple[Tensor, ...]]
    ours: Callable[..., object]
    theirs: Callable[..., object]
    bytes_a_row: int
    tolerance: float


def op_cases(num_tokens: int, device: torch.device) -> Iterator[Case]:
    """The layers of an 8B Llama between its products, and Qwen3's norms of heads."""
    hidden, inter, heads, kv_heads, dim, eps = 4096, 14336, 32, 8, 128, 1e-6

    def randn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=torch.bfloat16, device=device)

    def hidden_states() -> tuple[Tensor, ...]:
        return randn(num_tokens, hidden), randn(num_tokens, hidden)

    def gate_up() -> tuple[Tensor, ...]:
        return (randn(num_tokens, 2 * inter),)

    def packed_qkv() -> tuple[Tensor, ...]:
        return randn(num_tokens, (heads + 2 * kv_heads) * dim), torch.randint(4096, (num_tokens,), device=device)

    weight, head_weight, table = randn(hidden), randn(dim), randn(4096, dim)
    yield Case(
        name="rms_norm",
        inputs=hidden_states,
        ours=lambda x, r: norm.rms_norm(x, weight, eps),
        theirs=lambda x, r: ref_norm.rms_norm(x, weight, eps),
        bytes_a_row=4 * hidden,
        tolerance=1e-2,
    )
    yield Case(
        name="add_rms_norm",
        inputs=hidden_states,
        ours=lambda x, r: norm.add_rms_norm(x, r, weight, eps),
        theirs=lambda x, r: ref_norm.add_rms_norm(OPS, x, r, weight, eps),
        bytes_a_row=8 * hidden,
        tolerance=1e-2,
    )
    yield Case(
        name="act_and_mul",
        inputs=gate_up,
        ours=lambda x: activation.act_and_mul(x, "silu"),
        theirs=lambda x: ref_activation.act_and_mul(x, "silu"),
        bytes_a_row=6 * inter,
        tolerance=1e-2,
    )
    yield Case(
        name="quantize_fp8",
        inputs=hidden_states,
        ours=lambda x, r: quantize.quantize_fp8(x),
        theirs=lambda x, r: quantize_rows(x),
        bytes_a_row=3 * hidden,
        tolerance=2e-2,  # a value halfway between two codes may go to either
    )
    for name, w in (("qkv_rope", None), ("qkv_norm_rope", head_weight)):
        yield Case(
            name=name,
            inputs=packed_qkv,
            ours=lambda x, at, w=w: rope.qkv_norm_rope(x, at, table, w, w, eps, heads, kv_heads),
            theirs=lambda x, at, w=w: ref_rope.qkv_norm_rope(OPS, x, at, table, w, w, eps, heads, kv_heads),
            bytes_a_row=4 * (heads + kv_heads) * dim,
            tolerance=2e-2,
        )


def sampling_cases(num_rows: int, device: torch.device) -> Iterator[Case]:
    """What follows the head of an 8B Llama."""
    vocab = 128256
    rows, ones = torch.arange(num_rows, device=device), torch.ones(num_rows, device=device)
    counts = torch.randint(3, (num_rows, vocab), device=device, dtype=torch.int32)
    words = torch.randint(-(2**31), 2**31 - 1, (num_rows, -(-vocab // 32)), device=device, dtype=torch.int32)
    fifty, off = rows * 0 + 50, rows * 0
    for name, module, op, rest, bytes_a_token, tolerance in (
        ("greedy", sampling, "greedy", (), 4, 0.0),
        ("sample", sampling, "sample", (ones * 0.8, rows, rows), 4, 0.0),
        ("topk_topp 50, 0.9", topk_topp, "topk_topp", (fifty, ones * 0.9), 8, 1e-2),
        ("topk_topp all, 0.9", topk_topp, "topk_topp", (off, ones * 0.9), 8, 1e-2),
        ("topk_topp off", topk_topp, "topk_topp", (off, ones), 8, 0.0),
        ("min_p", logits, "min_p", (ones * 0.05,), 8, 1e-5),
        ("penalties", logits, "penalties", (counts, counts == 2, ones, ones * 0.5, ones * 1.2), 13, 1e-5),
        ("apply_bitmask", logits, "apply_bitmask", (words,), 4, 0.0),
    ):
        yield Case(
            name=name,
            inputs=lambda: (torch.randn(num_rows, vocab, device=device) * 3,),
            ours=lambda x, f=getattr(module, op), rest=rest: f(x, *rest),  # noqa: B008 (a new one each turn)
            theirs=lambda x, f=getattr(ref_sampling, op), rest=rest: f(x, *rest),  # noqa: B008
            bytes_a_row=bytes_a_token * vocab,
            tolerance=tolerance,
        )


def time_case(case: Case, num_rows: int, device: torch.device) -> None:
    inputs = case.inputs()
    found = error(case.ours(*(t.clone() for t in inputs)), case.theirs(*(t.clone() for t in inputs)))
    if not found <= case.tolerance:
        print(f"{case.name} x {num_rows}: WRONG, error {found:.2e} > {case.tolerance:.0e}; not timed", flush=True)
        return
    pristine = inputs[0].clone()

    def restored(fn: Callable[..., object]) -> Call:
        return lambda: fn(inputs[0].copy_(pristine), *inputs[1:])

    # Ops in place would meet what they left, so every call first restores its input; the copy's time is taken off.
    # It leaves the input in the cache, as the kernel before does in a step.
    alone = microseconds([restored(lambda *given: None)], device)
    theirs_us, ours_us = (microseconds([restored(fn)], device) - alone for fn in (case.theirs, case.ours))
    report(f"{case.name} x {num_rows}", theirs_us, ours_us, case.bytes_a_row * num_rows, f"error {found:.1e}")


def cuts(num_out: int, num_in: int, num_rows: int, family: str, num_cores: int) -> Iterator[Cut]:
    """Candidates: enough programs for every core, and no slice of K shorter than two tiles."""
    if family == "int4":
        for block_n, num_warps in INT4_CUTS:
            for split_k in (1, 2, 4, 8) if num_rows <= 64 else (1,):
                for dot in (True, False) if num_rows == 1 else (True,):
                    yield Int4Config(block_n=block_n, split_k=split_k, num_warps=num_warps, dot=dot)
        return
    tiles = DOTS if num_rows > 1 else LANES + DOTS
    for block_n, block_k, num_warps in tiles:
        for split_k in (1, 2, 4, 8):
            programs = -(-num_out // block_n) * split_k
            fits = split_k == 1 or (programs <= 16 * num_cores and num_in >= 2 * block_k * split_k)
            if fits and (programs >= num_cores or split_k == 8):
                dot = num_rows > 1 or (block_n, block_k, num_warps) in DOTS
                yield GemvConfig(
                    block_n=block_n, block_k=block_k, split_k=split_k, num_warps=num_warps, num_stages=4, dot=dot
                )


def gemv_call(family: str, num_out: int, num_in: int, device: torch.device) -> tuple[Tensor, Callable[..., object]]:
    """(the weight in bf16, (x, config) -> product by the family's kernel); a fresh random weight."""
    weight = torch.randn(num_out, num_in, dtype=torch.bfloat16, device=device)
    counters = gemv.make_counters(num_out, device)
    if family == "gemv-fp8":
        codes, scale = quantize.quantize_fp8(weight)
        weight = (codes.float() * scale).bfloat16()
        return weight, lambda x, c: gemv.gemv_fp8(x, codes, scale, config=c, counters=counters)
    codes = torch.randint(16, (num_out, num_in), device=device, dtype=torch.uint8)
    scale = torch.rand(num_out, num_in // int4.GROUP, device=device) * 0.1
    packed = int4.pack(codes, scale, -8 * scale)
    return int4.unpack(packed, weight.dtype), lambda x, c: int4.product(x, packed, config=c, counters=counters)


def tune(family: str, name: str, num_rows: int, device: torch.device) -> tuple[tuple[int, int, int], Cut, float]:
    """Time every cut of one shape, then the best one's stages; returns its key, config and ratio to torch."""
    num_out, num_in = SHAPES[name]
    bits = {"gemv-fp8": 8, "int4": 5}[family]
    num_bytes = num_out * num_in * bits // 8
    num_cores = torch.get_device_module(device).get_device_properties(device).multi_processor_count
    x = torch.randn(num_rows, num_in, dtype=torch.bfloat16, device=device)
    sets = [gemv_call(family, num_out, num_in, device) for _ in range(copies(num_bytes))]
    base = microseconds([lambda w=w: F.linear(x, w) for w, _ in sets], device)
    exact = F.linear(x.float(), sets[0][0].float())
    timed: dict[Cut, float] = {}

    def measure(config: Cut) -> None:
        try:
            found = error(sets[0][1](x, config), exact)
        except Exception as problem:  # a cut that needs more shared memory than there is
            print(f"    {config}: {type(problem).__name__}: {str(problem).splitlines()[0][:100]}")
            return
        if found > 2e-2:
            print(f"    {config}: WRONG, error {found:.1e}")
            return
        timed[config] = microseconds([lambda f=f: f(x, config) for _, f in sets], device)

    for config in dict.fromkeys(cuts(num_out, num_in, num_rows, family, num_cores)):
        measure(config)
    if not timed:
        raise SystemExit(f"{family} {name}: no cut works")
    for stages in (2, 3, 6):
        measure(replace(min(timed, key=timed.__getitem__), num_stages=stages))
    best = min(timed, key=timed.__getitem__)
    default: Cut = (int4 if family == "int4" else gemv).default_config(num_out, num_in, num_rows, num_cores=num_cores)
    if default not in timed:
        measure(default)
    note = f"default {timed.get(default, float('nan')):.2f} us; of {len(timed)}: {best}"
    report(f"{family} {name} M={num_rows}", base, timed[best], num_bytes, note)
    return (num_out, num_in, num_rows), best, base / timed[best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--family", default="ops,sampling")
    parser.add_argument("--only", default="", help="products whose name contains this")
    parser.add_argument("--rows", default="1,4,8", help="rows of the products")
    parser.add_argument("--tokens", default="1,64,256,2048", help="tokens of the ops; up to 256 rows for sampling")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    tokens = [int(n) for n in options.tokens.split(",")]
    for family in options.family.split(","):
        print(f"## {family}", flush=True)
        if family in ("ops", "sampling"):
            make = op_cases if family == "ops" else sampling_cases
            for n in tokens:
                for case in make(n, device) if family == "ops" or n <= 256 else ():
                    time_case(case, n, device)
            continue
        names = [name for name in SHAPES if options.only in name]
        found = [tune(family, name, int(m), device) for name in names for m in options.rows.split(",")]
        print(f"{family.upper().replace('-', '_')} = {{")
        for key, config, ratio in found:
            # A product that torch wins is no entry of the table.
            print(f"    {'' if ratio > 1.02 else '# '}{key}: {config},  # {ratio:.2f} x torch")
        print("}")


if __name__ == "__main__":
    main()
