"""What is compiled ahead: every product and attention once, as steps launch it; and nothing is launched meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("interpreting Triton would hide the card from the other tests", allow_module_level=True)
os.environ.setdefault("TRITON_INTERPRET", "1")

from octavo.plugin import AttentionSpec, BatchKey, BatchLimits, Device, LinearSpec
from octavo.triton import attention_backend
from octavo.triton.attention_backend import TritonAttention
from octavo.triton.linear_fp8 import SCHEME
from octavo.triton.overlap import Overlap
from octavo_cuda import compile_ahead
from octavo_cuda.compile_ahead import CompileAhead
from octavo_cuda.fp8 import Fp8Linear
from octavo_cuda.graphs import CudaGraphs
from octavo_cuda.tuning import tuning_for

SCRIPT = Path(__file__).with_name("launch_compiled_ahead.py")
LIMITS = BatchLimits(max_num_tokens=256, max_num_seqs=100, max_model_len=256)
ATTENTION = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_dim=64, scale=0.1, dtype="bfloat16", kv_dtype="bfloat16", block_size=16
)
LINEAR = LinearSpec(in_features=32, out_features=64, act_dtype="bfloat16", out_dtype="bfloat16", max_tokens=100)


class Card:
    """A device that says it is a card, over the host's memory."""

    type = "cuda"
    torch_device = torch.device("cpu")
    capability = (9, 0)

    def describe(self) -> Any:
        return SimpleNamespace(name="NVIDIA H200", compute_units=132)

    def activate(self) -> None:
        """Nothing to do."""


@dataclass(frozen=True)
class Packed:
    weight: torch.Tensor
    overlap: Overlap


class Noting:
    """A linear kernel that notes what it is applied to."""

    name: ClassVar[str] = "noting"
    applied: ClassVar[list[tuple[torch.Tensor, Packed, torch.Tensor | None]]] = []

    def prepare(self, weights: Mapping[str, torch.Tensor], spec: LinearSpec, device: Device) -> Packed:
        return Packed(weights["weight"], Overlap())

    def apply(self, x: torch.Tensor, w: Packed, bias: torch.Tensor | None) -> torch.Tensor:
        self.applied.append((x, w, bias))
        return x


class Kernel:
    """Stands for one of Triton's: notes the constants with which it is compiled or launched."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def warmup(self, *args: Any, grid: Any, **constants: Any) -> None:
        assert all(a.device.type == "meta" for a in args if isinstance(a, torch.Tensor))
        self.compiled.append(tuple(sorted(constants.items(), key=str)))

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **constants: self.launched.append(tuple(sorted(constants.items(), key=str)))


def test_a_product_is_tried_once_for_each_spec_without_memory() -> None:
    Noting.applied.clear()
    kernel = CompileAhead(Card()).linear(Noting)()
    assert kernel.name == "noting"
    weight = torch.randn(64, 32)
    for _ in range(3):
        packed = kernel.prepare({"weight": weight}, LINEAR, Card())
        assert packed.weight is weight
        assert not packed.overlap.compile_only
    assert [x.shape for x, _, _ in Noting.applied] == [(tokens, 32) for tokens in (1, 2, 4, 8, 16, 32, 64)]
    assert all(x.is_meta and w.weight.is_meta and w.overlap.compile_only for x, w, _ in Noting.applied)
    assert all(bias is None for _, _, bias in Noting.applied)
    kernel.prepare({"weight": weight}, replace(LINEAR, bias=True), Card())
    assert len(Noting.applied) == 14
    assert all(bias is not None and bias.shape == (64,) for _, _, bias in Noting.applied[7:])


def test_products_in_fp8_are_tried_on_both_sides_of_the_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.triton import gemv, quantize, skinny

    kernels = {"gemv": Kernel(), "skinny": Kernel(), "quantize": Kernel()}
    for module in (gemv, skinny, quantize):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, f"_{name}_kernel", kernels[name])
    kernel = CompileAhead(Card()).linear(Fp8Linear)()
    kernel.prepare({"weight": torch.randn(64, 32)}, replace(LINEAR, scheme=SCHEME), Card())
    assert {name: len(kernel.compiled) for name, kernel in kernels.items()} == {"gemv": 4, "skinny": 3, "quantize": 3}
    assert not any(kernel.launched for kernel in kernels.values())


def test_attention_is_compiled_for_every_recorded_step_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("deal_kernel", "decode_kernel", "prefill_kernel")
    kernels = {name: Kernel() for name in names}
    for name, kernel in kernels.items():
        monkeypatch.setattr(attention_backend, name, kernel)
    cls = CompileAhead(Card()).attention(TritonAttention.with_tuning(tuning_for("NVIDIA H200").attention))
    backend = cls(ATTENTION, LIMITS, Card())
    assert cls.name == "triton"
    assert not any(kernel.launched for kernel in kernels.values())
    compiled = {name: len(kernel.compiled) for name, kernel in kernels.items()}
    assert all(compiled.values())
    cls(ATTENTION, LIMITS, Card())
    assert {name: len(kernel.compiled) for name, kernel in kernels.items()} == compiled, "layers of a kind share them"

    monkeypatch.setattr(compile_ahead, "META", torch.device("cpu"))
    for key in compile_ahead.recorded_shapes(LIMITS):
        compile_ahead.attend_step(backend, ATTENTION, LIMITS, key, graph=True)
    for name, kernel in kernels.items():
        assert kernel.launched, name
        assert set(kernel.launched) <= set(kernel.compiled), name


def test_recording_waits_for_what_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception): ...

    def stop(device: object) -> None:
        raise Stop

    finished: list[str] = []
    monkeypatch.setattr(CompileAhead, "finish", lambda self: finished.append("ahead"))
    recorder = CudaGraphs.__new__(CudaGraphs)
    recorder._ahead, recorder._device = CompileAhead(Card()), torch.device("cpu")
    recorder._backend = SimpleNamespace(current_stream=stop)
    with pytest.raises(Stop):
        recorder.prepare(BatchKey(num_tokens=1, num_seqs=1), lambda: None)
    assert finished == ["ahead"]


@pytest.mark.slow
def test_steps_launch_what_was_compiled_ahead_and_compile_nothing(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["late"] == 0
    assert found["ahead"] > 10
    assert set(found["launches"]) == {
        "_gemv_kernel",
        "_skinny_kernel",
        "deal_kernel",
        "decode_kernel",
        "prefill_kernel",
    }
    assert found["error"] == "_scan_kernel cannot be loaded"
