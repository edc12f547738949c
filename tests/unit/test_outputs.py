"""Deltas join to the whole."""

from __future__ import annotations

from octavo.outputs import CompletionOutput, Logprob, OutputMerger, RequestOutput


def delta(*outputs: CompletionOutput, finished: bool = False, **fields: object) -> RequestOutput:
    return RequestOutput("r", "p", [1], list(outputs), finished, **fields)  # type: ignore[arg-type]


def test_nothing_added_is_no_result() -> None:
    assert OutputMerger().result() is None


def test_deltas_join_by_index_and_are_left_as_they_were() -> None:
    entry = {5: Logprob(-1.0, 1, "a")}
    first = delta(CompletionOutput(1, "b", [6]), CompletionOutput(0, "a", [5], -1.0, [entry]), num_cached_tokens=3)
    second = delta(CompletionOutput(0, "c", [7], -3.0, [entry], "stop", 9), num_cached_tokens=3)
    third = delta(CompletionOutput(1, "d", [8], None, None, "length"), finished=True, num_cached_tokens=3)
    merger = OutputMerger()
    for one in (first, second, third):
        merger.add(one)
    whole = merger.result()
    assert whole is not None
    assert [(o.index, o.text, o.token_ids) for o in whole.outputs] == [(0, "ac", [5, 7]), (1, "bd", [6, 8])]
    assert whole.outputs[0].logprobs == [entry, entry]
    assert (whole.outputs[0].cumulative_logprob, whole.outputs[0].stop_reason) == (-3.0, 9)
    assert (whole.finished, whole.num_cached_tokens) == (True, 3)
    assert first.outputs[1].token_ids == [5]
    assert first.outputs[1].logprobs == [entry]
    assert not first.finished


def test_a_result_can_be_taken_in_between() -> None:
    merger = OutputMerger()
    merger.add(delta(CompletionOutput(0, "a", [1])))
    assert merger.result().outputs[0].text == "a"  # type: ignore[union-attr]
    merger.add(delta(CompletionOutput(0, "b", [2])))
    assert merger.result().outputs[0].text == "ab"  # type: ignore[union-attr]


def test_prompt_logprobs_of_the_first_delta_stay() -> None:
    merger = OutputMerger()
    merger.add(delta(prompt_logprobs=[None]))
    merger.add(delta(finished=True))
    assert merger.result().prompt_logprobs == [None]  # type: ignore[union-attr]
