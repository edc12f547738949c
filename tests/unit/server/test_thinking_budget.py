"""A limit on reasoning is kept in the marks of the model's own format."""

from __future__ import annotations

from octavo.sampling.params import SamplingParams
from octavo.server.parsers.grammar import ReasoningFormat
from octavo.server.parsers.registry import Format
from octavo.server.thinking_budget import in_marks_of

BRACKETS = ReasoningFormat(start=("[THINK]", "<think>"), end=("[/THINK]", "\n[/THINK]"))
ASKED = SamplingParams(thinking_token_budget=9, extra_args={"mine": 1})


def argument(params):
    assert params.thinking_token_budget is None, "the door would put its own marks in its place"
    assert params.extra_args["mine"] == 1
    return params.extra_args["thinking_token_budget"]


def test_the_marks_are_those_of_the_format():
    params = in_marks_of(Format(reasoning=BRACKETS), ASKED, in_reasoning=False, encode=lambda mark: [len(mark)])
    assert argument(params) == {"budget": 9, "start": [7], "end": [8]}


def test_reasoning_that_the_prompt_opened_is_counted_from_the_answers_first_token():
    params = in_marks_of(Format(reasoning=BRACKETS), ASKED, in_reasoning=True, encode=lambda mark: [len(mark)])
    assert argument(params) == {"budget": 9, "start": [], "end": [8]}


def test_formats_without_an_end_of_reasoning_leave_it_to_the_door():
    for format in (Format(), Format(reasoning=ReasoningFormat(shown="<think>"))):
        assert in_marks_of(format, ASKED, in_reasoning=False, encode=lambda mark: [1]) is ASKED
    plain = SamplingParams()
    assert in_marks_of(Format(reasoning=BRACKETS), plain, in_reasoning=False, encode=lambda mark: [1]) is plain
