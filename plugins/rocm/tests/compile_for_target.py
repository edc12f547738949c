"""Compile every Triton kernel of the plugin for an AMD target that is not here. Run as a script, not interpreted.

Triton's driver is a stand-in: it says that there is a card of the target, loads nothing and launches nothing. So the
plugin runs as it would, over the host's memory, and each launch compiles its kernel down to a code object. Prints one
JSON object: for each kernel the number of variants, the most LDS, the matrix instructions that were found, and how its
programs meet (see `counted_in`).

    python compile_for_target.py gfx942 few       each kernel, in bfloat16: all head sizes, a few numbers of tokens
    python compile_for_target.py gfx942 all       beside these: float16, an fp8 cache, windows, soft caps, sinks
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from octavo.ops.bind import KernelTable
from octavo.ops.catalogue import CATALOGUE
from octavo.plugin import AttentionSpec, AttnBatch, AttnLayer, BatchLimits, Device, KVView, LinearSpec, QuantScheme
from octavo.plugin.torch import core_scheme
from octavo_rocm import products
from octavo_rocm.attention import attention_for
from octavo_rocm.fp8 import FnuzLinear, Fp8Linear
from octavo_rocm.int4 import Int4Linear
from octavo_rocm.linear import TritonLinear
from octavo_rocm.ops import register
from octavo_rocm.targets import TARGETS, Target

found: dict[str, dict[str, Any]] = {}
FEW = sys.argv[2:] == ["few"]
DTYPES = ("bfloat16",) if FEW else ("bfloat16", "float16")
N, K = 2048, 1024
UNITS = 120


class Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 30}  # whether it fits is judged by who reads the report

    def load_binary(self, name: str, binary: bytes, *rest: object) -> tuple[object, object, int, int, int]:
        assert binary[:4] == b"\x7fELF", f"{name} is no code object"
        return object(), name, 32, 0, 1024


class Driver:
    """As much of a Triton driver as compiling and launching ask for."""

    def __init__(self, target: Target) -> None:
        self.utils = Utils()
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", self._target.name, self._target.wave)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        return lambda *args: None


class Card:
    """A device that says it is a card of the target, over the host's memory."""

    type = "cuda"
    index = 0
    torch_device = torch.device("cpu")

    def __init__(self, target: Target) -> None:
        self.arch = target.name

    def describe(self) -> Any:
        return SimpleNamespace(name="AMD", compute_units=UNITS)


def note(*, src: Any, metadata: Any, metadata_group: Any, **rest: Any) -> None:
    """What a compilation gave."""
    name = src.fn.__name__
    entry = found.setdefault(
        name, {"variants": 0, "shared": 0, "matrix": [], "meetings": 0, "early": 0, "published": 0}
    )
    entry["variants"] += 1
    entry["shared"] = max(entry["shared"], metadata["shared"])
    [path] = [path for file, path in metadata_group.items() if file.endswith(".amdgcn")]
    with open(path) as file:
        text = file.read()
    entry["matrix"] = sorted({*entry["matrix"], *re.findall(r"v_(?:mfma|wmma)_\w+", text)})
    meetings, early = counted_in(text)
    entry["meetings"] += meetings
    entry["early"] += early
    # What `octavo_rocm.tuning.wait_for_stores` leaves, and the barrier behind it.
    entry["published"] += len(re.findall(r"#ASMSTART\s+s_waitcnt vmcnt\(0\)(?:(?!_store_)[\s\S])*?s_barrier", text))


STORE = re.compile(r"\s(?:buffer|global|flat)_store_")
STORED = re.compile(r"\ss_waitcnt [^;]*vmcnt\(0\)|\ss_waitcnt_vscnt null, 0x0|\ss_wait_storecnt(?:_dscnt)? 0x0")
BARRIER = re.compile(r"\ss_barrier\b|\ss_barrier_signal\b")
COUNT = re.compile(r"\sglobal_atomic_add")


def counted_in(text: str) -> tuple[int, int]:
    """(how often a thread counts its program in, how often so although the barrier before it was reached with stores
    on their way). Read from top to bottom, as the compiler lays products out: the attention kernel counts in a loop."""
    meetings = early = 0
    on_their_way = at_barrier = False
    for line in text.splitlines():
        if STORE.search(line):
            on_their_way = True
        elif STORED.search(line):
            on_their_way = False
        elif BARRIER.search(line):
            at_barrier = on_their_way
        elif COUNT.search(line):
            meetings += 1
            early += at_barrier
    return meetings, early


def ops(device: Device) -> Iterator[None]:
    """Every op of the catalogue that has a kernel, on its samples."""
    table = KernelTable()
    register(table, device, triton=True, hip=False)
    for name, op in CATALOGUE.items():
        for provider in table.providers(name):
            for dtype in DTYPES:
                for sample in op.samples(dtype):
                    provider.fn(*(x.clone() if isinstance(x, torch.Tensor) else x for x in sample))
                    yield


