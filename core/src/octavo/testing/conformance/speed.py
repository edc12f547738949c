"""How long a platform's kernels take beside the reference on the same device. News for the report, no test: samples are
small and machines are busy, so a ratio is a hint where to look."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from octavo.ops.attention import ReferenceAttention
from octavo.ops.bind import REFERENCE, KernelTable
from octavo.ops.catalogue import CATALOGUE
from octavo.ops.linear import ReferenceLinear
from octavo.ops.moe import ReferenceMoE
from octavo.plugin import AttentionSpec, AttnLayer, BatchLimits, LinearSpec, MoESpec, OpContext, start_step
from octavo.testing.conformance.engines import block_size_of
from octavo.testing.conformance.paged import Case, build, kv_spec_of
from octavo.testing.conformance.subject import Kernel, Subject

NUM_CALLS, NUM_ROUNDS = 5, 5
LENS = [(500, 1), (300, 1), (100, 1), (0, 64), (60, 128)]
LIMITS = BatchLimits(max_num_tokens=256, max_num_seqs=8, max_model_len=1024)

Timed = tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]
"""A kernel, and what makes arguments for one call of it: fresh ones, as some kernels work in place."""


def timings(subject: Subject, *, tiers: Collection[str], failed: Collection[str]) -> list[dict[str, Any]]:
    """{"op", "provider", "seconds", "reference", "ratio"} of every kernel but the references, slowest first.

    seconds, reference: of one call, the kernel's and the reference's; ratio: the first over the second. A kernel pack's
    has "pack" too. tiers: what was tested ("2": ops, "3": attention, "4": linear layers and experts). failed: ids of
    failed tests; their kernels are not timed. A kernel that fails here has "error" in place of numbers; one that
    refuses the case is left out.
    """
    kernels: list[Kernel] = []
    if "2" in tiers:
        kernels += subject.ops()
    if "3" in tiers:
        kernels += subject.classes("attention")
    if "4" in tiers:
        kernels += [*subject.classes("linear"), *subject.classes("moe")]
    found: list[dict[str, Any]] = []
    for kernel in kernels:
        if kernel.provider == REFERENCE or any(f"[{kernel}" in test for test in failed):
            continue
        named = {"op": kernel.what, "provider": kernel.provider} | ({"pack": kernel.pack} if kernel.pack else {})
        try:
            times = both_times(subject, kernel)
        except Exception as error:
            found.append(named | {"error": f"{type(error).__name__}: {error}"})
            continue
        if times is not None:
            own, reference = times
            found.append(named | {"seconds": own, "reference": reference, "ratio": round(own / reference, 2)})
    return sorted(found, key=lambda entry: -entry.get("ratio", 0.0))


def both_times(subject: Subject, kernel: Kernel) -> tuple[float, float] | None:
    """Seconds of one call, of the kernel and of the reference; None if it refuses the case."""
    pairs = {"linear": linear_pair, "attention": attention_pair, "moe": moe_pair}.get(kernel.what, op_pair)
    with subject.device.inference():
        times = [seconds(subject, *timed) for timed in pairs(subject, kernel)]
    return (times[0], times[1]) if times else None


def seconds(subject: Subject, fn: Callable[..., Any], make: Callable[[], tuple[Any, ...]]) -> float:
    """Seconds of one call: the best round counts, its end waited for."""
    fn(*make())
    best = math.inf
    for _ in range(NUM_ROUNDS):
        arguments = [make() for _ in range(NUM_CALLS)]
        subject.device.synchronize()
        start = time.perf_counter()
        for each in arguments:
            fn(*each)
        subject.device.synchronize()
        best = min(best, time.perf_counter() - start)
    return best / NUM_CALLS


def op_pair(subject: Subject, kernel: Kernel) -> Iterator[Timed]:
    """An op's kernel and the reference, on the largest sample that the kernel takes."""
    definition, device, dtype = CATALOGUE[kernel.what], subject.device, subject.caps.default_dtype
    entry = next(p for p in subject.kernels.providers(kernel.what) if p.fn is kernel.fn)

    def takes(sample: tuple[Any, ...]) -> bool:
        params = definition.params(sample)
        return entry.supports(OpContext(op=kernel.what, dtype=dtype, device_type=device.type, params=params)).ok

    samples = [sample for sample in definition.samples(dtype) if takes(sample)]
    if not samples:
        return
    largest = max(samples, key=lambda sample: sum(v.numel() for v in sample if isinstance(v, torch.Tensor)))

    def make() -> tuple[Any, ...]:
        def fresh(value: Any) -> Any:
            return value.to(device.torch_device, copy=True) if isinstance(value, torch.Tensor) else value

        return tuple(tree_map(fresh, largest))

    yield kernel.fn, make
    yield KernelTable().bind(kernel.what, dtype=dtype, device=device), make


