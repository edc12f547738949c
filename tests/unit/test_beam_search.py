"""Beam search against Hugging Face's, and where it goes beyond it: stop strings, widths, limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from invariants import Invariants
from transformers import AutoModelForCausalLM

from octavo.beam_search import BeamSearch, BeamSearchParams, checked_as_sampled
from octavo.errors import RequestError
from octavo.llm import LLM
from octavo.sampling.params import SamplingParams
from octavo.testing.tiny import make_model

PROMPTS = [[17, 80, 120, 33], [200, 41], [90] * 20 + [7]]
EOS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("beam") / "model", "llama", seed=3, vocab_size=300)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    # Other modes of logprobs must not reach a search's scores.
    with LLM(
        str(folder), dtype="float32", num_kv_blocks=128, max_num_seqs=16, max_model_len=128, logprobs_mode="raw_logits"
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def huggingface(model: Any, prompt: list[int], *, width: int, max_tokens: int, eos: list[int], **how: Any) -> Any:
    return model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=EOS,
        return_dict_in_generate=True,
        output_scores=True,
        **how,
    )


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping", "num_stops"),
    [(4, 1.0, False, 0), (3, 0.6, True, 60), (3, -0.5, False, 60), (4, 2.0, "never", 60)],
)
def test_case_X_beam_length_penalty_beams_and_their_scores_are_those_of_transformers(
    llm: LLM,
    reference: Any,
    prompt: list[int],
    width: int,
    length_penalty: float,
    early_stopping: Any,
    num_stops: int,
    invariants: Invariants,
) -> None:
    stops = list(range(20, 20 + num_stops))
    params = BeamSearchParams(
        beam_width=width,
        max_tokens=9,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        stop_token_ids=tuple(stops),
    )
    (found,) = llm.beam_search([prompt], params)
    expected = huggingface(
        reference,
        prompt,
        width=width,
        max_tokens=9,
        eos=[EOS, *stops],
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    for beam, ids, score in zip(found.sequences, expected.sequences, expected.sequences_scores, strict=True):
        answer = beam.tokens[len(prompt) :]
        ids = ids[len(prompt) :].tolist()
        assert answer == ids[: len(answer)]
        assert set(ids[len(answer) :]) <= {EOS}, "the rest is padding"
        assert beam.cum_logprob / len(answer) ** length_penalty == pytest.approx(float(score), abs=1e-4)
        assert (beam.finish_reason == "stop") == (answer[-1] in (EOS, *stops))
        assert len(beam.logprobs) == len(answer)
        assert sum(entry[token].logprob for entry, token in zip(beam.logprobs, answer, strict=True)) == pytest.approx(
            beam.cum_logprob, abs=1e-4
        )
    invariants(llm)


def test_case_X_beam_candidates_prompts_searched_together_or_in_turn_get_the_same_beams(
    llm: LLM, invariants: Invariants
) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    together = llm.beam_search(PROMPTS, params)
    in_turn = llm.beam_search(PROMPTS, params, concurrency_limit=1)
    for one, other, prompt in zip(together, in_turn, PROMPTS, strict=True):
        assert [beam.tokens for beam in one.sequences] == [beam.tokens for beam in other.sequences]
        assert one.sequences[0].tokens[: len(prompt)] == prompt
    assert (llm.stats.running, llm.stats.waiting) == (0, 0)
    invariants(llm)


def test_case_X_beam_stop_an_answer_ends_at_a_stop_string_and_others_go_on(llm: LLM, invariants: Invariants) -> None:
    free = llm.beam_search(["The printer"], BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True))
    tokenizer = llm.get_tokenizer()
    best = free[0].sequences[0]
    prompt = tokenizer.encode("The printer")
    text = tokenizer.decode(best.tokens[len(prompt) :])
    stop = text[2:4]
    assert len(stop) == 2
    for include in (False, True):
        params = BeamSearchParams(
            beam_width=4, max_tokens=8, ignore_eos=True, stop=stop, include_stop_str_in_output=include
        )
        ended = [beam for beam in llm.beam_search(["The printer"], params)[0].sequences if beam.finish_reason == "stop"]
        assert ended
        for beam in ended:
            assert beam.stop_reason == stop
            assert beam.text is not None
            answer = beam.text.removeprefix("The printer")
            assert (stop in answer) is include
            assert len(beam.tokens) - len(prompt) <= 8
    invariants(llm)


def test_case_X_beam_width_a_wide_search_needs_no_leave_from_the_limit_on_logprobs(
    llm: LLM, invariants: Invariants
) -> None:
    (found,) = llm.beam_search([[5, 6]], BeamSearchParams(beam_width=40, max_tokens=2, ignore_eos=True))
    assert len({tuple(beam.tokens) for beam in found.sequences}) == 40
    totals = [beam.cum_logprob for beam in found.sequences]
    assert totals == sorted(totals, reverse=True)
    invariants(llm)


def test_only_allowed_tokens_are_searched_and_few_of_them_give_few_answers(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=8, max_tokens=2, ignore_eos=True, allowed_token_ids=(10, 11))
    (found,) = llm.beam_search([[5, 6]], params)
    assert sorted(tuple(beam.tokens[2:]) for beam in found.sequences) == [(10, 10), (10, 11), (11, 10), (11, 11)]


def test_temperature_scales_the_scores(llm: LLM) -> None:
    params = {"beam_width": 2, "max_tokens": 1, "ignore_eos": True}
    (cold,), (hot,) = (
        llm.beam_search([[5, 6]], BeamSearchParams(temperature=temperature, **params)) for temperature in (0.0, 4.0)
    )
    assert [beam.tokens for beam in cold.sequences] == [beam.tokens for beam in hot.sequences]
    first, second = (beam.cum_logprob for beam in cold.sequences)
    warm = [beam.cum_logprob for beam in hot.sequences]
    assert warm[0] - warm[1] == pytest.approx((first - second) / 4, abs=1e-4)


def test_no_beam_ends_before_min_tokens(llm: LLM) -> None:
    stops = tuple(range(3, 200))
    early = BeamSearchParams(beam_width=2, max_tokens=6, stop_token_ids=stops)
    late = BeamSearchParams(beam_width=2, max_tokens=6, min_tokens=4, stop_token_ids=stops)
    assert min(len(b.tokens) for b in llm.beam_search([[5, 6]], early)[0].sequences) - 2 < 4
    assert min(len(b.tokens) for b in llm.beam_search([[5, 6]], late)[0].sequences) - 2 >= 4


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"beam_width": 0, "max_tokens": 3}, "beam_width"),
        ({"beam_width": 2, "max_tokens": -1}, "max_tokens"),
        ({"beam_width": 2, "max_tokens": 3, "early_stopping": "maybe"}, "early_stopping"),
        ({"beam_width": 2, "max_tokens": 3, "early_stopping": 1}, "early_stopping"),
        ({"beam_width": 2, "max_tokens": 3, "length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 2, "max_tokens": 3, "stop": ("",)}, "stop"),
    ],
)
def test_wrong_parameters_are_named(given: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**given)
    assert caught.value.field == field


def test_what_a_search_cannot_do_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.beam_search([[5]], BeamSearchParams(beam_width=2, max_tokens=0))
    assert caught.value.field == "max_tokens"
    with pytest.raises(RequestError) as caught:
        llm.beam_search([[5]], BeamSearchParams(beam_width=2, max_tokens=500))
    assert caught.value.field == "max_tokens"
    with pytest.raises(RequestError) as caught:
        llm.generate([[5]], SamplingParams(use_beam_search=True, n=2))
    assert caught.value.field == "use_beam_search"


def test_answers_keep_only_the_logprobs_that_will_be_shown(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=8, max_tokens=3, ignore_eos=True).sampling()
    search = BeamSearch(
        params, llm._prepare(PROMPTS[0], checked_as_sampled(params)), llm._frontend.door, num_logprobs=1
    )
    while not search.done:
        llm._step_beams([search])
    kept = [entry for answer in search.output().sequences for entry in answer.logprobs]
    assert len(kept) == 24
    assert all(len(entry) <= 2 for entry in kept)
