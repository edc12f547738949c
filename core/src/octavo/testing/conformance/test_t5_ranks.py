"""Tier 5: an engine of two ranks says what the model says."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.testing.conformance.engines import GREEDY, assert_likeliest, engine, prompts, tokens
from octavo.testing.conformance.subject import Subject
from octavo.testing.tiny import make_model


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["usual", "eager"])
def test_two_ranks_choose_the_likeliest_tokens(subject: Subject, tmp_path: Path, enforce_eager: bool) -> None:
    if subject.caps.max_world_size < 2:
        pytest.skip("the platform claims one rank (max_world_size 1)")
    if enforce_eager and subject.caps.graph == "none":
        pytest.skip("steps are eager already")
    folder = make_model(tmp_path, "qwen3", seed=2, tokenizer=False)
    llm = engine(subject, folder, tensor_parallel_size=2, enforce_eager=enforce_eager)
    assert_likeliest(subject, folder, prompts(), tokens(llm, prompts(), GREEDY))