def linear_pair(subject: Subject, kernel: Kernel) -> Iterator[Timed]:
    """Both on a plain layer of 1024 x 1024 and 16 tokens."""
    device, dtype = subject.device, subject.caps.default_dtype
    spec = LinearSpec(in_features=1024, out_features=1024, act_dtype=dtype, out_dtype=dtype, max_tokens=16)
    if not kernel.fn.supports(spec, device).ok:
        return
    weight = torch.ones(1024, 1024, dtype=getattr(torch, dtype))
    x = torch.ones(16, 1024, dtype=weight.dtype).to(device.torch_device)
    for cls in (kernel.fn, ReferenceLinear):
        multiply = cls()
        packed = multiply.prepare({"weight": weight.clone()}, spec, device)
        yield multiply.apply, partial(tuple, (x, packed, None))


def moe_pair(subject: Subject, kernel: Kernel) -> Iterator[Timed]:
    """Both on eight experts of 256 x 256, two of them for each of 16 tokens."""
    device, dtype = subject.device, subject.caps.default_dtype
    spec = MoESpec(num_experts=8, top_k=2, hidden_size=256, intermediate_size=256, activation="silu", act_dtype=dtype)
    if not kernel.fn.supports(spec, device).ok:
        return
    kind, target = getattr(torch, dtype), device.torch_device
    x = torch.ones(16, 256, dtype=kind).to(target)
    ids = (torch.arange(32).view(16, 2) % 8).to(target)
    shares = torch.full((16, 2), 0.5).to(target)
    for cls in (kernel.fn, ReferenceMoE):
        experts = cls()
        weights = {"gate_up": torch.ones(8, 512, 256, dtype=kind), "down": torch.ones(8, 256, 256, dtype=kind)}
        yield experts.apply, partial(tuple, (x, ids, shares, experts.prepare(weights, spec, device), None))


def attention_pair(subject: Subject, kernel: Kernel) -> Iterator[Timed]:
    """Both on a step of decodes and parts of prompts; a plan is part of the work."""
    device, dtype = subject.device, subject.caps.default_dtype
    spec = AttentionSpec(
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        scale=64**-0.5,
        dtype=dtype,
        kv_dtype=dtype,
        block_size=block_size_of(subject),
    )
    if not kernel.fn.supports(spec, device).ok:
        return
    case = Case(spec=spec, lens=LENS)
    for cls in (kernel.fn, ReferenceAttention):
        layout = cls.kv_layout(kv_spec_of(spec)) or subject.platform.kv_layout(kv_spec_of(spec), device)
        given = build(case, layout, device)
        backend, out = cls(spec, LIMITS, device), torch.empty_like(given.q)

        def step(backend: Any = backend, given: Any = given, out: torch.Tensor = out) -> None:
            plan = backend.plan(given.batch, graph=False)
            start_step(backend, plan)
            backend.run(AttnLayer(index=0), given.q, given.k, given.v, given.kv, plan, out)

        yield step, tuple
