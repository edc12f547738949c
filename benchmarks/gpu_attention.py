"""The portable Triton attention at the shapes of an 8B model: 32 query and 8 KV heads of 128, blocks of 16, bfloat16.

    python benchmarks/gpu_attention.py --device cuda [--case decode_256x1k ...] [--sweep] [--kv-dtype float8_e4m3fn]

Prints Markdown: microseconds, TB/s of the cache read (decode) or TFLOP/s (prefill), and first the largest error on a
small batch. Layers take turns with caches of their own, so that no step finds its keys in a cache of the chip; where
torch can record a graph, the layers of a step are one, so that launches cost what they cost in serving. Writing the new
keys and values has a line of its own, as rivals' numbers leave it out. --sweep tries other tunings, best first.
On a machine without a GPU: TRITON_INTERPRET=1 ... --device cpu --case decode_1x8k --shrink 64 --seconds 0.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from octavo.ops.attention import ReferenceAttention
from octavo.plugin import AttentionSpec, AttnBatch, AttnLayer, BatchLimits, Device, KVPlan, KVView, MemInfo, start_step
from octavo.plugin.torch import HOST, TorchDevice
from octavo.runner.kvcache import allocate
from octavo.testing.conformance.paged import kv_spec_of
from octavo.triton.attention_backend import TritonAttention
from octavo.triton.attention_tuning import AttentionTuning, DecodeCut

SPEC = AttentionSpec(
    num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5, dtype="bfloat16", kv_dtype="bfloat16", block_size=16
)
ROTATED_BYTES = 512 * 2**20
"""Caches that take turns hold at least this much together: several times the largest second-level cache."""

Lens = Sequence[tuple[int, int]]
Call = Callable[[], object]


def cases() -> dict[str, Lens]:
    """(context after the step, new tokens) of each sequence, by name."""
    rng = np.random.default_rng(0)
    skewed = np.exp(rng.uniform(np.log(32), np.log(1024), 255)).astype(int).tolist()
    return {
        "decode_256x1k": [(1024, 1)] * 256,
        "decode_64x1k": [(1024, 1)] * 64,
        "decode_1x1k": [(1024, 1)],
        "decode_1x8k": [(8192, 1)],
        "decode_skewed": [(16384, 1), *((n, 1) for n in skewed)],
        "drafts_64x1k": [(1024, 4)] * 64,
        "prefill_1x2k": [(2048, 2048)],
        "prefill_1x8k": [(8192, 8192)],
        "chunk_2k_of_8k": [(8192, 2048)],
        "mixed": [*((n, 1) for n in skewed[:128]), (2048, 2048)],
    }


def shrink(lens: Lens, factor: int) -> Lens:
    """The same shape with shorter and fewer sequences."""
    kept = lens[:: min(factor, len(lens))]
    return [(max(context // factor, 1), max(min(new, context) // factor, 1)) for context, new in kept]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One step over several layers' caches."""

    batch: AttnBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    caches: list[KVView]


