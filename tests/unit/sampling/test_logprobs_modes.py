"""What logprobs are, for each mode, whatever the batch-mates ask for; and the logprobs of ids that were named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import octavo.ops  # noqa: F401  (fills the catalogue)
from octavo.errors import RequestError
from octavo.ops.catalogue import CATALOGUE
from octavo.plugin.step import Admit
from octavo.sampling.params import LOGPROBS_MODES, SamplingParams
from octavo.sampling.sampler import OPS, Sampled, Sampler

VOCAB = 40
NEG_INF = float("-inf")


def sample(logits: torch.Tensor, wanted: list[dict[str, Any]]) -> Sampled:
    ops = {name: CATALOGUE[name].reference for name in OPS}
    sampler = Sampler(ops, torch.zeros((len(wanted), 16), dtype=torch.int32), VOCAB, torch.device("cpu"))
    for row, params in enumerate(wanted):
        known = np.array([1, 2, 3], np.int32)
        sampler.admit([Admit(row=row, token_ids=known, num_prompt_tokens=3, params=SamplingParams(**params), seed=row)])
    rows = np.arange(len(wanted), dtype=np.int32)
    return sampler.sample(logits.clone(), rows, np.full(len(wanted), 3), None)


def logits_for(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 2


def shown(found: Sampled, place: int) -> dict[int, float]:
    assert found.logprobs is not None
    at = found.logprobs.places.tolist().index(place)
    own = found.logprobs.columns[at]
    return dict(zip(found.logprobs.ids[at, own].tolist(), found.logprobs.values[at, own].tolist(), strict=True))


def processed_by_hand(logits: torch.Tensor) -> torch.Tensor:
    """A bias of 3 on token 7, token 5 forbidden, temperature 0.5, then the 4 likeliest tokens."""
    changed = logits.clone()
    changed[7] += 3
    changed[5] = NEG_INF
    changed /= 0.5
    return changed.masked_fill(changed < changed.topk(4).values[-1], NEG_INF)


FULL = {"temperature": 0.5, "top_k": 4, "logit_bias": {7: 3.0}, "bad_words_ids": [[5]]}


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
@pytest.mark.parametrize("mates", [[], [{"temperature": 0.0}], [{"temperature": 0.9, "logprobs": 6, "top_p": 0.7}]])
def test_each_mode_shows_what_its_name_says(mode: str, mates: list[dict[str, Any]]) -> None:
    logits = logits_for(1 + len(mates))
    found = sample(logits, [{**FULL, "logprobs": 3, "logprobs_mode": mode}, *mates])
    values = processed_by_hand(logits[0]) if mode.startswith("processed") else logits[0]
    values = values if mode.endswith("logits") else values.log_softmax(-1)
    chosen = int(found.tokens[0])
    top = shown(found, 0)
    assert set(top) == {chosen, *values.topk(3).indices.tolist()}
    for token, value in top.items():
        assert value == pytest.approx(float(values[token]), abs=1e-5)


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_the_mode_changes_no_token(mode: str) -> None:
    logits = logits_for(6)
    wanted = [{**FULL, "top_k": k, "temperature": t} for k in (0, 4) for t in (0.0, 0.5, 1.3)]
    plain = sample(logits, wanted).tokens.tolist()
    watched = [{**params, "logprobs": 2, "logprobs_mode": mode} for params in wanted]
    assert sample(logits, watched).tokens.tolist() == plain


def test_processed_logprobs_of_a_greedy_row_are_those_of_its_masked_logits() -> None:
    logits = logits_for(1)
    found = sample(
        logits,
        [{"temperature": 0.0, "allowed_token_ids": [3, 9], "logprobs": 2, "logprobs_mode": "processed_logprobs"}],
    )
    expected = logits[0, [3, 9]].log_softmax(-1)
    assert shown(found, 0) == {
        3: pytest.approx(float(expected[0]), abs=1e-5),
        9: pytest.approx(float(expected[1]), abs=1e-5),
    }


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_named_ids_come_behind_the_likeliest_and_each_row_has_its_own(mode: str) -> None:
    logits = logits_for(4)
    wanted: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2, "logprob_token_ids": [30, 31, 32], "logprobs_mode": mode},
        {"temperature": 0.0},
        {"temperature": 0.0, "logprob_token_ids": [5], "logprobs_mode": mode},
        {"temperature": 0.0, "logprobs": 5, "logprobs_mode": mode},
    ]
    found = sample(logits, wanted)
    values = logits if mode.endswith("logits") else logits.log_softmax(-1)
    assert set(shown(found, 0)) == {int(found.tokens[0]), *logits[0].topk(2).indices.tolist(), 30, 31, 32}
    assert set(shown(found, 2)) == {int(found.tokens[2]), 5}
    assert len(shown(found, 3)) == 5
    for place in (0, 2, 3):
        for token, value in shown(found, place).items():
            assert value == pytest.approx(float(values[place, token]), abs=1e-5)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"logprobs_mode": "raw"}, "logprobs_mode"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids"),
        ({"logprob_token_ids": [True]}, "logprob_token_ids"),
        ({"logprob_token_ids": list(range(129))}, "logprob_token_ids"),
    ],
)
def test_wrong_parameters_are_named(given: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert caught.value.field == field


def test_named_ids_must_be_in_the_vocabulary() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(logprob_token_ids=(VOCAB,)).check_vocab(VOCAB)
    assert caught.value.field == "logprob_token_ids"
