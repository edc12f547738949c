"""Which attention backend serves which phase on this card: measured once, kept on disk.

Each backend runs a typical batch of each phase, recorded as a whole step would be, with its cost on the host added.
What it answers must agree with the others. The times are kept in a file by card, driver, versions, kind of layer and
limits, under $XDG_CACHE_HOME/octavo (~/.cache/octavo); without it, or if it cannot be read, they are measured anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

import octavo_cuda
from octavo.plugin import AttentionSpec, AttnBatch, AttnLayer, BatchKey, BatchLimits, Device, KVView, start_step
from octavo_cuda.attention_check import TOLERANCE, first_line
from octavo_cuda.graphs import CudaGraphs
from octavo_cuda.nvml import NvmlError, driver_version

Tensor = torch.Tensor
Phase = Literal["few decodes", "many decodes", "long prompts", "mixed"]
Times = dict[Phase, dict[str, float | None]]
"""Microseconds of a layer, by phase and backend; None if it failed."""

log = logging.getLogger("octavo.cuda")

SAMPLES: Mapping[Phase, Sequence[tuple[int, int]]] = {
    "few decodes": [(2047, 1)] * 8,
    "many decodes": [(1023, 1)] * 128,
    "long prompts": [(0, 2048)],
    "mixed": [(1023, 1)] * 120 + [(0, 196)] * 2,
}
"""(context, new tokens) of each sequence. Sizes are cut to the limits of the engine and to `MEMORY`."""

MEMORY = 512 << 20
"""Bytes of keys and values at most: far more than a cache on the card keeps between two calls."""
CALLS, REPLAYS, PLANS = 8, 3, 5
LAYERS = 32
"""A step plans once for so many layers: the share of its time on the host that a layer bears."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The backend class of each phase, and why in words."""

    best: Mapping[Phase, type[Any]]
    why: str


def choose(classes: Sequence[type[Any]], spec: AttentionSpec, limits: BatchLimits, device: Device) -> Choice:
    """The fastest of `classes` for each phase, from the file or measured now. The last one is the yardstick."""
    key = facts(classes, spec, limits, device)
    found = read(key, [cls.name for cls in classes])
    if found is None:
        with device.inference():
            times = measure(classes, spec, limits, device)
        source = f"measured now, {write(key, times)}"
    else:
        times, source = found
    best = {phase: fastest(classes, times[phase]) for phase in get_args(Phase)}
    told = [told_times(phase, best[phase].name, times[phase]) for phase in get_args(Phase)]
    return Choice(best=best, why="; ".join([*told, source]))


def fastest(classes: Sequence[type[Any]], times: Mapping[str, float | None]) -> type[Any]:
    """The class of the least time; the last one if all failed."""
    timed = {cls: us for cls in classes if (us := times[cls.name]) is not None}
    return min(timed, key=timed.__getitem__, default=classes[-1])


def told_times(phase: Phase, best: str, times: Mapping[str, float | None]) -> str:
    """ "mixed: triton 80.1 us (fa3 93.0, flashinfer failed)"."""
    words = {name: "failed" if us is None else f"{us:.1f}" for name, us in times.items()}
    others = ", ".join(f"{name} {word}" for name, word in words.items() if name != best)
    return f"{phase}: {best} {words[best]} us ({others})"


# -- measuring --


