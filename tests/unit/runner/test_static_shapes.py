"""Platforms that compile each shape by itself: beside the recorded steps, too, all work comes in few shapes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from octavo import LLM, SamplingParams
from octavo.plugin import PlatformCaps, hookimpl
from octavo.testing import refdev
from octavo.testing.tiny import make_model

WRITES = (torch.ops.aten.index_put_.default, torch.ops.aten.index_fill_.int_Scalar)
"""How what is new reaches the request table."""

FIRST = [[5], [6, 7, 8], list(range(20)), [9, 10]]
SECOND = [list(range(3, 32)), [8, 9], [4] * 11, [1, 2, 3, 4, 5], [7] * 25, [3] * 30]


class Programs(TorchDispatchMode):  # type: ignore[misc]
    """The different (operator, shapes, numbers) that were called: what a lazy compiler would make a program of."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        flat = tree_flatten((args, kwargs or {}))[0]
        key = [(*x.shape, x.dtype) if isinstance(x, Tensor) else str(x) for x in flat]
        self.seen.add((func, *key))
        return func(*args, **(kwargs or {}))

    @property
    def writes(self) -> set[Any]:
        return {program for program in self.seen if program[0] in WRITES}


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> str:
    """refdev, but that its steps are compiled ahead."""
    plain = refdev.platform_caps

    @hookimpl
    def platform_caps(options: Mapping[str, object]) -> PlatformCaps:
        return replace(plain(options), graph="aot")

    monkeypatch.setattr(refdev, "platform_caps", platform_caps)
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "refdev=octavo.testing.refdev,cpu=octavo_cpu")
    return "refdev"


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_no_request_brings_a_new_shape(tmp_path: Path, platform: str, model_type: str, block_size: int) -> None:
    model = str(make_model(tmp_path, model_type, tokenizer=False))
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "num_kv_blocks": 99}
    # Ending one after another, they pass through every size of a decode step.
    greedy = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in (3, 6, 9, 12)]
    drawn = SamplingParams(temperature=0.7, seed=3, max_tokens=21, ignore_eos=True, detokenize=False)
    with Programs() as programs:
        llm = LLM(model, platform=platform, skip_tokenizer_init=True, block_size=block_size, run_ahead=1, **sizes)
        with llm:
            at_start = set(programs.writes)
            llm.generate(FIRST, greedy, use_tqdm=False)
            assert programs.writes == at_start
            before = set(programs.seen)
            for params in (greedy[0], drawn):
                llm.generate(SECOND, params, use_tqdm=False)
            assert programs.seen == before


SHARED: dict[str, Any] = {"max_tokens": 7, "ignore_eos": True, "detokenize": False}
ASKING = [
    SamplingParams(temperature=0.8, seed=1, top_p=0.9, **SHARED),
    SamplingParams(temperature=0.8, seed=2, top_k=5, min_p=0.05, logprobs=3, **SHARED),
    SamplingParams(temperature=0.0, presence_penalty=0.5, repetition_penalty=1.2, **SHARED),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, logit_bias={7: 2.0, 9: -3.0}, **SHARED),
    SamplingParams(temperature=0.0, allowed_token_ids=[5, 6, 7], min_tokens=2, **SHARED),
    SamplingParams(temperature=0.0, bad_words_ids=((5, 6), (7,)), logprobs=0, **SHARED),
    SamplingParams(temperature=0.5, seed=3, logprobs=5, logprobs_mode="processed_logprobs", **SHARED),
    SamplingParams(temperature=0.0, logprobs=2, logprob_token_ids=[9, 10], logprobs_mode="raw_logits", **SHARED),
    SamplingParams(temperature=0.0, **SHARED),
]


def test_what_requests_ask_of_sampling_brings_no_new_shape(tmp_path: Path, platform: str) -> None:
    model = str(make_model(tmp_path, "llama", tokenizer=False))
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "num_kv_blocks": 99}
    prompts = [[i, *range(10, 12 + 3 * i)] for i in range(len(ASKING))]
    with (
        Programs() as programs,
        LLM(model, platform=platform, skip_tokenizer_init=True, block_size=4, run_ahead=1, **sizes) as llm,
    ):
        before = set(programs.seen)
        found = llm.generate(prompts, ASKING, use_tqdm=False)
        found += [llm.generate([p], a, use_tqdm=False)[0] for p, a in zip(prompts, ASKING, strict=True)]
        assert programs.seen - before == set()
    with LLM(model, platform="cpu", skip_tokenizer_init=True, dtype="float32", **sizes) as llm:
        expected = llm.generate(prompts, ASKING, use_tqdm=False)
    for theirs, mine in zip([*expected, *expected], found, strict=True):
        assert theirs.outputs[0].token_ids == mine.outputs[0].token_ids
        for ours, others in zip(theirs.outputs[0].logprobs or (), mine.outputs[0].logprobs or (), strict=True):
            assert list(ours) == list(others)
            for token, entry in ours.items():
                assert others[token].logprob == pytest.approx(entry.logprob, abs=1e-4)


def test_shapes_are_counted_and_named_while_they_are_compiled(
    tmp_path: Path, platform: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = str(make_model(tmp_path, "llama", tokenizer=False))
    caplog.set_level(logging.INFO, logger="octavo.worker")
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 4, "max_model_len": 32, "num_kv_blocks": 9}
    with LLM(model, platform=platform, skip_tokenizer_init=True, **sizes):
        lines = [record.getMessage() for record in caplog.records]
    compiled = [line for line in lines if line.startswith("compiled ")]
    assert f"{len(compiled)} shapes of steps to compile" in lines
    assert [line.partition(":")[0] for line in compiled] == [
        f"compiled {i} of {len(compiled)}" for i in range(1, len(compiled) + 1)
    ]
    assert any("decode step of 2 tokens in 2 sequences" in line for line in compiled)
    assert lines[-1].startswith(f"{len(compiled)} shapes compiled in ")


def test_a_request_leaves_nothing_of_the_one_before_in_its_row(tmp_path: Path, platform: str) -> None:
    """Whole rows are written: tokens of an older, longer request must be gone, and ends must be its own."""
    model = str(make_model(tmp_path, "llama", tokenizer=False))
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 32, "max_model_len": 64}
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in (30, 3, 12)]
    prompts = [list(range(30)), [4, 5], [9] * 7]
    tokens = []
    for name in (platform, "cpu"):
        with LLM(model, platform=name, skip_tokenizer_init=True, dtype="float32", **sizes) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens.append([list(output.outputs[0].token_ids) for output in outputs])
    assert [len(answer) for answer in tokens[0]] == [30, 3, 12]
    assert tokens[0] == tokens[1]
