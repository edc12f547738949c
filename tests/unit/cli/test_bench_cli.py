"""`octavo bench latency` and `throughput` over a scripted engine; what `serve` refuses before it asks a server."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from octavo.bench.workload import Source, make_work
from octavo.cli import main
from octavo.cli.bench_report import counter
from octavo.config import CacheConfig, EngineConfig, SchedulerConfig
from octavo.engine.info import ModelInfo
from octavo.engine.loop import EngineLoop
from octavo.llm import LLM
from octavo.plugin.data import ScheduleLimits
from octavo.testing.scripted import ScriptedExecutor
from octavo.testing.tiny import make_tokenizer
from octavo.tokenizer import load_tokenizer

VOCAB = 384
INFO = ModelInfo(
    model="m",
    served_names=("scripted",),
    max_model_len=128,
    vocab_size=VOCAB,
    eos_token_ids=(2,),
    platform="refdev",
    dtype="float32",
)


class CommandLine:
    """`octavo bench ...` over a scripted engine. prompts: what the engine was asked, in order."""

    def __init__(self, folder: Path) -> None:
        make_tokenizer(folder)
        self.tokenizer = load_tokenizer(folder)
        self.configs: list[EngineConfig] = []
        self.prompts: list[list[int]] = []

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, ["bench", *arguments])

    def load(self, config: EngineConfig) -> LLM:
        def script(prompt: tuple[int, ...]) -> list[int]:
            self.prompts.append(list(prompt))
            return [2] * 200  # the end token for ever: only who ignores it gets the asked length

        self.configs.append(config)
        engine = EngineLoop(
            ScriptedExecutor(script, vocab_size=VOCAB, eos=2),
            cache=CacheConfig(),
            scheduler=SchedulerConfig(),
            limits=ScheduleLimits(),
            max_model_len=128,
            run_ahead=0,
        )
        return LLM.from_engine(engine, INFO, None if config.model.skip_tokenizer_init else self.tokenizer)


@pytest.fixture
def octavo_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    monkeypatch.delenv("OCTAVO_DEBUG", raising=False)
    run = CommandLine(tmp_path)
    monkeypatch.setattr(LLM, "from_config", run.load)
    return run


def test_latency_measures_new_prompts_of_the_asked_shape(octavo_bench: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "latency.json"
    shape = ["--input-len", "20", "--output-len", "5", "--batch-size", "3", "--seed", "1"]
    result = octavo_bench(
        "latency", "MODEL", *shape, "--num-iters", "2", "--num-iters-warmup", "1", "--output-json", str(file)
    )
    assert result.exit_code == 0, result.output
    assert "output tokens/s" in result.stdout
    figures = json.loads(file.read_text())
    assert len(figures["latencies"]) == 2
    assert figures["avg_latency"] == pytest.approx(sum(figures["latencies"]) / 2)
    assert figures["output_throughput"] == pytest.approx(15 / figures["avg_latency"])
    assert (figures["platform"], figures["batch_size"], figures["input_len"]) == ("refdev", 3, 20)
    assert octavo_bench.configs[0].model.model == "MODEL"
    assert [len(p) for p in octavo_bench.prompts] == [20] * 9
    assert len({tuple(p) for p in octavo_bench.prompts}) == 9, "a repeated prompt would be cached"
    source = Source(1, ids=(10, VOCAB))
    assert octavo_bench.prompts[3:] == [source.fixed(20, 5).prompt for _ in range(6)]


def test_latency_of_a_batch_that_cannot_run_at_once_is_refused_before_loading(octavo_bench: CommandLine) -> None:
    result = octavo_bench("latency", "--batch-size", "9", "--max-num-seqs", "8")
    assert result.exit_code == 1
    assert "--max-num-seqs" in result.stderr
    assert octavo_bench.configs == []


def test_throughput_counts_every_token_once(octavo_bench: CommandLine) -> None:
    flags = ["--num-prompts", "6", "--input-len", "30", "--output-len", "7", "--seed", "5", "--num-warmups", "2"]
    result = octavo_bench("throughput", *flags, "--json", "--skip-tokenizer-init")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert (figures["num_requests"], figures["total_input_tokens"], figures["total_output_tokens"]) == (6, 180, 42)
    assert figures["total_num_tokens"] == 222
    assert figures["total_cached_tokens"] == 0
    assert figures["engine_args"] == {"seed": 5, "skip_tokenizer_init": True}
    assert figures["tokens_per_second"] == pytest.approx(222 / figures["elapsed_time"])
    assert figures["requests_per_second"] == pytest.approx(6 / figures["elapsed_time"])
    work = make_work("random", num_prompts=6, input_len=30, output_len=7, seed=5, vocab_size=VOCAB)
    assert octavo_bench.prompts[2:] == [w.prompt for w in work]


def test_throughput_of_conversations_uses_the_models_tokenizer(octavo_bench: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    turns = [{"from": "human", "value": "How many pages?"}, {"from": "gpt", "value": "sixteen pages"}]
    path.write_text(json.dumps([{"conversations": turns}]))
    flags = ["--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "1", "--num-warmups", "0"]
    result = octavo_bench("throughput", *flags)
    assert result.exit_code == 0, result.output
    assert octavo_bench.prompts == [octavo_bench.tokenizer.encode("How many pages?")]
    assert f"output tokens    {len(octavo_bench.tokenizer.encode('sixteen pages'))}" in result.stdout
    result = octavo_bench("throughput", *flags, "--skip-tokenizer-init")
    assert result.exit_code == 1
    assert "skip_tokenizer_init" in result.stderr


def test_work_that_does_not_fit_the_model_is_an_error(octavo_bench: CommandLine) -> None:
    result = octavo_bench("throughput", "--num-prompts", "1", "--input-len", "120", "--output-len", "20")
    assert result.exit_code == 1
    assert "context is 128 tokens" in result.stderr


def test_settings_that_contradict_are_refused_before_loading(octavo_bench: CommandLine) -> None:
    result = octavo_bench("throughput", "--dataset-name", "skewed", "--output-len", "5")
    assert result.exit_code == 1
    assert "output_len has no meaning for skewed" in result.stderr
    result = octavo_bench("latency", "--output-json", "/nowhere/at/all.json")
    assert result.exit_code == 2
    assert "/nowhere/at does not exist" in result.stderr
    assert octavo_bench.configs == []


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--base-url", "localhost:1"], "base_url"),
        (["--goodput", "itl:3"], "goodput"),
        (["--metric-percentiles", "200"], "metric_percentiles"),
        (["--endpoint", "/v1/chat/completions", "--model", "m"], "give a tokenizer"),
        (["--dataset-name", "skewed", "--input-len", "4"], "input_len has no meaning"),
        (["--base-url", "http://127.0.0.1:9"], "is the server running?"),
        (["--base-url", "http://127.0.0.1:9", "--model", "m"], "does not answer a first request: cannot connect"),
    ],
)
def test_serve_says_what_is_wrong_in_one_line(octavo_bench: CommandLine, flags: list[str], complaint: str) -> None:
    result = octavo_bench("serve", "--num-prompts", "1", "--input-len", "4", *flags)
    assert result.exit_code == 1
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for screen, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", screen)
        with counter("Requests", 2) as advance:
            advance()
            advance()
        assert ("Requests" in screen.getvalue()) == ("100%" in screen.getvalue()) == shown