def linears(device: Device, target: Target) -> Iterator[None]:
    """Products of every number of tokens that has a cut of its own."""
    for dtype in DTYPES:
        spec = LinearSpec(in_features=K, out_features=N, act_dtype=dtype, out_dtype=dtype)
        weight = torch.zeros(N, K, dtype=getattr(torch, dtype))
        packed: Any = TritonLinear().prepare({"weight": weight}, spec, device)
        for tokens in (1, 5, products.MOST_TOKENS) if FEW else range(1, products.MOST_TOKENS + 1):
            TritonLinear().apply(weight[:tokens], packed, None)
            yield
        scheme = core_scheme("online:int4")
        for gate in (None, "silu"):
            int4 = LinearSpec(in_features=K, out_features=N, act_dtype=dtype, out_dtype=dtype, scheme=scheme, gate=gate)
            kernel = Int4Linear.with_hip(False)()
            packed = kernel.prepare({"weight": weight}, int4, device)
            for tokens in (1, 17, 257) if FEW else (1, 2, 16, 17, 64, 256, 257):
                kernel.apply(weight[:tokens], packed, None)
                yield
    scheme = QuantScheme(
        weight="fp8_e4m3", act="fp8_e4m3", granularity="channel", dynamic_act=True, packing="online:fp8"
    )
    for gate in (None, "silu"):
        spec = LinearSpec(
            in_features=K, out_features=N, act_dtype="bfloat16", out_dtype="bfloat16", scheme=scheme, gate=gate
        )
        taken = [cls for cls in (FnuzLinear, Fp8Linear) if cls.supports(spec, device).ok]
        assert len(taken) == bool(target.fp8)
        if not taken:
            return
        fp8 = taken[0]()
        weight = torch.zeros(N, K, dtype=torch.bfloat16)
        packed = fp8.prepare({"weight": weight}, spec, device)
        assert packed.weight.dtype == getattr(torch, target.fp8_dtype or "")
        for tokens in (1, 9, 33) if FEW else (1, 2, 8, 9, 33, 64):
            fp8.apply(weight[:tokens], packed, None)
            yield
        if gate:
            fp8.apply_scaled(weight[:9], packed, None)


def attention(device: Device) -> Iterator[None]:
    """Few and many decodes, drafts and prompts, for heads of three sizes, a window with a soft cap, an fp8 cache."""
    limits = BatchLimits(max_num_tokens=2048, max_num_seqs=64, max_model_len=4096)
    kinds: list[dict[str, Any]] = [
        {"head_dim": 64},
        {"head_dim": 128},
        {"head_dim": 256},
        {"head_dim": 128, "dtype": "float16", "kv_dtype": "float16"},
        {"head_dim": 128, "kv_dtype": "float8_e4m3fn"},
        {"head_dim": 64, "window": 100, "softcap": 30.0},
        {"head_dim": 64, "sinks": True},
    ]
    for kind in kinds[:3] if FEW else kinds:
        fields = {"num_heads": 8, "num_kv_heads": 2, "scale": 0.1, "dtype": "bfloat16", "kv_dtype": "bfloat16"}
        spec = AttentionSpec(**fields | {"block_size": 16} | kind)  # type: ignore[arg-type]
        cls = attention_for(device)
        assert cls.supports(spec, device).ok
        backend: Any = cls(spec, limits, device)
        for counts in ([1] * 4, [200, 1, 1]) if FEW else ([1] * 4, [1] * 40, [3] * 4, [200, 1, 1], [2040]):
            attend(backend, spec, counts, limits)
            yield


def attend(backend: Any, spec: AttentionSpec, counts: list[int], limits: BatchLimits) -> None:
    """One layer of a step with so many new tokens in each sequence."""
    num_tokens, num_seqs = sum(counts), len(counts)
    starts = np.append(0, np.cumsum(counts)).astype(np.int32)
    lens = np.full(num_seqs, limits.max_model_len, np.int32)
    batch = AttnBatch(
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_decodes=num_seqs if max(counts) == 1 else 0,
        max_q_len=max(counts),
        max_kv_len=limits.max_model_len,
        q_starts=torch.from_numpy(starts),
        kv_lens=torch.from_numpy(lens),
        block_table=torch.zeros((num_seqs, limits.max_model_len // spec.block_size + 1), dtype=torch.int32),
        slots=torch.zeros(num_tokens, dtype=torch.int64),
        q_starts_host=starts,
        kv_lens_host=lens,
    )
    dtype, kv_dtype = getattr(torch, spec.dtype), getattr(torch, spec.kv_dtype)
    q = torch.zeros(num_tokens, spec.num_heads, spec.head_dim, dtype=dtype)
    k = torch.zeros(num_tokens, spec.num_kv_heads, spec.head_dim, dtype=dtype)
    cache = torch.zeros(8, spec.num_kv_heads, spec.block_size, spec.head_dim, dtype=kv_dtype)
    sinks = torch.zeros(spec.num_heads) if spec.sinks else None
    plan = backend.plan(batch, graph=False)
    backend.start_step(plan)
    backend.run(AttnLayer(index=0, sinks=sinks), q, k, k, KVView(k=cache, v=cache), plan, torch.empty_like(q))


def main(name: str) -> None:
    target = TARGETS[name]
    driver.set_active(Driver(target))
    triton.knobs.compilation.listener = note
    device: Any = Card(target)
    for work in (ops(device), linears(device, target), attention(device)):
        for _ in work:
            pass
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
