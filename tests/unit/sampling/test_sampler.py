"""The sampler: each request's parameters act on its own row, whatever its batch-mates ask for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import octavo.ops  # noqa: F401  (fills the catalogue)
from octavo.ops.catalogue import CATALOGUE
from octavo.plugin.step import Admit, Masks
from octavo.sampling.params import SamplingParams
from octavo.sampling.penalties import PenaltyState
from octavo.sampling.sampler import OPS, Sampler

VOCAB = 60
PROMPT = [5, 5, 5, 9]


def make_sampler(num_rows: int = 8) -> Sampler:
    ops = {name: CATALOGUE[name].reference for name in OPS}
    return Sampler(ops, torch.zeros((num_rows, 64), dtype=torch.int32), VOCAB, torch.device("cpu"))


def admit(
    sampler: Sampler, row: int, *, output: tuple[int, ...] = (), seed: int = 3, stop_ids=(), **params: Any
) -> None:
    tokens = np.array([*PROMPT, *output], np.int32)
    sampler.tokens[row, : len(tokens)] = torch.from_numpy(tokens)
    entry = Admit(
        row=row,
        token_ids=tokens,
        num_prompt_tokens=len(PROMPT),
        params=SamplingParams(**params),
        seed=seed,
        stop_ids=stop_ids,
    )
    sampler.admit([entry])


def logits_for(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def draw(sampler: Sampler, logits: torch.Tensor, rows: list[int], position: int = 10, masks=None) -> list[int]:
    positions = np.full(len(rows), position, np.int64)
    return sampler.sample(logits.clone(), np.array(rows, np.int32), positions, masks).tokens.tolist()


def test_rows_with_different_parameters_give_what_each_gives_alone() -> None:
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.7, "min_p": 0.1},
        {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 1.0, "repetition_penalty": 1.4, "logit_bias": {7: 5.0}},
        {"temperature": 0.0, "allowed_token_ids": [3, 4, 50]},
        {"temperature": 2.0, "min_p": 0.2, "logprobs": 2},
        {"temperature": 1.0},
    ]
    logits = logits_for(len(kinds))
    together = make_sampler()
    for row, params in enumerate(kinds):
        admit(together, row, output=(5, 7), seed=row, **params)
    mixed = draw(together, logits, list(range(len(kinds))))
    for row, params in enumerate(kinds):
        alone = make_sampler()
        admit(alone, row, output=(5, 7), seed=row, **params)
        assert draw(alone, logits[row : row + 1], [row]) == [mixed[row]], params


def test_huge_top_k_is_off_and_does_not_disturb_a_greedy_row() -> None:
    sampler = make_sampler()
    logits = logits_for(2)
    admit(sampler, 0, temperature=0.0)
    admit(sampler, 1, temperature=1.0, top_k=9_999_999, seed=1)
    plain = make_sampler()
    admit(plain, 1, temperature=1.0, seed=1)
    assert draw(sampler, logits, [0, 1]) == [int(logits[0].argmax()), *draw(plain, logits[1:], [1])]


def test_plain_rows_choose_on_the_device_what_the_full_path_chooses() -> None:
    sampler = make_sampler()
    admit(sampler, 0, temperature=0.0)
    admit(sampler, 1, temperature=0.9, seed=17)
    logits = logits_for(2)
    rows = torch.tensor([0, 1])
    assert sampler.is_plain(np.array([0, 1]))
    assert sampler.choose_plainly(logits, rows, torch.tensor([10, 10])).tolist() == draw(sampler, logits, [0, 1])


def test_allowed_ids_and_a_grammar_mask_both_hold() -> None:
    sampler = make_sampler()
    admit(sampler, 0, temperature=0.0, allowed_token_ids=[3, 4])
    admit(sampler, 1, temperature=0.0)
    only_even = np.array([[0x55555555, 0x55555555]] * 2, np.uint32).view(np.int32)
    masks = Masks(step=1, places=np.array([0, 1], np.int32), words=only_even)
    logits = logits_for(2)
    logits[:, 3] = 50.0  # allowed by the ids alone
    logits[:, 6] = 40.0  # allowed by the grammar alone
    tokens = draw(sampler, logits, [0, 1], masks=masks)
    assert tokens[0] == 4
    assert tokens[1] % 2 == 0


def test_a_mask_binds_its_own_row_only() -> None:
    sampler = make_sampler()
    for row in range(3):
        admit(sampler, row, temperature=0.0)
    logits = torch.zeros(3, VOCAB)
    logits[:, 7] = 9.0
    only_five = np.array([[1 << 5, 0]], np.int32)
    masks = Masks(step=1, places=np.array([1], np.int32), words=only_five)
    assert draw(sampler, logits, [0, 1, 2], masks=masks) == [7, 5, 7]


def test_stop_tokens_are_held_off_until_min_tokens() -> None:
    sampler = make_sampler()
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 8] = 10.0, 5.0
    admit(sampler, 0, temperature=0.0, min_tokens=3, stop_ids=(2,))
    assert [draw(sampler, logits, [0], position=len(PROMPT) + i) for i in range(5)] == [[8], [8], [8], [2], [2]]


def test_bad_words_match_generated_tokens_only() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 9], logits[0, 1] = 10.0, 5.0
    sampler = make_sampler()
    admit(sampler, 0, temperature=0.0, bad_words_ids=[[5, 9]])
    assert draw(sampler, logits, [0], position=len(PROMPT)) == [9]
    admit(sampler, 0, temperature=0.0, bad_words_ids=[[PROMPT[-1], 9]])
    assert draw(sampler, logits, [0], position=len(PROMPT)) == [9], "the end of the prompt was not generated"
    admit(sampler, 0, output=(5,), temperature=0.0, bad_words_ids=[[5, 9]])
    assert draw(sampler, logits, [0], position=len(PROMPT) + 1) == [1]
    admit(sampler, 0, temperature=0.0, bad_words_ids=[[9]])
    assert draw(sampler, logits, [0], position=len(PROMPT)) == [1]


def test_penalties_count_the_tokens_that_the_sampler_itself_drew() -> None:
    sampler = make_sampler()
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6], logits[0, 7] = 3.0, 2.9, 2.8
    admit(sampler, 0, temperature=0.0, presence_penalty=0.5)
    assert [draw(sampler, logits, [0])[0] for _ in range(3)] == [5, 6, 7]


def test_a_reused_row_forgets_its_last_request() -> None:
    sampler = make_sampler()
    logits = logits_for(1)
    admit(sampler, 0, output=(5, 5), temperature=0.0, presence_penalty=2.0, logit_bias={1: 100.0}, logprobs=3)
    draw(sampler, logits, [0])
    sampler.release(0)
    admit(sampler, 0, temperature=0.0)
    assert draw(sampler, logits, [0]) == [int(logits.argmax())]
    assert sampler.is_plain(np.array([0]))
    assert not sampler.penalty_state.place


def test_a_reused_penalty_place_forgets_the_last_prompt() -> None:
    state = PenaltyState(VOCAB, torch.device("cpu"))
    state.admit(0, np.array([5, 6, 7], np.int32), 2, torch.from_numpy)
    state.release(0)
    state.admit(1, np.array([8, 9], np.int32), 1, torch.from_numpy)
    assert state.places(np.array([1], np.int32)).tolist() == [0], "the place is reused"
    assert state.in_prompt[0].nonzero().flatten().tolist() == [8]
    assert state.counts[0].nonzero().flatten().tolist() == [9]


def test_logprobs_are_the_models_own_before_any_change() -> None:
    sampler = make_sampler()
    logits = logits_for(2)
    admit(sampler, 0, temperature=0.7, logit_bias={3: 50.0}, logprobs=2)
    admit(sampler, 1, temperature=0.0)
    found = sampler.sample(logits.clone(), np.array([0, 1], np.int32), np.array([10, 10]), None)
    assert found.logprobs is not None
    assert found.logprobs.places.tolist() == [0]
    ids = found.logprobs.ids
    assert ids[0, 0] == 3
    assert torch.allclose(found.logprobs.values, logits[:1].log_softmax(-1).gather(-1, ids))


@pytest.mark.parametrize("count", [1, 5, 20])
def test_penalty_places_grow_and_are_reused(count: int) -> None:
    sampler = make_sampler(32)
    for _ in range(3):
        for row in range(count):
            admit(sampler, row, presence_penalty=1.0)
        for row in range(count):
            sampler.release(row)
    assert len(sampler.penalty_state.counts) < 2 * max(count, 4)


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 0.7}, True),
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, True),
        ({"temperature": 0.7, "top_p": 0.5}, False),
        ({"temperature": 0.7, "top_k": 3}, False),
        ({"temperature": 0.7, "top_k": VOCAB}, True),
        ({"temperature": 0.7, "min_p": 0.1}, False),
        ({"temperature": 0.0, "logprobs": 0}, False),
        ({"temperature": 0.0, "presence_penalty": 0.1}, False),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, False),
        ({"temperature": 0.0, "bad_words_ids": [[1]]}, False),
    ],
)
def test_a_row_is_plain_unless_its_choice_needs_more_than_a_temperature(params: dict[str, Any], plain: bool) -> None:
    sampler = make_sampler()
    admit(sampler, 1, **params)
    assert sampler.is_plain(np.array([0, 1], np.int32)) is plain
    sampler.release(1)
    assert sampler.is_plain(np.array([1], np.int32))
