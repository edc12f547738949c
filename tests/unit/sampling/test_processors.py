"""Logits processors: each request's own, and an error ends that request alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import octavo.ops  # noqa: F401  (fills the catalogue)
from octavo.errors import RequestError
from octavo.ops.catalogue import CATALOGUE
from octavo.plugin.step import Admit
from octavo.sampling.params import SamplingParams
from octavo.sampling.processors import check_extra_args
from octavo.sampling.sampler import OPS, Sampler
from octavo.sampling.thinking import ThinkingTokenBudget

VOCAB = 30


class Follow:
    """Forces the token that is `step` above the last one."""

    calls: list[int] = []  # noqa: RUF012

    def __init__(self, value: Any, admit: Admit) -> None:
        if value == "broken":
            raise RuntimeError("cannot be made")
        self.step = value

    @classmethod
    def check(cls, value: Any, vocab_size: int) -> None:
        if not isinstance(value, int):
            raise ValueError(f"must be an integer, not {value!r}")

    @classmethod
    def apply(
        cls, processors: Sequence[Any], logits: torch.Tensor, tokens: torch.Tensor, lengths: Sequence[int]
    ) -> None:
        cls.calls.append(len(processors))
        for row, (processor, length) in enumerate(zip(processors, lengths, strict=True)):
            logits[row] = -1.0
            if processor.step < 0:
                raise ValueError("cannot go back")
            logits[row, int(tokens[row, length - 1]) + processor.step] = 50.0


class Rows:
    def __init__(self, num_rows: int = 4) -> None:
        Follow.calls.clear()
        self.table = torch.zeros((num_rows, 32), dtype=torch.int32)
        ops = {name: CATALOGUE[name].reference for name in OPS}
        classes = {"follow": Follow, "thinking": ThinkingTokenBudget}
        self.sampler = Sampler(ops, self.table, VOCAB, torch.device("cpu"), processors=classes)
        self.lengths = np.zeros(num_rows, np.int64)

    def admit(self, row: int, tokens: list[int], *, num_prompt_tokens: int | None = None, **params: Any) -> None:
        self.table[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.lengths[row] = len(tokens)
        known = np.array(tokens, np.int32)
        prompt = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
        settings = SamplingParams(**{"temperature": 0.0, **params})
        self.sampler.admit([Admit(row=row, token_ids=known, num_prompt_tokens=prompt, params=settings, seed=row)])

    def step(self, rows: list[int], logits: torch.Tensor | None = None) -> tuple[list[int], dict[int, str]]:
        if logits is None:
            logits = torch.zeros(len(rows), VOCAB)
            logits[:, 3] = 1.0
        index = np.array(rows, np.int32)
        found = self.sampler.sample(logits, index, self.lengths[index], None)
        for row, token in zip(rows, found.tokens.tolist(), strict=True):
            self.table[row, self.lengths[row]] = token
            self.lengths[row] += 1
        return found.tokens.tolist(), dict(found.errors)


def test_rows_get_their_own_argument_and_others_none() -> None:
    rows = Rows()
    rows.admit(0, [5, 6], extra_args={"follow": 2})
    rows.admit(1, [5, 6])
    rows.admit(2, [5, 9], extra_args={"follow": 1})
    assert rows.step([2, 1, 0]) == ([10, 3, 8], {})
    assert rows.step([2, 1, 0]) == ([11, 3, 10], {})
    assert Follow.calls == [2, 2], "one call a step, with the rows that asked"


def test_steps_without_such_rows_call_nothing_and_rows_stay_plain() -> None:
    rows = Rows()
    rows.admit(0, [5, 6])
    rows.admit(1, [5, 6], extra_args={"follow": 2})
    assert rows.step([0]) == ([3], {})
    assert rows.sampler.is_plain(np.array([0], np.int32))
    assert not rows.sampler.is_plain(np.array([1], np.int32))
    assert Follow.calls == []
    rows.sampler.release(1)
    assert not rows.sampler.processed.any


def test_an_error_ends_its_own_row_and_spoils_no_other() -> None:
    rows = Rows()
    rows.admit(0, [5, 6], extra_args={"follow": 2})
    rows.admit(1, [5, 6], extra_args={"follow": -1})
    rows.admit(2, [5, 6])
    tokens, errors = rows.step([0, 1, 2])
    assert tokens == [8, -1, 3]
    assert list(errors) == [1]
    assert "'follow'" in errors[1]
    assert "cannot go back" in errors[1]


def test_a_processor_that_cannot_be_made_ends_its_own_row() -> None:
    rows = Rows()
    rows.admit(0, [5, 6], extra_args={"follow": "broken"})
    rows.admit(1, [5, 6], extra_args={"follow": 1})
    tokens, errors = rows.step([0, 1])
    assert tokens == [-1, 7]
    assert "cannot be made" in errors[0]
    rows.sampler.release(0)
    rows.admit(0, [5, 6])
    assert rows.step([0]) == ([3], {})


def test_arguments_are_checked_before_a_request_is_queued() -> None:
    classes = {"follow": Follow, "thinking_token_budget": ThinkingTokenBudget}
    check_extra_args(classes, {"follow": 3}, vocab_size=VOCAB)
    check_extra_args(classes, None, vocab_size=VOCAB)
    for given, field in (
        ({"follow": "x"}, "extra_args.follow"),
        ({"other": 1}, "extra_args.other"),
        ({"thinking_token_budget": 3}, "extra_args.thinking_token_budget"),
        ({"thinking_token_budget": {"budget": -1, "end": [4]}}, "extra_args.thinking_token_budget"),
        ({"thinking_token_budget": {"budget": 1, "end": []}}, "extra_args.thinking_token_budget"),
        ({"thinking_token_budget": {"budget": 1, "end": [VOCAB]}}, "extra_args.thinking_token_budget"),
        ({"thinking_token_budget": {"budget": True, "end": [4]}}, "extra_args.thinking_token_budget"),
    ):
        with pytest.raises(RequestError) as caught:
            check_extra_args(classes, given, vocab_size=VOCAB)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ([1], "extra_args"),
        ({"a": 2**70}, "extra_args.a"),
        ({"a": float("nan")}, "extra_args.a"),
        ({"a": {3}}, "extra_args.a"),
    ],
)
def test_arguments_must_fit_a_message(value: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(extra_args=value)
    assert caught.value.field == field


# ---- the limit on reasoning ----------------------------------------------------------------------------------------

START, END_1, END_2 = 20, 21, 22


def think(
    prompt: list[int], budget: int, num_steps: int, *, start: bool = True, output: tuple[int, ...] = (), wants: int = 3
) -> list[int]:
    """What comes behind a prompt when the model always wants token `wants`."""
    rows = Rows()
    value = {"budget": budget, "start": [START] if start else [], "end": [END_1, END_2]}
    rows.admit(0, [*prompt, *output], num_prompt_tokens=len(prompt), extra_args={"thinking": value})
    logits = torch.zeros(1, VOCAB)
    logits[:, wants] = 1.0
    return [rows.step([0], logits.clone())[0][0] for _ in range(num_steps)]


def test_the_end_mark_is_forced_when_the_budget_is_spent_and_then_the_answer_is_free() -> None:
    assert think([1, START], 3, 8) == [3, 3, 3, END_1, END_2, 3, 3, 3]


def test_a_budget_of_nothing_ends_reasoning_at_once() -> None:
    assert think([1, START], 0, 4) == [END_1, END_2, 3, 3]


def test_reasoning_that_did_not_start_or_is_over_is_left_alone() -> None:
    assert think([1, 2], 1, 4) == [3] * 4
    assert think([1, START, 5, END_1, END_2, 6], 1, 4) == [3] * 4
    assert think([1, START], 3, 4, output=(9, END_1, END_2)) == [3] * 4


def test_reasoning_begun_by_the_answer_counts_from_there() -> None:
    assert think([1, 2], 2, 5, output=(7, 7, 7, START)) == [3, 3, END_1, END_2, 3]
    assert think([1, START, 5, END_1, END_2, 6], 1, 4, output=(START,)) == [3, END_1, END_2, 3]


def test_after_preemption_the_count_goes_on() -> None:
    assert think([1, START], 3, 4, output=(8, 8)) == [3, END_1, END_2, 3]
    assert think([1, START], 2, 3, output=(8, 8, END_1)) == [END_2, 3, 3]


def test_without_a_start_mark_the_answer_begins_with_reasoning() -> None:
    assert think([1, 2], 2, 6, start=False) == [3, 3, END_1, END_2, 3, 3]
    assert think([END_1, END_2], 1, 4, start=False) == [3, END_1, END_2, 3]


def test_a_long_reasoning_of_the_prompt_does_not_count() -> None:
    assert think([START, 5, 5, 5, 5, 5], 2, 4) == [3, 3, END_1, END_2]
