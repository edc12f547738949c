"""The plugin's kernels and step shapes without a card: Triton interpreted on the host, a step run again instead of
replayed. Everything but the recording itself is as on a card: padded shapes, plans made once, persistent inputs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("interpreting Triton would hide the card from the other tests", allow_module_level=True)
os.environ.setdefault("TRITON_INTERPRET", "1")

from octavo import LLM, SamplingParams
from octavo.ops.bind import KernelTable
from octavo.ops.catalogue import CATALOGUE
from octavo.plugin import BatchKey, BatchLimits, Device, MemInfo, PlatformCaps, PlatformInfo, Probe, hookimpl, recording
from octavo.plugin.recording import recorded_shapes
from octavo.plugin.torch import TorchDevice
from octavo.testing.tiny import make_model
from octavo_cuda.ops import register, register_triton

PROMPTS = [[3, 4, 5, 6, 7], [9, 8, 7], [11] * 20]


def host() -> TorchDevice:
    return TorchDevice("cpu", memory=lambda: MemInfo(total=1 << 30, free=1 << 30))


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
    """The CUDA plugin's kernels under another name, on the host."""

    @hookimpl
    def platform_info(self) -> PlatformInfo:
        return PlatformInfo(name="interpreted", api="1.0", version="1", device_type="cpu")

    @hookimpl
    def platform_probe(self) -> Probe:
        return Probe(available=True, score=1)

    @hookimpl
    def platform_caps(self) -> PlatformCaps:
        return PlatformCaps(dtypes=("float32",), default_dtype="float32", streams=True, triton=True, graph="capture")

    @hookimpl
    def make_device(self) -> Device:
        return host()

    @hookimpl
    def register_kernels(self, registry: Any, device: Device) -> None:
        register_triton(registry, device)

    @hookimpl
    def make_graph_runner(self) -> Again:
        return Again()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("interpreted")
    module.platform = Interpreted()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "interpreted", module)
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "interpreted=interpreted:platform")


def test_every_registered_op_is_in_the_catalogue_and_attention_can_be_recorded() -> None:
    table = KernelTable()
    register(table, host(), triton=True)
    registered = {name for name in CATALOGUE if table.providers(name)}
    assert registered >= {"rms_norm", "add_rms_norm", "qkv_norm_rope", "act_and_mul", "sample", "greedy"}
    assert [cls.name for cls in table.classes("linear")] == ["fp8", "int4", "triton", "cublas"]
    assert [cls.name for cls in table.classes("attention")] == ["auto", "fa3", "flashinfer", "triton"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_recorded_shapes_give_the_tokens_of_the_cpu_platform(
    interpreted: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_type: str
) -> None:
    monkeypatch.setattr(recording, "LONG_TOKENS", 16)
    monkeypatch.setattr(recording, "FEW_SEQS", 2)
    model = str(make_model(tmp_path, model_type, tokenizer=False))
    options = {"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 32, "num_kv_blocks": 40}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    tokens = {}
    Again.used.clear()
    for platform in ("cpu", "interpreted"):
        with LLM(model, platform=platform, dtype="float32", skip_tokenizer_init=True, **options) as llm:
            Again.used.clear()
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            outputs += llm.generate([[12] * 25], params, use_tqdm=False)
        tokens[platform] = [list(o.outputs[0].token_ids) for o in outputs]
    assert tokens["interpreted"] == tokens["cpu"]
    assert {key.max_q_len for key in Again.used} == {0, 1}, "prompts and decoding both went through recorded shapes"
    assert {key.num_seqs for key in Again.used if key.num_tokens >= 16} == {2, 3}, "few long prompts have their own"
