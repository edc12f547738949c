"""Plugins that were written for older plugin APIs still load, whatever has been added since."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.active_platform import ActivePlatform
from octavo.config import EngineConfig
from octavo.discovery import select
from octavo.extensions import load_extensions
from octavo.ops.bind import KernelTable
from octavo.plugin import KVSpec, LinearSpec
from octavo.testing.tiny import make_model

FOLDER = Path(__file__).parent / "plugin_api_1_0"
SPEC = KVSpec(kind="full", num_kv_heads=2, head_dim=8, block_size=32, dtype="float32")
LINEAR = LinearSpec(in_features=8, out_features=4, act_dtype="float32", out_dtype="float32")


@pytest.fixture
def vintage(monkeypatch: pytest.MonkeyPatch) -> ActivePlatform:
    monkeypatch.syspath_prepend(str(FOLDER))
    return select("vintage", options={"speed": "3"}, extra={"vintage": "vintage_plugin"})


def test_its_declarations_are_understood(vintage: ActivePlatform) -> None:
    assert vintage.caps.extras == {"speed": 3}
    config, lines = vintage.configure(EngineConfig())
    assert config.cache.block_size == 32
    assert lines == ["cache.block_size = 32: tiles of 32"]
    env = vintage.launch(config).env
    assert env is not None
    assert env(1, 2) == {"VINTAGE_RANK": "1"}


def test_its_kernels_are_bound(vintage: ActivePlatform) -> None:
    device = vintage.make_device(0, EngineConfig())
    table = KernelTable()
    vintage.register_kernels(table, device)
    assert table.linear_kernel(LINEAR, device).name == "vintage"
    table.bind("greedy", dtype="float32", device=device)
    assert [choice.provider for choice in table.choices] == ["vintage", "vintage"]
    assert vintage.kv_layout(SPEC, device).order == "BNHC"


def test_it_serves_a_model_with_the_tokens_of_todays_platforms(
    tmp_path: Path, vintage: ActivePlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path, "llama", seed=1, tokenizer=False)
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "vintage=vintage_plugin,refdev=octavo.testing.refdev")
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "num_kv_blocks": 16}
    answers = {}
    for platform in (vintage.name, "refdev"):
        with LLM(str(folder), platform=platform, skip_tokenizer_init=True, **settings) as llm:
            outputs = llm.generate([[17, 40, 3], list(range(20, 60))], greedy, use_tqdm=False)
        answers[platform] = [output.outputs[0].token_ids for output in outputs]
    assert answers["vintage"] == answers["refdev"]


def test_its_extensions_are_registered(vintage: ActivePlatform) -> None:
    registry = load_extensions(vintage)
    assert registry.models["vintage_lm"] == "vintage_models:VintageLM"
    assert "vintage_bits" in registry.quant_formats
