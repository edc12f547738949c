"""Launch, on a card that is not here, kernels that were compiled ahead for it. Run as a script, not interpreted.

Triton's driver is a stand-in: it says that there is a card of compute capability 9.0, loads nothing, and writes down
what is launched. Prints one JSON object: kernels compiled ahead, and of the launches how many there were, how many
kernels they had to compile, and the error of a launch whose kernel could not be loaded.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from octavo.plugin import (
    AttentionSpec,
    AttnLayer,
    Batch,
    BatchKey,
    BatchLimits,
    KVGroup,
    KVView,
    LinearSpec,
    PlatformCaps,
)
from octavo.plugin.recording import recorded_shapes
from octavo.runner.buckets import Shapes
from octavo.runner.inputs import InputBuffers, RequestTable, Staging
from octavo.triton.attention_backend import TritonAttention
from octavo.triton.gemv import GemvConfig
from octavo.triton.skinny import SkinnyConfig
from octavo_cuda.compile_ahead import CompileAhead
from octavo_cuda.linear import TritonLinear
from octavo_cuda.overlap import overlap_for
from octavo_cuda.tuning import tuning_for

N, K = 256, 128
CARD = "NVIDIA H200"
LIMITS = BatchLimits(max_num_tokens=64, max_num_seqs=20, max_model_len=256)
SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_dim=64, scale=0.1, dtype="bfloat16", kv_dtype="bfloat16", block_size=16
)
BROKEN = "_scan_kernel"

launched: list[str] = []
compiled: list[str] = []


class Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, name: str, *rest: object) -> tuple[object, object, int, int, int]:
        if name == BROKEN:
            raise RuntimeError(f"{name} cannot be loaded")
        return object(), name, 32, 0, 1024


class Driver:
    """As much of a Triton driver as compiling and launching ask for."""

    utils = Utils()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        return lambda *args: launched.append(src.fn.__name__)


class Card:
    """A device that says it is a card, over the host's memory."""

    type = "cuda"
    torch_device = torch.device("cpu")
    capability = (9, 0)

    def describe(self) -> Any:
        return SimpleNamespace(name=CARD, compute_units=132)

    def activate(self) -> None:
        """Nothing to do."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def attend_recorded(backend: Any, key: BatchKey) -> None:
    """One layer of a step of this shape, in the memory and with the bounds of a recording by core's runner."""
    device: Any = Card()
    shapes = Shapes.of(PlatformCaps(graph="capture"), LIMITS, recorded_shapes(LIMITS))
    table = RequestTable(LIMITS, [KVGroup(block_size=SPEC.block_size, num_blocks=8, window=None)], device)
    buffers = InputBuffers(shapes.max_tokens, shapes.max_seqs, table, device)
    num_seqs = min(key.num_seqs, key.num_tokens, LIMITS.max_num_seqs)
    ones = np.ones(num_seqs, np.int32)
    batch = Batch(step=-1, rows=0 * ones, starts=0 * ones, counts=ones, samples=ones.astype(np.bool_))
    bounds = replace(
        buffers.send(batch, key, Staging(device, shapes.max_seqs)),
        num_decodes=key.num_seqs if key.max_q_len == 1 else 0,
        max_q_len=key.max_q_len or key.num_tokens,
        max_kv_len=LIMITS.max_model_len,
    )
    plan = backend.plan(buffers.views(key, 0).attention(bounds)[0], graph=True)
    backend.start_step(plan)
    cache = torch.zeros(8, SPEC.num_kv_heads, SPEC.block_size, SPEC.head_dim, dtype=torch.bfloat16)
    q = torch.zeros(key.num_tokens, SPEC.num_heads, SPEC.head_dim, dtype=torch.bfloat16)
    backend.run(AttnLayer(index=0), q, None, None, KVView(k=cache, v=cache), plan, torch.empty_like(q))


def main() -> None:
    driver.set_active(Driver())

    def note(*, src: Any, **rest: Any) -> None:
        compiled.append(threading.current_thread().name)

    triton.knobs.compilation.listener = note
    ahead, device = CompileAhead(Card()), Card()
    cuts: dict[Any, Any] = {
        (N, K, False, 1): GemvConfig(block_n=8, block_k=128, dot=False),
        (N, K, False, 4): GemvConfig(block_n=16, block_k=64, split_k=2),
        (N, K, False, 16): SkinnyConfig(block_n=32, block_k=64, programs=5),
        (N, K, False, 32): SkinnyConfig(block_n=32, block_k=64, programs=5),
    }
    spec = LinearSpec(in_features=K, out_features=N, act_dtype="bfloat16", out_dtype="bfloat16", max_tokens=64)
    kernel = ahead.linear(TritonLinear.with_table(cuts))()
    weight = torch.zeros(N, K, dtype=torch.bfloat16)
    packed = [kernel.prepare({"weight": weight.clone()}, spec, device) for _ in range(2)]
    overlap = overlap_for(Card.capability)
    cls = TritonAttention.with_tuning(tuning_for(CARD).attention, overlap)
    backend = ahead.attention(cls)(SPEC, LIMITS, device)
    ahead.finish()

    for tokens in range(1, 33):
        kernel.apply(torch.zeros(tokens, K, dtype=torch.bfloat16), packed[tokens % 2], None)
    for key in recorded_shapes(LIMITS):
        attend_recorded(backend, key)

    late = [name for name in compiled if not name.startswith("octavo-compile")]
    num_ahead = len(compiled) - len(late)

    from octavo.triton.sampling import greedy

    silent = replace(overlap, compile_only=True)
    logits = torch.zeros(4, 1000, dtype=torch.bfloat16)
    ahead.submit("greedy", lambda: greedy(logits, overlap=silent))
    ahead.finish()
    try:
        greedy(logits, overlap=overlap)
        error = ""
    except RuntimeError as raised:
        error = str(raised)
    print(
        json.dumps(
            {
                "ahead": num_ahead,
                "late": len(late),
                "launches": {name: launched.count(name) for name in sorted(set(launched))},
                "error": error,
            }
        )
    )


if __name__ == "__main__":
    main()