def measure(classes: Sequence[type[Any]], spec: AttentionSpec, limits: BatchLimits, device: Device) -> Times:
    """Times of all backends in all phases. A backend that fails, or differs from the last one, has none."""
    times: Times = {}
    for phase, lens in SAMPLES.items():
        sample = Sample.build(lens, spec, limits, device)
        times[phase] = {}
        expected: Tensor | None = None
        for cls in reversed(classes):
            try:
                times[phase][cls.name] = sample.microseconds(cls(spec, limits, device), device)
                found = sample.out.clone()
                expected = found if expected is None else expected
                # Within the self-test's tolerance, and written so that NaN fails too.
                if not (difference := (found.float() - expected.float()).abs().max().item()) <= TOLERANCE:
                    raise ValueError(f"it is off by {difference:.3g}")
            except Exception as error:  # of another package, or of the card: the others may still serve
                log.warning("attention %s is not used for %s: %s", cls.name, phase, first_line(error))
                times[phase][cls.name] = None
    device.empty_cache()
    return times


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A batch of one phase with random contents, in the bounds that a recorded step would show."""

    batch: AttnBatch
    layer: AttnLayer
    q: Tensor
    k: Tensor
    v: Tensor
    kv: KVView
    out: Tensor

    @classmethod
    def build(cls, lens: Sequence[tuple[int, int]], spec: AttentionSpec, limits: BatchLimits, device: Device) -> Sample:
        lens = fitted(lens, spec, limits)
        where, size, num_seqs = device.torch_device, spec.block_size, len(lens)
        dtype, kv_dtype = (getattr(torch, name) for name in (spec.dtype, spec.kv_dtype))
        contexts, new = np.array(lens).T
        kv_lens, num_tokens = contexts + new, int(new.sum())
        blocks = -(-kv_lens // size)
        free = np.random.default_rng(0).permutation(int(blocks.sum())) + 1
        table = np.zeros((num_seqs, -(-limits.max_model_len // size) + 1), np.int32)
        slots: list[Any] = []
        for row, taken in enumerate(np.split(free, np.cumsum(blocks)[:-1])):
            table[row, : len(taken)] = taken
            positions = np.arange(contexts[row], kv_lens[row])
            slots.append(taken[positions // size] * size + positions % size)
        q_starts = np.append(0, np.cumsum(new)).astype(np.int32)
        numbers = torch.Generator(where).manual_seed(0)

        def put(values: Any, kind: Any) -> Tensor:
            return torch.from_numpy(values.astype(kind)).to(where)

        def cache() -> Tensor:
            shape = (len(free) + 1, spec.num_kv_heads, size, spec.head_dim)
            return torch.randn(shape, dtype=dtype, device=where, generator=numbers).to(kv_dtype)

        def rows(heads: int) -> Tensor:
            shape = (num_tokens, heads, spec.head_dim)
            return torch.randn(shape, dtype=dtype, device=where, generator=numbers)

        decode = int(new.max()) == 1
        batch = AttnBatch(
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            num_decodes=num_seqs if decode else 0,
            max_q_len=1 if decode else num_tokens,
            max_kv_len=limits.max_model_len,
            q_starts=put(q_starts, np.int32),
            kv_lens=put(kv_lens, np.int32),
            block_table=put(table, np.int32),
            slots=put(np.concatenate(slots), np.int64),
            q_starts_host=q_starts,
            kv_lens_host=kv_lens.astype(np.int32),
        )
        q = rows(spec.num_heads)
        sinks = torch.randn(spec.num_heads, device=where, generator=numbers) if spec.sinks else None
        return cls(
            batch=batch,
            layer=AttnLayer(index=0, sinks=sinks),
            q=q,
            k=rows(spec.num_kv_heads),
            v=rows(spec.num_kv_heads),
            kv=KVView(k=cache(), v=cache()),
            out=torch.empty_like(q),
        )

    def microseconds(self, backend: Any, device: Device) -> float:
        """Of one layer: on the card, and its share of the plan on the host."""
        plan = backend.plan(self.batch, graph=True)
        start_step(backend, plan)  # outside of the time: it is once a step, not once a layer
        on_card = replayed(lambda: backend.run(self.layer, self.q, self.k, self.v, self.kv, plan, self.out), device)
        on_host = []
        for _ in range(PLANS):
            start = time.perf_counter()
            backend.plan(self.batch, graph=True)
            on_host.append(time.perf_counter() - start)
        return on_card + 1e6 * min(on_host) / LAYERS


def fitted(lens: Sequence[tuple[int, int]], spec: AttentionSpec, limits: BatchLimits) -> list[tuple[int, int]]:
    """The sequences as far as the engine's limits and the memory allow, the last ones first."""
    lens = lens[-limits.max_num_seqs :]
    token_bytes = 2 * spec.num_kv_heads * spec.head_dim * getattr(torch, spec.kv_dtype).itemsize
    share = min(1.0, MEMORY / (token_bytes * sum(context + new for context, new in lens)))
    num_prompts = sum(new > 1 for _, new in lens)
    room = (limits.max_num_tokens - (len(lens) - num_prompts)) // max(num_prompts, 1)
    longest = limits.max_model_len - 1
    new_tokens = [min(new, longest, max(room, 1)) for _, new in lens]
    return [(min(int(context * share), longest - new), new) for (context, _), new in zip(lens, new_tokens, strict=True)]


def replayed(call: Callable[[], object], device: Device) -> float:
    """Microseconds of a call on the card, recorded: the best of `REPLAYS` replays of `CALLS` calls."""
    graphs = CudaGraphs.of(device)

    def calls() -> None:
        for _ in range(CALLS):
            call()

    handle = graphs.prepare(BatchKey(num_tokens=1, num_seqs=1), calls)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    times: list[float] = []
    for _ in range(REPLAYS):
        start.record()
        graphs.run(handle)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    graphs.close()
    return 1e3 * min(times) / CALLS


# -- the file --


def facts(classes: Sequence[type[Any]], spec: AttentionSpec, limits: BatchLimits, device: Device) -> dict[str, Any]:
    """All that the times depend on. The limits cut the samples, and size what backends launch."""
    import triton

    try:
        driver = driver_version()
    except NvmlError:
        driver = "unknown"
    return {
        "card": device.describe().name,
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "octavo-cuda": octavo_cuda.VERSION,
        # Core's backend has no package of its own but a tuning.
        "backends": {c.name: c.version() if hasattr(c, "version") else repr(getattr(c, "tuning", "")) for c in classes},
        "spec": asdict(spec),
        "limits": asdict(limits),
    }


def cache_file(key: Mapping[str, Any]) -> Path:
    """Where the times of `key` are kept. Raises RuntimeError if the process has no home."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return Path(folder) / "octavo" / f"attention-{digest[:16]}.json"


def read(key: Mapping[str, Any], names: Sequence[str]) -> tuple[Times, str] | None:
    """(times, where they are from) of the file; None if there is none, or none that can be used."""
    try:
        path = cache_file(key)
        kept = json.loads(path.read_text())
        times = {phase: {name: kept["us"][phase][name] for name in names} for phase in get_args(Phase)}
        if kept["key"] != key or not all(us is None or us > 0 for row in times.values() for us in row.values()):
            raise ValueError("it is of something else")
        return times, f"measured {kept['measured']}, {path}"
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
        log.warning("attention is measured anew, as what was measured cannot be read: %s", error)
        return None


def write(key: Mapping[str, Any], times: Times) -> str:
    """Keep the times, all of them or nothing. Returns where, or why not, in words."""
    kept = {"key": key, "measured": date.today().isoformat(), "us": times}
    try:
        path = cache_file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Several ranks write the same file at once: each its own first, which then takes the name.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump(kept, file, indent=1)
        os.replace(file.name, path)
    except (OSError, RuntimeError) as error:
        log.warning("attention will be measured again at the next start, as the times cannot be kept: %s", error)
        return f"not kept: {error}"
    return f"kept in {path}"
