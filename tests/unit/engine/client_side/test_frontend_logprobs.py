"""Logprobs of answers and prompts: order, ranks, the floor for minus infinity, chunks."""

from __future__ import annotations

import math
from typing import Any

import pytest

from octavo.engine.frontend import Frontend, Request
from octavo.engine.info import ModelInfo
from octavo.engine.logprobs import FLOOR
from octavo.engine.messages import Finish
from octavo.outputs import Logprob, RequestOutput
from octavo.sampling.params import SamplingParams
from octavo.tokenizer import Tokenizer

INF = math.inf


@pytest.fixture
def frontend(tokenizer: Tokenizer, info: ModelInfo) -> Frontend:
    return Frontend(tokenizer, info)


def add(frontend: Frontend, **params: Any) -> Request:
    prepared = frontend.door.prepare([5, 6, 7, 8], SamplingParams(max_tokens=9, **params))
    return frontend.add(prepared, request_id="r")


def only(frontend: Frontend, deltas: Any) -> RequestOutput:
    ((_, item),), _ = frontend.process(deltas)
    assert isinstance(item, RequestOutput)
    return item


def test_the_chosen_token_comes_first_and_appears_once(
    frontend: Frontend, tokenizer: Tokenizer, deltas: Any, logprob_block: Any
) -> None:
    request = add(frontend, logprobs=2)
    handle = request.handles[0]
    block = logprob_block(handle, [[40, 50, 60], [50, 50, 60]], [[-3, -0.5, -1], [-0.25, -0.25, -2]], [7, 1])
    output = only(frontend, deltas((handle, [40, 50]), logprobs=(block,))).outputs[0]
    text = tokenizer.token_text
    assert output.logprobs == [
        {40: Logprob(-3, 7, text(40)), 50: Logprob(-0.5, 1, text(50)), 60: Logprob(-1, 2, text(60))},
        {50: Logprob(-0.25, 1, text(50)), 60: Logprob(-2, 2, text(60))},
    ]
    assert [next(iter(entry)) for entry in output.logprobs] == [40, 50]
    assert output.cumulative_logprob == -3.25


def test_minus_infinity_and_no_number_become_the_floor(frontend: Frontend, deltas: Any, logprob_block: Any) -> None:
    request = add(frontend, logprobs=2)
    handle = request.handles[0]
    block = logprob_block(handle, [[40, 41, 42]], [[-INF, 0.0, math.nan]], [3])
    output = only(frontend, deltas((handle, [40]), logprobs=(block,))).outputs[0]
    assert output.logprobs is not None
    assert [entry.logprob for entry in output.logprobs[0].values()] == [FLOOR, 0.0, FLOOR]
    assert output.cumulative_logprob == FLOOR == -9999.0


def test_whole_vocabulary_has_an_entry_for_every_token(frontend: Frontend, deltas: Any, logprob_block: Any) -> None:
    request = add(frontend, logprobs=-1)
    handle = request.handles[0]
    order = [3, *range(384)]
    block = logprob_block(handle, [order], [[-5.0] * 385], [4])
    output = only(frontend, deltas((handle, [3]), logprobs=(block,))).outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs[0]) == 384


def test_entries_behind_a_stop_string_are_dropped_with_their_tokens(
    frontend: Frontend, tokenizer: Tokenizer, deltas: Any, logprob_block: Any
) -> None:
    x, y = tokenizer.encode("x")[0], tokenizer.encode("y")[0]
    request = add(frontend, logprobs=0, stop=["x"])
    handle = request.handles[0]
    block = logprob_block(handle, [[y], [x], [y]], [[-1], [-2], [-4]], [1, 1, 1])
    output = only(frontend, deltas((handle, [y, x, y]), logprobs=(block,))).outputs[0]
    assert output.token_ids == [y, x]
    assert output.logprobs is not None
    assert [list(entry) for entry in output.logprobs] == [[y], [x]]
    assert output.cumulative_logprob == -3


def test_prompt_logprobs_of_any_chunks_are_one_list(frontend: Frontend, deltas: Any, logprob_block: Any) -> None:
    rows = {1: ([6, 9], [-1, -0.5], 2), 2: ([7, 9], [-2, -0.5], 3), 3: ([8, 8], [-0.1, -0.1], 1)}

    def score(*chunks: tuple[int, ...]) -> Any:
        request = add(frontend, prompt_logprobs=1)
        blocks = [
            logprob_block(
                request.handles[0],
                [rows[p][0] for p in chunk],
                [rows[p][1] for p in chunk],
                [rows[p][2] for p in chunk],
                prompt=True,
                start=chunk[0],
            )
            for chunk in chunks
        ]
        for block in blocks[:-1]:
            assert frontend.process(deltas(logprobs=(block,))) == ([], [])
        first = only(frontend, deltas((request.handles[0], [50]), logprobs=blocks[-1:]))
        assert only(frontend, deltas((request.handles[0], [51], Finish.LENGTH))).prompt_logprobs is None
        return first.prompt_logprobs

    whole = score((1, 2, 3))
    assert whole[0] is None
    assert [next(iter(entry)) for entry in whole[1:]] == [6, 7, 8]
    assert whole[2][7].rank == 3
    assert score((1,), (2, 3)) == whole
    assert score((1, 2), (1, 2, 3)) == whole, "recomputed after preemption"


def test_prompt_logprobs_come_before_any_token_and_only_the_first_answer_computes_them(
    frontend: Frontend, deltas: Any, logprob_block: Any
) -> None:
    request = add(frontend, prompt_logprobs=0, n=2)
    assert [s.params.prompt_logprobs for s in request.submits()] == [0, None]
    one, two = request.handles
    assert frontend.process(deltas((two, [50]))) == ([], [])
    block = logprob_block(one, [[6], [7], [8]], [[-1], [-1], [-1]], [1, 1, 1], prompt=True, start=1)
    delta = only(frontend, deltas((one, [60]), logprobs=(block,)))
    assert [(o.index, o.token_ids) for o in delta.outputs] == [(1, [50]), (0, [60])]
    assert delta.prompt_logprobs is not None
    assert len(delta.prompt_logprobs) == 4


def test_scoring_a_prompt_gives_logprobs_and_no_text(frontend: Frontend, deltas: Any, logprob_block: Any) -> None:
    prepared = frontend.door.prepare([5, 6], SamplingParams(max_tokens=0, prompt_logprobs=0))
    request = frontend.add(prepared, request_id="r")
    block = logprob_block(request.handles[0], [[6]], [[-1.5]], [1], prompt=True, start=1)
    delta = only(frontend, deltas((request.handles[0], [], Finish.LENGTH), logprobs=(block,)))
    assert delta.finished
    assert (delta.outputs[0].text, delta.outputs[0].token_ids, delta.outputs[0].finish_reason) == ("", [], "length")
    assert delta.prompt_logprobs is not None
    assert delta.prompt_logprobs[1] is not None
    assert delta.prompt_logprobs[1][6].logprob == -1.5
