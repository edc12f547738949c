"""Putting the pieces together: a platform's own executor, refused ranks, and who wins over a platform's patches."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from octavo import LLM, SamplingParams
from octavo.config import make_config
from octavo.errors import ConfigError, UnsupportedModelError
from octavo.launch import activate, build_engine
from octavo.plugin import ConfigPatch, KVGroup, PlatformInfo, Probe, hookimpl
from octavo.plugin.torch import TorchDevice
from octavo.testing.scripted import ScriptedExecutor
from octavo.testing.tiny import make_model

ANSWER = [11, 12, 13, 14, 15]


class WholeExecutor:
    """A platform that runs models in its own way: it brings an executor and no kernel."""

    @hookimpl
    def platform_info(self) -> PlatformInfo:
        return PlatformInfo(name="whole", api="1.0", version="1", device_type="none")

    @hookimpl
    def platform_probe(self) -> Probe:
        return Probe(available=True, score=60)

    @hookimpl
    def platform_configure(self) -> list[ConfigPatch]:
        return [ConfigPatch(field="scheduler.max_num_seqs", value=3, reason="three is plenty")]

    @hookimpl
    def make_device(self) -> TorchDevice:
        return TorchDevice("cpu")

    @hookimpl
    def make_executor(self) -> ScriptedExecutor:
        return ScriptedExecutor(ANSWER, kv_groups=(KVGroup(block_size=16, num_blocks=20),), vocab_size=384)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("whole_executor")
    module.platform = WholeExecutor()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "whole_executor", module)
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "whole=whole_executor:platform")
    return "whole"


def test_a_platform_may_bring_a_whole_executor(whole: str, tmp_path: Path) -> None:
    make_model(tmp_path)
    with LLM(str(tmp_path), platform=whole, max_model_len=128) as llm:
        outputs = llm.generate([[5, 6], [7, 8, 9]], SamplingParams(temperature=0.0, max_tokens=4))
        assert [o.outputs[0].token_ids for o in outputs] == [ANSWER[:4]] * 2
        assert llm.info.num_kv_blocks == 20


def test_a_users_choice_wins_over_a_platforms_patch(whole: str) -> None:
    patched, _ = activate(make_config(platform=whole))
    assert patched.scheduler.max_num_seqs == 3
    kept, _ = activate(make_config(platform=whole, max_num_seqs=7))
    assert kept.scheduler.max_num_seqs == 7


def test_more_ranks_than_the_platform_has_are_refused(whole: str) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 2: the platform runs at most 1 rank"):
        activate(make_config(platform=whole, tensor_parallel_size=2))


def test_an_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", tokenizer=False)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "gpt2"'))
    with pytest.raises(UnsupportedModelError, match=r"'gpt2' is not supported; supported: .*llama"):
        build_engine(make_config(model=str(tmp_path), platform="cpu", dtype="float32"))


@pytest.mark.parametrize(("asked", "message"), [(512, "at most 256 positions"), (1, "at least 2")])
def test_a_context_that_the_model_does_not_have_is_refused(asked: int, message: str, tmp_path: Path) -> None:
    make_model(tmp_path, "llama", tokenizer=False)
    with pytest.raises(ConfigError, match=message):
        build_engine(make_config(model=str(tmp_path), platform="cpu", max_model_len=asked))