def build(spec: AttentionSpec, lens: Lens, device: Device, *, num_layers: int | None = None) -> Inputs:
    """Random inputs; blocks of the sequences lie scattered over the cache. num_layers None: as many as must rotate."""
    rng = np.random.default_rng(1)
    size, where, dtype = spec.block_size, device.torch_device, getattr(torch, spec.dtype)
    kv_lens = np.array([context for context, _ in lens], np.int32)
    q_lens = np.array([new for _, new in lens], np.int32)
    num_blocks = -(-kv_lens // size)
    free = iter(rng.permutation(np.arange(1, 1 + num_blocks.sum())).tolist())
    table = np.zeros((len(lens), int(num_blocks.max())), np.int32)
    for row, count in zip(table, num_blocks, strict=True):
        row[:count] = list(itertools.islice(free, int(count)))
    positions = [np.arange(context - new, context) for context, new in lens]
    slots = [row[p // size].astype(np.int64) * size + p % size for row, p in zip(table, positions, strict=True)]
    starts = np.concatenate(([0], q_lens.cumsum())).astype(np.int32)
    num_tokens = int(starts[-1])
    cache_bytes = context_bytes(spec, lens)
    layers = num_layers or int(np.clip(-(-ROTATED_BYTES // cache_bytes), 2, 16))
    plan = KVPlan(spec=kv_spec_of(spec), num_layers=layers, num_blocks=1 + int(num_blocks.sum()))
    caches = allocate(plan, TritonAttention.kv_layout(plan.spec), device)
    for cache in caches:
        for tensor in (cache.k, cache.v):
            for start in range(0, len(tensor), 4096):
                part = tensor[start : start + 4096]
                part.copy_(torch.randn(part.shape, device=where, dtype=dtype))

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(where)

    q, k, v = (
        torch.randn(num_tokens, heads, spec.head_dim, device=where, dtype=dtype)
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    decodes = int(np.argmax(q_lens != 1)) if (q_lens != 1).any() else len(lens)
    batch = AttnBatch(
        num_tokens=num_tokens,
        num_seqs=len(lens),
        num_decodes=decodes,
        max_q_len=int(q_lens.max()),
        max_kv_len=int(kv_lens.max()),
        q_starts=put(starts),
        kv_lens=put(kv_lens),
        block_table=put(table),
        slots=put(np.concatenate(slots)),
        q_starts_host=starts,
        kv_lens_host=kv_lens,
    )
    return Inputs(batch=batch, q=q, k=k, v=v, out=torch.empty_like(q), caches=caches)


def context_bytes(spec: AttentionSpec, lens: Lens) -> int:
    """Bytes of keys and values that one layer's step has to read."""
    itemsize: int = getattr(torch, spec.kv_dtype).itemsize
    width = 2 * spec.num_kv_heads * spec.head_dim * itemsize
    return width * sum(context for context, _ in lens)


def flops(spec: AttentionSpec, lens: Lens) -> int:
    """Multiplications and additions of the two products, for pairs that causality leaves."""
    pairs = sum(new * context - new * (new - 1) // 2 for context, new in lens)
    return 4 * spec.num_heads * spec.head_dim * pairs


def recorded(step: Call, device: Device) -> Call:
    """The step as a graph where torch can record one on this device, else as it is."""
    module: Any = None if device.type == HOST else torch.get_device_module(device.type)
    if not (hasattr(module, "CUDAGraph") and hasattr(module, "graph")):
        return step
    graph: Any = module.CUDAGraph()
    with module.graph(graph):
        step()
    return lambda: graph.replay()


def microseconds(step: Call, device: Device, *, num_layers: int, seconds: float) -> float:
    """Time of one layer: the median of several rounds."""
    step()
    device.synchronize()
    step = recorded(step, device)
    rounds: list[float] = []
    repeats, end = 1, time.perf_counter() + seconds
    while not rounds or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        device.synchronize()
        rounds.append((time.perf_counter() - start) / (repeats * num_layers))
        # Long enough that the host's part of a round does not count, once the first round has said how long a step is.
        repeats = int(np.clip(0.01 / (rounds[0] * num_layers), 1, 200))
    return float(np.median(rounds)) * 1e6


def measure(
    backend: type[TritonAttention],
    spec: AttentionSpec,
    lens: Lens,
    inputs: Inputs,
    device: Device,
    seconds: float,
    *,
    write: bool = False,
) -> float:
    """Microseconds of one layer of `backend`. write: new keys and values too; else they lie in the cache already."""
    instance = backend(spec, limits_of(lens), device)
    plan = instance.plan(inputs.batch, graph=False)
    start_step(instance, plan)

    new = (inputs.k, inputs.v) if write else (None, None)

    def step() -> None:
        for index, cache in enumerate(inputs.caches):
            instance.run(AttnLayer(index=index), inputs.q, *new, cache, plan, inputs.out)

    return microseconds(step, device, num_layers=len(inputs.caches), seconds=seconds)


def limits_of(lens: Lens) -> BatchLimits:
    return BatchLimits(max_num_tokens=sum(new for _, new in lens), max_num_seqs=len(lens), max_model_len=32768)


def largest_error(backend: type[TritonAttention], spec: AttentionSpec, device: Device) -> float:
    """Against the reference, on a batch that takes every path: decodes in several shares, drafts, chunks."""
    lens = [(300, 1), (17, 1), (1, 1), (90, 3), (64, 64), (130, 40)]
    inputs = build(spec, lens, device, num_layers=1)
    answers = []
    for cls in (backend, ReferenceAttention):
        instance: Any = cls(spec, limits_of(lens), device)
        out, layer = torch.zeros_like(inputs.q), AttnLayer(index=0)
        plan = instance.plan(inputs.batch, graph=False)
        start_step(instance, plan)
        answers.append(instance.run(layer, inputs.q, inputs.k, inputs.v, inputs.caches[0], plan, out).float())
    return float((answers[0] - answers[1]).abs().max())


def tunings(base: AttentionTuning, prefill: bool) -> Iterator[AttentionTuning]:
    """What --sweep tries."""
    if prefill:
        for rows, block, warps, stages, programs in itertools.product((64, 128), (32, 64, 128), (4, 8), (3, 5), (1, 2)):
            yield replace(
                base,
                prefill_rows=rows,
                prefill_block=block,
                prefill_warps=warps,
                prefill_stages=stages,
                prefill_programs_per_unit=programs,
            )
    else:
        for block, warps, stages, programs, least in itertools.product(
            (32, 64, 128), (2, 4, 8), (3, 5), (1, 2, 4), (1, 2, 4)
        ):
            cut = DecodeCut(block=block, warps=warps, stages=stages, programs_per_unit=programs, min_tiles=least)
            yield replace(base, decode=cut)


def rate(spec: AttentionSpec, lens: Lens, micros: float) -> str:
    if max(new for _, new in lens) > 16:
        return f"{flops(spec, lens) / micros / 1e6:.0f} TFLOP/s"
    return f"{context_bytes(spec, lens) / micros / 1e6:.2f} TB/s"


def sweep(name: str, spec: AttentionSpec, lens: Lens, device: Device, base: AttentionTuning, seconds: float) -> None:
    """Print the ten best tunings of one case. A tuning that the device cannot hold is named and passed over."""
    from triton.runtime.errors import OutOfResources

    inputs = build(spec, lens, device)
    found: list[tuple[float, AttentionTuning]] = []
    for tuning in tunings(base, prefill=max(new for _, new in lens) > 16):
        try:
            found.append((measure(TritonAttention.with_tuning(tuning), spec, lens, inputs, device, seconds), tuning))
        except OutOfResources as error:
            print(f"passed over {tuning}: {error}")
    print(f"\n## {name}, best of {len(found)}\n\n| us | rate | tuning |\n|---|---|---|")
    for micros, tuning in sorted(found, key=lambda pair: pair[0])[:10]:
        print(f"| {micros:.1f} | {rate(spec, lens, micros)} | {tuning} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", required=True, help="torch device type")
    parser.add_argument("--case", nargs="*", choices=list(cases()), help="which cases; all by default")
    parser.add_argument("--kv-dtype", default=SPEC.dtype)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each measurement")
    parser.add_argument("--shrink", type=int, default=1, help="divide lengths and numbers of sequences")
    parser.add_argument(
        "--shared-memory", type=int, default=AttentionTuning().shared_memory, help="bytes a program takes"
    )
    parser.add_argument("--fence", action=argparse.BooleanOptionalAction, default=True, help="see AttentionTuning")
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    on_host = args.device == HOST
    device = TorchDevice(args.device, memory=(lambda: MemInfo(total=0, free=0)) if on_host else None)
    device.activate()
    spec = replace(SPEC, kv_dtype=args.kv_dtype)
    base = AttentionTuning(shared_memory=args.shared_memory, decode_fence=args.fence)
    chosen = {name: shrink(lens, args.shrink) for name, lens in cases().items() if not args.case or name in args.case}
    with device.inference():
        print(f"{device.describe().name}, torch {torch.__version__}, cache {spec.kv_dtype}, {base}\n")
        print(f"largest error on a small batch: {largest_error(TritonAttention.with_tuning(base), spec, device):.2g}\n")
        if args.sweep:
            for name, lens in chosen.items():
                sweep(name, spec, lens, device, base, args.seconds)
            return
        print("| case | us | rate | with writing, us |\n|---|---|---|---|")
        for name, lens in chosen.items():
            inputs = build(spec, lens, device, num_layers=1 if on_host else None)
            alone, whole = (
                measure(TritonAttention.with_tuning(base), spec, lens, inputs, device, args.seconds, write=write)
                for write in (False, True)
            )
            print(f"| {name} | {alone:.1f} | {rate(spec, lens, alone)} | {whole:.1f} |", flush=True)
            del inputs
            device.empty_cache()


if __name__ == "__main__":
    main()
