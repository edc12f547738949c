"""Whole engines on torch_tpu, executed by XLA:CPU: tokens of the CPU platform, and nothing compiled while serving."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.testing.tiny import make_model
from octavo_tpu import attention
from xla_cpu import num_programs

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "num_kv_blocks": 40,
    "block_size": 16,
    "skip_tokenizer_init": True,
}
PROMPTS = [list(range(5, 5 + n)) for n in (3, 40, 17, 1)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)


def tokens_of(llm: LLM, params: Any = GREEDY, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def test_a_context_walked_in_rounds_gives_the_tokens_of_the_cpu(
    tmp_path: Path, tpu_on_cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(make_model(tmp_path, "gemma2", tokenizer=False))
    with LLM(model, platform="cpu", dtype="float32", **SETTINGS) as llm:
        expected = tokens_of(llm)
    monkeypatch.setattr(attention, "ROUND_BYTES", 1)  # a page a round, 8 to a context
    with LLM(model, platform=tpu_on_cpu, dtype="float32", **SETTINGS) as llm:
        assert tokens_of(llm) == expected


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_eager_steps_give_the_tokens_of_the_cpu(tmp_path: Path, tpu_on_cpu: str, model_type: str) -> None:
    model = str(make_model(tmp_path, model_type, tokenizer=False))
    tokens = []
    for platform in ("cpu", tpu_on_cpu):
        with LLM(model, platform=platform, dtype="float32", enforce_eager=True, **SETTINGS) as llm:
            tokens.append(tokens_of(llm))
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("model_type", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("qwen3", "float32"), ("gemma2", "float32")]
)
def test_compiled_steps_give_the_tokens_of_the_cpu_and_compile_nothing_more(
    tmp_path: Path, tpu_on_cpu: str, model_type: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = str(make_model(tmp_path, model_type, tokenizer=False))
    with LLM(model, platform="cpu", dtype=dtype, **SETTINGS) as llm:
        expected = tokens_of(llm)
    caplog.set_level(logging.INFO, logger="octavo.worker")
    with LLM(model, platform=tpu_on_cpu, dtype=dtype, **SETTINGS) as llm:
        lines = [record.getMessage() for record in caplog.records if record.name == "octavo.worker"]
        assert "3 shapes of steps to compile" in lines
        assert [line.split(":")[0] for line in lines if line.startswith("compiled")] == [
            f"compiled {i} of 3" for i in (1, 2, 3)
        ]
        start = num_programs()
        found = tokens_of(llm)
        for params in (GREEDY, SamplingParams(temperature=0.8, seed=5, max_tokens=9, detokenize=False)):
            tokens_of(llm, params, [[7] * n for n in (2, 31, 8, 100, 5, 64, 1, 1, 9)])
        assert num_programs() == start
    if dtype == "float32":
        assert found == expected
    else:
        # Sums in another order round differently, and of nearly equal logits another is then the largest.
        same = sum(
            a == b for mine, theirs in zip(found, expected, strict=True) for a, b in zip(mine, theirs, strict=True)
        )
        assert same >= 24, f"{same} of 48 tokens"


def test_a_draw_by_seed_is_the_draw_of_the_cpu(tmp_path: Path, tpu_on_cpu: str) -> None:
    model = str(make_model(tmp_path, "llama", tokenizer=False))
    params = [SamplingParams(temperature=0.5 + i / 4, seed=i, max_tokens=10, detokenize=False) for i in range(4)]
    tokens = []
    for platform in ("cpu", tpu_on_cpu):
        with LLM(model, platform=platform, dtype="float32", **SETTINGS) as llm:
            tokens.append(tokens_of(llm, params))
    assert tokens[0] == tokens[1]


def test_filters_and_penalties_are_those_of_the_cpu_and_compile_nothing(tmp_path: Path, tpu_on_cpu: str) -> None:
    model = str(make_model(tmp_path, "llama", tokenizer=False))
    shared: dict[str, Any] = {"max_tokens": 8, "detokenize": False}
    params = [
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2, **shared),
        SamplingParams(temperature=0.8, seed=2, top_p=0.9, top_k=40, logprobs=2, **shared),
        SamplingParams(temperature=0.9, seed=3, min_p=0.05, **shared),
        SamplingParams(temperature=0.0, min_tokens=6, logit_bias={9: 4.0}, allowed_token_ids=[9, 10, 11], **shared),
    ]
    outputs = []
    for platform in ("cpu", tpu_on_cpu):
        with LLM(model, platform=platform, dtype="float32", **SETTINGS) as llm:
            start = num_programs() if platform == tpu_on_cpu else 0
            outputs.append([output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)])
            assert platform == "cpu" or num_programs() == start
    assert [list(o.token_ids) for o in outputs[0]] == [list(o.token_ids) for o in outputs[1]]


def test_logprobs_are_those_of_the_cpu(tmp_path: Path, tpu_on_cpu: str) -> None:
    model = str(make_model(tmp_path, "llama", tokenizer=False))
    shared: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "detokenize": False}
    params = [
        SamplingParams(logprobs=3, **shared),
        SamplingParams(logprobs=0, prompt_logprobs=2, **shared),
        SamplingParams(**shared),
        SamplingParams(logprobs=1, logprob_token_ids=[9, 10], **shared),
    ]
    outputs = []
    for platform in ("cpu", tpu_on_cpu):
        with LLM(model, platform=platform, dtype="float32", **SETTINGS) as llm:
            outputs.append(llm.generate(PROMPTS, params, use_tqdm=False))
    for theirs, mine in zip(*outputs, strict=True):
        assert theirs.outputs[0].token_ids == mine.outputs[0].token_ids
        found = [[*(one.prompt_logprobs or ()), *(one.outputs[0].logprobs or ())] for one in (theirs, mine)]
        for expected, entry in zip(*found, strict=True):
            assert (expected is None) == (entry is None)
            if expected is not None and entry is not None:
                assert list(expected) == list(entry)
                for token, logprob in expected.items():
                    assert entry[token].logprob == pytest.approx(logprob.logprob, abs=1e-4)
                    assert entry[token].rank == logprob.rank


def test_a_second_start_loads_what_the_first_compiled(tmp_path: Path, tpu_on_cpu: str) -> None:
    model = str(make_model(tmp_path / "model", "llama", tokenizer=False))
    hits = torch._dynamo.utils.counters["aot_autograd"]
    tokens, found = [], []
    for _ in range(2):
        before = hits["autograd_cache_hit"]
        options = {"cache_dir": str(tmp_path / "cache")}
        with LLM(model, platform=tpu_on_cpu, platform_options=options, dtype="float32", **SETTINGS) as llm:
            tokens.append(tokens_of(llm))
        found.append(hits["autograd_cache_hit"] - before)
        torch._dynamo.reset()
    assert found == [0, 3]
    assert tokens[0] == tokens[1]
    assert list((tmp_path / "cache").rglob("*")), "the folder that the user named holds them"
