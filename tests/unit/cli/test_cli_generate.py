"""`octavo generate` and `octavo chat` over a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from octavo.cli import main
from octavo.cli.sampling import FLAGS, take_sampling
from octavo.config import CacheConfig, EngineConfig, SchedulerConfig
from octavo.engine.info import ModelInfo
from octavo.engine.loop import EngineLoop
from octavo.llm import LLM
from octavo.plugin.data import ScheduleLimits
from octavo.structured.spec import StructuredOutputs
from octavo.testing.scripted import ScriptedExecutor
from octavo.testing.tiny import make_tokenizer
from octavo.tokenizer import load_tokenizer

INFO = ModelInfo(
    model="m", served_names=("scripted",), max_model_len=128, vocab_size=384, eos_token_ids=(2,), platform="refdev"
)


@pytest.fixture
def octavo(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """octavo(*arguments, script=text, input=text) runs the command line; `octavo.configs`, `octavo.prompts` record."""
    make_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)

    def run(*arguments: str, script: str = "answer", **settings: Any) -> Result:
        def from_config(config: EngineConfig) -> LLM:
            def answer(prompt: tuple[int, ...]) -> list[int]:
                run.prompts.append(tokenizer.decode(prompt, skip_special_tokens=False))  # type: ignore[attr-defined]
                return tokenizer.encode(script)

            run.configs.append(config)  # type: ignore[attr-defined]
            engine = EngineLoop(
                ScriptedExecutor(answer, vocab_size=384, eos=2),
                cache=CacheConfig(),
                scheduler=SchedulerConfig(),
                limits=ScheduleLimits(),
                max_model_len=128,
                run_ahead=0,
            )
            return LLM.from_engine(engine, INFO, tokenizer)

        monkeypatch.setattr(LLM, "from_config", from_config)
        return CliRunner().invoke(main, arguments, **settings)

    run.configs, run.prompts = [], []  # type: ignore[attr-defined]
    return run


def test_one_prompt_is_printed_as_plain_text(octavo: Any) -> None:
    result = octavo("generate", "MODEL", "-p", "Once", "--max-num-seqs", "3", script=" upon a time")
    assert (result.exit_code, result.stdout) == (0, " upon a time\n")
    assert octavo.configs[0].model.model == "MODEL"
    assert octavo.configs[0].scheduler.max_num_seqs == 3
    assert octavo.prompts == ["Once"]


def test_prompt_comes_from_standard_input(octavo: Any) -> None:
    assert octavo("generate", input="piped").stdout == "answer\n"
    assert octavo.prompts == ["piped"]


def test_sampling_flags_reach_the_request(octavo: Any) -> None:
    result = octavo("generate", "-p", "x", "--stop", "sw", "--temperature", "0.3", "--json")
    answer = json.loads(result.stdout)
    assert answer["outputs"][0]["text"] == "an"
    assert answer["outputs"][0]["stop_reason"] == "sw"
    result = octavo("generate", "-p", "x", "--temperature", "-1")
    assert result.exit_code == 1
    assert "temperature" in result.stderr
    assert "Traceback" not in result.stderr


def test_shapes_come_as_text_or_from_a_file(octavo: Any, tmp_path: Any) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "boolean"}')
    none = {name: None for name, _, _ in FLAGS} | {"stop": ()}
    given = take_sampling(none | {"json_schema": f"@{file}", "regex": None, "grammar": None})
    assert given == {"structured_outputs": StructuredOutputs(json='{"type": "boolean"}')}
    assert octavo("generate", "-p", "x", "--grammar", "@nowhere").exit_code == 2
    for flags, says in (
        (["--json-schema", '{"type": "nope"}'], "type"),
        (["--json-schema", "{}", "--regex", "a"], "exactly one"),
        (["--regex", "a"], "not served by this engine"),  # a scripted one
    ):
        result = octavo("generate", "-p", "x", *flags)
        assert result.exit_code == 1
        assert says in result.stderr


def test_several_answers_are_numbered(octavo: Any) -> None:
    assert octavo("generate", "-p", "x", "-n", "2").stdout == "[0] answer\n[1] answer\n"


def test_chat_keeps_the_conversation_until_it_is_cleared(octavo: Any) -> None:
    result = octavo("chat", "--system", "Be brief.", input="one\n\ntwo\n/clear\nthree\n/exit\nnever\n")
    assert result.exit_code == 0
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    one = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    assert octavo.prompts == [
        system + one,
        system + one + "answer<|im_end|>\n" + one.replace("one", "two"),
        system + one.replace("one", "three"),
    ]
    assert result.stdout.count("answer") == 3


def test_chat_goes_on_after_a_turn_that_does_not_fit(octavo: Any) -> None:
    result = octavo("chat", input="word " * 200 + "\nshort\n")
    assert result.exit_code == 0
    assert "context is 128 tokens" in result.stderr
    assert len(octavo.prompts) == 1
