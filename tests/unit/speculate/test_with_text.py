"""Drafts with what needs a tokenizer: stop strings and structured outputs; and two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.structured.spec import StructuredOutputs
from octavo.testing.tiny import make_model

SETTINGS: dict[str, Any] = {
    "platform": "cpu",
    "dtype": "float32",
    "num_kv_blocks": 64,
    "max_num_seqs": 8,
    "max_model_len": 128,
    "max_num_batched_tokens": 64,
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ant", "bee"]}, "legs": {"type": "integer"}, "flies": {"type": "boolean"}},
    "required": ["name", "legs", "flies"],
    "additionalProperties": False,
}
SHAPES = [
    StructuredOutputs(json=SCHEMA),
    StructuredOutputs(regex=r"(ab|ba){6}"),
    StructuredOutputs(choice=("left turn", "right turn")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), seed=6)


def twice(told: Any, folder: Path, prompts: list[str], params: Any, *, right: int, **settings: Any) -> tuple[Any, Any]:
    """Outputs without drafts, which must be those with them, and the statistics of the second time."""
    with LLM(str(folder), **SETTINGS) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    told.texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in plain]
    told.right = right
    speculative = {"method": "teller", "num_speculative_tokens": 4}
    with LLM(str(folder), speculative_config=speculative, **SETTINGS | settings) as llm:
        drafted = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats
        assert (stats.running, stats.kv_usage) == (0, 0.0)
    for one, other in zip(plain, drafted, strict=True):
        ours, theirs = one.outputs[0], other.outputs[0]
        assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text)
        assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
    return plain, stats


@pytest.mark.parametrize("right", [10, 6])
def test_a_stop_string_among_drafts_ends_the_answer_as_ever(told: Any, folder: Path, right: int) -> None:
    prompts = ["The weather", "Once", "In the house"]
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(str(folder), **SETTINGS) as llm:
        texts = [o.outputs[0].text for o in llm.generate(prompts, greedy, use_tqdm=False)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=(text[at : at + 3],), logprobs=1)
        for text, at in zip(texts, (4, 11, 20), strict=True)
    ]
    plain, stats = twice(told, folder, prompts, params, right=right)
    assert {output.outputs[0].finish_reason for output in plain} == {"stop"}
    assert sum(stats.spec_accepted) > 0


@pytest.mark.parametrize("right", [10, pytest.param(6, marks=pytest.mark.slow), 0])
def test_answers_in_shape_are_as_without_drafts(told: Any, folder: Path, right: int) -> None:
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=60, structured_outputs=shape, **more)
        for i, shape in enumerate(SHAPES)
        for t, more in ((0.0, {}), (1.0, {"min_tokens": 5}), (0.7, {"logprobs": 1}), (0.0, {"frequency_penalty": 0.5}))
    ]
    prompts = [f"Say {i}: " for i in range(len(params))]
    plain, stats = twice(told, folder, prompts, params, right=right)
    assert (sum(stats.spec_accepted) > 0) == (right > 0)
    assert stats.spec_draft_tokens > 0
    for output in plain[:3]:
        assert output.outputs[0].finish_reason in ("stop", "length")
        if output.outputs[0].finish_reason == "stop":
            json.loads(output.outputs[0].text)
    assert {output.outputs[0].finish_reason for output in plain[8:]} == {"stop"}


@pytest.mark.slow
@pytest.mark.parametrize("right", [10, 5])
def test_two_ranks_with_drafts_say_what_one_says_without(
    told: Any, folder: Path, right: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    common: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=0.9, seed=4, frequency_penalty=0.7, logprobs=2, **common),
        SamplingParams(temperature=0.0, max_tokens=30, structured_outputs=SHAPES[1]),
    ]
    _, stats = twice(told, folder, ["The weather", "Once", "In"], params, right=right, tensor_parallel_size=2)
    assert sum(stats.spec_accepted) > 0
