"""Whole models on the plugin's table of kernels without a card: Triton interpreted on the host, a step run again, not
replayed. Everything but the recording itself is as on a gfx942: its sizes, padded shapes, plans made once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("interpreting Triton would hide the card from the other tests", allow_module_level=True)
os.environ.setdefault("TRITON_INTERPRET", "1")

from octavo import LLM, SamplingParams
from octavo.plugin import BatchKey, BatchLimits, Device, MemInfo, PlatformCaps, PlatformInfo, Probe, hookimpl
from octavo.plugin import recording as recorder
from octavo.plugin.recording import recorded_shapes
from octavo.plugin.torch import TorchDevice
from octavo.testing.tiny import make_model
from octavo_rocm.linear import HipblasltLinear
from octavo_rocm.ops import register

PROMPTS = [[3, 4, 5, 6, 7], [9, 8, 7], [11] * 20]


class HostCard(TorchDevice):
    """The host, as if it were a gfx942 to the kernels."""

    arch = "gfx942:sramecc+:xnack-"

    def __init__(self) -> None:
        super().__init__("cpu", memory=lambda: MemInfo(total=1 << 30, free=1 << 30))
        self.type = "cuda"


class Again:
    """A graph runner that calls the step it was given, once recorded, for every replay."""

    used: ClassVar[set[BatchKey]] = set()

    def keys(self, limits: BatchLimits) -> Sequence[BatchKey]:
        return recorded_shapes(limits)

    def prepare(self, key: BatchKey, fn: Callable[[], Any]) -> Callable[[], Any]:
        fn()

        def step() -> Any:
            self.used.add(key)
            return fn()

        return step

    def run(self, handle: Callable[[], Any]) -> Any:
        return handle()

    def close(self) -> None:
        """Nothing is held."""


class Interpreted:
    """The ROCm plugin's kernels under another name, on the host."""

    @hookimpl
    def platform_info(self) -> PlatformInfo:
        return PlatformInfo(name="interpreted", api="0.1", version="1", device_type="cpu")

    @hookimpl
    def platform_probe(self) -> Probe:
        return Probe(available=True, score=1)

    @hookimpl
    def platform_caps(self) -> PlatformCaps:
        return PlatformCaps(dtypes=("float32",), default_dtype="float32", streams=True, triton=True, graph="capture")

    @hookimpl
    def make_device(self) -> Device:
        return HostCard()

    @hookimpl
    def register_kernels(self, registry: Any, device: Device) -> None:
        register(registry, device, triton=True, hip=False)

    @hookimpl
    def make_graph_runner(self) -> Again:
        return Again()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_recorded_shapes_give_the_tokens_of_cores_own_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_type: str
) -> None:
    module = ModuleType("interpreted")
    module.platform = Interpreted()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "interpreted", module)
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "interpreted=interpreted:platform,refdev=octavo.testing.refdev")
    monkeypatch.setattr(recorder, "LONG_TOKENS", 16)
    monkeypatch.setattr(recorder, "FEW_SEQS", 2)
    products: list[int] = []
    multiply = HipblasltLinear.apply

    def counted(self: Any, x: Any, w: Any, bias: Any) -> Any:
        products.append(x.shape[0])
        return multiply(self, x, w, bias)

    monkeypatch.setattr(HipblasltLinear, "apply", counted)
    model = str(make_model(tmp_path, model_type, tokenizer=False))
    options = {"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 32, "num_kv_blocks": 40}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    tokens = {}
    for platform in ("refdev", "interpreted"):
        with LLM(model, platform=platform, dtype="float32", skip_tokenizer_init=True, **options) as llm:
            Again.used.clear()
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            outputs += llm.generate([[12] * 25], params, use_tqdm=False)
        tokens[platform] = [list(o.outputs[0].token_ids) for o in outputs]
    assert tokens["interpreted"] == tokens["refdev"]
    assert products, "this plugin's products served the model"
    assert {key.max_q_len for key in Again.used} == {0, 1}, "prompts and decoding both went through recorded shapes"
