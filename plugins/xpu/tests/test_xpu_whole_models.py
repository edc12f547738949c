"""Whole tiny models on the simulated platform: the tokens are those of a platform without any kernel."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from octavo import LLM, SamplingParams
from octavo.plugin import Device, MemInfo, PlatformCaps, PlatformInfo, Probe, hookimpl
from octavo.plugin.torch import TorchDevice
from octavo.testing.gguf_files import write_gguf
from octavo.testing.tiny import make_model
from octavo_xpu.device import SyclDevice
from octavo_xpu.native import Kernel

PROMPTS = [[3, 4, 5, 6, 7], [9, 8, 7], [11] * 40]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 32,
    "num_kv_blocks": 40,
}


class Plain:
    """torch on the CPU and core's references, nothing else."""

    @hookimpl
    def platform_info(self) -> PlatformInfo:
        return PlatformInfo(name="plain", api="1.0", version="1", device_type="cpu")

    @hookimpl
    def platform_probe(self) -> Probe:
        return Probe(available=True, score=1)

    @hookimpl
    def platform_caps(self) -> PlatformCaps:
        return PlatformCaps(dtypes=("float32",), default_dtype="float32")

    @hookimpl
    def make_device(self) -> Device:
        return TorchDevice("cpu", memory=lambda: MemInfo(total=1 << 30, free=1 << 30))


@pytest.fixture
def launched(device: SyclDevice, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Both platforms by name, and the kernels that ran."""
    module = ModuleType("plain")
    module.platform = Plain()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "plain", module)
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "plain=plain:platform,xpu_simulated=octavo_xpu.simulated")
    names: set[str] = set()
    call = Kernel.__call__

    def noted(self: Kernel, *args: Any) -> None:
        names.add(self.name)
        call(self, *args)

    monkeypatch.setattr(Kernel, "__call__", noted)
    return names


def tokens(model: Path, platform: str) -> list[list[int]]:
    with LLM(str(model), platform=platform, **OPTIONS) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "gemma3_text", "olmo2"])
def test_a_model_gives_the_tokens_of_the_references(launched: set[str], tmp_path: Path, model_type: str) -> None:
    """Normed projections, by head and by token, windows, softcaps; prompts in chunks beside decodes."""
    model = make_model(tmp_path, model_type, tokenizer=False)
    assert tokens(model, "xpu_simulated") == tokens(model, "plain")
    assert "attention" in launched
    assert launched & {"qkv_norm_rope", "qkv_norm_rope_write", "rope"}


@pytest.mark.parametrize(("qtype", "kernel"), [("Q4_0", "int4"), ("Q8_0", "int8")])
def test_packed_weights_give_the_tokens_of_unpacked_ones(
    launched: set[str], tmp_path: Path, qtype: str, kernel: str
) -> None:
    folder = make_model(tmp_path, "qwen3", tokenizer=False)
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    model = write_gguf(tmp_path / f"{qtype}.gguf", AutoConfig.from_pretrained(folder), state, qtype=qtype)
    assert tokens(model, "xpu_simulated") == tokens(model, "plain")
    assert kernel in launched
