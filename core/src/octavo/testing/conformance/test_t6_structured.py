"""Tier 6: answers that must have a shape have it, and the tokens that the reference kernels give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo import SamplingParams, StructuredOutputs
from octavo.testing.conformance.engines import GREEDY, engine, prompts, reference_kernels
from octavo.testing.conformance.subject import Subject
from octavo.testing.tiny import make_model

NUMBER, WORDS, ALLOWED = r"\d{3}-\d{4}", ("paper", "parchment", "vellum"), (5, 9, 14)
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=StructuredOutputs(regex=NUMBER)),
    GREEDY,
    SamplingParams(temperature=0.9, seed=4, max_tokens=40, structured_outputs=StructuredOutputs(choice=WORDS)),
    SamplingParams(temperature=0.0, max_tokens=12, allowed_token_ids=ALLOWED, ignore_eos=True),
]
"""Some rows of a step are masked, each by a mask of its own, and one is not."""


def test_answers_have_their_shape_and_the_tokens_of_the_reference_kernels(subject: Subject, tmp_path: Path) -> None:
    if "structured" not in subject.caps.features:
        pytest.skip("structured is not claimed")
    folder = make_model(tmp_path, "qwen3", seed=6)
    asked = prompts()[: len(PARAMS)]

    def answers(**settings: object) -> list[tuple[str, list[int]]]:
        with engine(subject, folder, skip_tokenizer_init=False, **settings) as llm:
            outputs = llm.generate(asked, PARAMS, use_tqdm=False)
        return [(output.outputs[0].text, output.outputs[0].token_ids) for output in outputs]

    own = answers()
    (number, _), (_, free), (word, _), (_, allowed) = own
    assert re.fullmatch(NUMBER, number)
    assert word in WORDS
    assert set(allowed) <= set(ALLOWED)
    assert len(free) == GREEDY.max_tokens
    assert own == answers(kernels=reference_kernels(subject), enforce_eager=True)
