"""Deltas become each request's own news: text, stop strings, logprobs, failures."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from octavo.engine.frontend import Frontend, Request, derive_seed
from octavo.engine.info import ModelInfo
from octavo.engine.messages import Abort, Failure, Finish, decode_inbound, encode, int32
from octavo.errors import EngineError, RequestError
from octavo.outputs import OutputMerger, RequestOutput
from octavo.sampling.params import SamplingParams
from octavo.tokenizer import Tokenizer


@pytest.fixture
def frontend(tokenizer: Tokenizer, info: ModelInfo) -> Frontend:
    return Frontend(tokenizer, info)


def add(frontend: Frontend, prompt: Any = (5, 6, 7), *, label: str = "r", **params: Any) -> Request:
    prepared = frontend.door.prepare(prompt, SamplingParams(**{"max_tokens": 50, **params}))
    return frontend.add(prepared, request_id=label)


def only(frontend: Frontend, deltas: Any) -> RequestOutput:
    """The single delta that a step gives."""
    items, _ = frontend.process(deltas)
    assert len(items) == 1
    assert isinstance(items[0][1], RequestOutput)
    return items[0][1]


def test_submit_carries_the_request_across_the_wire(frontend: Frontend) -> None:
    request = add(frontend, [5, 6], seed=-3, stop=["x"], max_tokens=7, logit_bias={4: 1.5})
    (submit,) = request.submits()
    again = decode_inbound(encode(submit))
    assert again == submit
    assert int32(again.tokens).tolist() == [5, 6]
    assert (again.seed, again.max_tokens, again.eos) == (-3, 7, (2,))
    assert again.params.stop == (), "stop strings are the client's business"
    assert again.params.logit_bias == {4: 1.5}


def test_answers_of_a_seeded_request_get_different_seeds_that_repeat(frontend: Frontend) -> None:
    seeds = [[s.seed for s in add(frontend, n=4, seed=7).submits()] for _ in range(2)]
    assert seeds[0] == seeds[1]
    assert seeds[0][0] == 7
    assert len(set(seeds[0])) == 4
    assert all(-(2**63) <= derive_seed(s, i) < 2**63 for s in (-(2**63), 0, 2**63 - 1) for i in range(3))


def test_unseeded_requests_differ_unless_the_frontend_is_seeded(
    tokenizer: Tokenizer, info: ModelInfo, frontend: Frontend
) -> None:
    def draw(which: Frontend) -> list[int]:
        return [next(add(which).submits()).seed for _ in range(3)]

    assert len({*draw(frontend), *draw(Frontend(tokenizer, info))}) == 6
    assert draw(Frontend(tokenizer, info, seed=1)) == draw(Frontend(tokenizer, info, seed=1))


def test_handles_are_never_used_twice(frontend: Frontend) -> None:
    handles = [h for _ in range(3) for h in add(frontend, n=2).handles]
    assert len(set(handles)) == 6


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_streamed_pieces_join_to_the_decoded_text(
    frontend: Frontend, tokenizer: Tokenizer, deltas: Any, chunk: int
) -> None:
    text = "The 你好 ď 👍🏽 🇩🇪 end"
    ids = tokenizer.encode(text)
    request = add(frontend)
    merger = OutputMerger()
    for start in range(0, len(ids), chunk):
        last = start + chunk >= len(ids)
        finish = Finish.LENGTH if last else Finish.RUNNING
        delta = only(frontend, deltas((request.handles[0], ids[start : start + chunk], finish)))
        assert "\ufffd" not in delta.outputs[0].text
        merger.add(delta)
    whole = merger.result()
    assert whole is not None
    assert (whole.outputs[0].text, whole.outputs[0].token_ids) == (text, ids)
    assert (whole.finished, whole.outputs[0].finish_reason) == (True, "length")


def test_unfinished_character_at_the_end_becomes_one_replacement(
    frontend: Frontend, tokenizer: Tokenizer, deltas: Any
) -> None:
    ids = tokenizer.encode("ok 好")[:-1]
    request = add(frontend)
    delta = only(frontend, deltas((request.handles[0], ids, Finish.LENGTH)))
    assert delta.outputs[0].text == "ok \ufffd"


def test_stop_token_is_in_the_ids_but_not_in_the_text(frontend: Frontend, tokenizer: Tokenizer, deltas: Any) -> None:
    word = tokenizer.encode("word")
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "word"),
        ({"skip_special_tokens": False}, "word"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "word<|im_start|>"),
        ({"include_stop_str_in_output": True}, "word"),
    ]
    for params, text in cases:
        request = add(frontend, stop_token_ids=(1,), **params)
        output = only(frontend, deltas((request.handles[0], [*word, 1], Finish.STOP))).outputs[0]
        assert (output.text, output.token_ids) == (text, [*word, 1])
        assert (output.finish_reason, output.stop_reason) == ("stop", 1)


def test_eos_has_no_stop_reason_unless_ignored_eos_is_a_stop_token(frontend: Frontend, deltas: Any) -> None:
    request = add(frontend)
    assert only(frontend, deltas((request.handles[0], [2], Finish.STOP))).outputs[0].stop_reason is None
    request = add(frontend, ignore_eos=True, stop_token_ids=(2,))
    assert only(frontend, deltas((request.handles[0], [2], Finish.STOP))).outputs[0].stop_reason == 2


def test_nothing_of_a_stop_string_is_shown_before_it_is_whole(
    frontend: Frontend, tokenizer: Tokenizer, deltas: Any
) -> None:
    request = add(frontend, stop=["DEFGHIJ"])
    handle = request.handles[0]
    outputs, messages = [], []
    for piece in ("DEF", "G", "HI", "J"):
        items, sent = frontend.process(deltas((handle, tokenizer.encode(piece))))
        outputs += [item.outputs[0] for _, item in items if isinstance(item, RequestOutput)]
        messages += sent
    assert "".join(o.text for o in outputs) == ""
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "DEFGHIJ")
    assert [o.finish_reason for o in outputs[:-1]] == [None] * 3
    assert messages == [Abort(client=0, handles=(handle,), finished=True)]


def test_stop_string_inside_a_step_of_several_tokens_drops_the_ids_behind_it(
    frontend: Frontend, tokenizer: Tokenizer, deltas: Any
) -> None:
    ids = tokenizer.encode(" is Paris. More text follows here.")
    for include, text in ((False, " is "), (True, " is Pari")):
        request = add(frontend, stop=["Pari"], include_stop_str_in_output=include)
        output = only(frontend, deltas((request.handles[0], ids))).outputs[0]
        assert output.text == text
        shown = tokenizer.decode(output.token_ids)
        assert "Pari" in shown
        assert "More" not in shown
        assert output.finish_reason == "stop"
        assert request.ended


def test_what_the_engine_still_sends_for_a_stopped_answer_is_ignored(
    frontend: Frontend, tokenizer: Tokenizer, deltas: Any
) -> None:
    request = add(frontend, stop=["x"])
    only(frontend, deltas((request.handles[0], tokenizer.encode("x"))))
    assert frontend.process(deltas((request.handles[0], [5], Finish.STOP))) == ([], [])


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens(
    frontend: Frontend, tokenizer: Tokenizer, deltas: Any
) -> None:
    x = tokenizer.encode("x")
    assert len(x) == 1
    request = add(frontend, stop=["x"], min_tokens=2)
    assert only(frontend, deltas((request.handles[0], x * 2))).outputs[0].text == "xx"
    assert only(frontend, deltas((request.handles[0], x * 2))).outputs[0].token_ids == x
    assert request.ended


def test_interleaved_requests_get_only_their_own_tokens(frontend: Frontend, tokenizer: Tokenizer, deltas: Any) -> None:
    rng = random.Random(0)
    requests = {add(frontend, label=str(i), n=1 + i % 3): i for i in range(16)}
    scripts = {h: [rng.randrange(3, 384) for _ in range(9)] for r in requests for h in r.handles}
    mergers = {r: OutputMerger() for r in requests}
    left = {h: list(ids) for h, ids in scripts.items()}
    while left:
        rows = []
        for handle in rng.sample(sorted(left), k=rng.randint(1, len(left))):
            count = rng.randint(1, 3)
            new, left[handle] = left[handle][:count], left[handle][count:]
            rows.append((handle, new, Finish.RUNNING if left[handle] else Finish.LENGTH))
        items, messages = frontend.process(deltas(*rows))
        assert messages == []
        for request, item in items:
            assert isinstance(item, RequestOutput)
            mergers[request].add(item)
        left = {h: ids for h, ids in left.items() if ids}
    for request, index in requests.items():
        result = mergers[request].result()
        assert result is not None
        assert result.finished
        assert result.request_id == str(index)
        assert [o.token_ids for o in result.outputs] == [scripts[h] for h in request.handles]
        assert [o.text for o in result.outputs] == [tokenizer.decode(scripts[h]) for h in request.handles]


def test_request_is_finished_only_when_all_its_answers_are(frontend: Frontend, deltas: Any) -> None:
    request = add(frontend, n=2)
    first = only(frontend, deltas((request.handles[0], [5], Finish.LENGTH), (request.handles[1], [6])))
    assert not first.finished
    assert [o.index for o in first.outputs] == [0, 1]
    assert only(frontend, deltas((request.handles[1], [7], Finish.LENGTH))).finished


def test_failure_ends_its_request_only(frontend: Frontend, deltas: Any) -> None:
    bad, good = add(frontend, n=2), add(frontend)
    failure = Failure(handle=bad.handles[0], message="no room", field="prompt", client_error=True)
    items, messages = frontend.process(deltas((bad.handles[1], [5]), (good.handles[0], [6]), failures=(failure,)))
    assert messages == [Abort(client=0, handles=(bad.handles[1],))]
    errors = [item for request, item in items if request is bad]
    assert len(errors) == 1
    assert isinstance(errors[0], RequestError)
    assert errors[0].field == "prompt"
    news = [item for request, item in items if request is good and isinstance(item, RequestOutput)]
    assert [one.outputs[0].token_ids for one in news] == [[6]]
    ours = Failure(handle=good.handles[0], message="not finite")
    ((_, error),), _ = frontend.process(deltas(failures=(ours,)))
    assert isinstance(error, EngineError)


def test_an_answer_that_cannot_be_decoded_fails_alone(frontend: Frontend, deltas: Any, logprob_block: Any) -> None:
    bad, good = add(frontend, logprobs=0), add(frontend)
    broken = logprob_block(bad.handles[0], [[5]], [[-1.0]], [1, 1])  # one rank too many
    items, messages = frontend.process(deltas((bad.handles[0], [5]), (good.handles[0], [6]), logprobs=(broken,)))
    outcome = dict(items)
    assert isinstance(outcome[bad], EngineError)
    assert isinstance(outcome[good], RequestOutput)
    assert messages == [Abort(client=0, handles=(bad.handles[0],))]


def test_abort_flushes_held_text_and_forgets_the_request(frontend: Frontend, tokenizer: Tokenizer, deltas: Any) -> None:
    request = add(frontend, stop=["abc"], n=2)
    frontend.process(deltas((request.handles[0], tokenizer.encode("zab")), (request.handles[1], [2], Finish.STOP)))
    message, last = frontend.abort(request)
    assert message == Abort(client=0, handles=(request.handles[0],))
    assert last.finished
    assert [(o.index, o.text, o.finish_reason) for o in last.outputs] == [(0, "ab", "abort")]
    assert frontend.process(deltas((request.handles[0], [5]))) == ([], [])


def test_cached_tokens_and_prompt_come_with_the_first_delta(frontend: Frontend, deltas: Any) -> None:
    request = add(frontend, "Once upon")
    delta = only(frontend, deltas((request.handles[0], [5]), cached=16))
    assert (delta.num_cached_tokens, delta.prompt) == (16, "Once upon")
    assert delta.prompt_token_ids == request.prepared.token_ids


def test_the_tokenizers_own_ends_stop_too(tokenizer: Tokenizer, info: ModelInfo) -> None:
    ends = tokenizer.eos_token_ids
    assert ends, "the test needs a tokenizer that knows an end"
    knows_none = msgspec.structs.replace(info, eos_token_ids=(1,))
    prepared = Frontend(tokenizer, knows_none).door.prepare("hello", SamplingParams())
    assert set(prepared.eos) == {1, *ends}
    ignoring = Frontend(tokenizer, knows_none).door.prepare("hello", SamplingParams(ignore_eos=True))
    assert ignoring.eos == ()
