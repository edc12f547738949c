"""Answers that repeat themselves end, at the same token however steps come."""

from __future__ import annotations

import pytest

from octavo.engine.messages import Finish
from octavo.plugin.step import KVGroup
from octavo.sampling.repetition import RepetitionDetectionParams

THREE_OF_TWO = RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=2, min_count=3)
LOOP = [50, 60, 70, 8, 9, 8, 9, 8, 9, 8, 9, 8, 9, 8, 9, 8, 9, 8]


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_the_end_is_at_the_first_token_that_completes_the_repetition(drive, run_ahead, width):
    d = drive(LOOP, run_ahead=run_ahead, width=width)
    d.submit([1, 2, 3], handle=1, max_tokens=18, repetition_detection=THREE_OF_TWO)
    d.submit([1, 2, 3], handle=2, max_tokens=18)
    d.run().assert_clean()
    assert (d.tokens[1], d.finish[1]) == (LOOP[:9], Finish.REPETITION)
    assert (d.tokens[2], d.finish[2]) == (LOOP, Finish.LENGTH)


def test_a_stop_token_at_the_same_place_is_a_stop(drive):
    d = drive(LOOP, width=4)
    d.submit([1, 2, 3], handle=1, max_tokens=18, repetition_detection=THREE_OF_TWO, eos=(70,))
    d.submit([1, 2, 3], handle=2, max_tokens=9, repetition_detection=THREE_OF_TWO)
    d.run().assert_clean()
    assert (d.tokens[1], d.finish[1]) == ([50, 60, 70], Finish.STOP)
    assert (d.tokens[2], d.finish[2]) == (LOOP[:9], Finish.LENGTH)


@pytest.mark.parametrize("width", [1, 3])
def test_min_tokens_come_before_the_end(drive, width):
    d = drive(LOOP, width=width)
    d.submit([1, 2, 3], handle=1, max_tokens=18, min_tokens=12, repetition_detection=THREE_OF_TWO)
    d.run().assert_clean()
    assert (d.tokens[1], d.finish[1]) == (LOOP[:12], Finish.REPETITION)


def test_repetitions_of_the_prompt_do_not_count(drive):
    d = drive([8, 9, 50, 51, 52, 53])
    d.submit([8, 9, 8, 9, 8, 9], handle=1, max_tokens=6, repetition_detection=THREE_OF_TWO)
    d.run().assert_clean()
    assert d.finish[1] is Finish.LENGTH


def test_preemption_does_not_forget_what_was_seen(drive):
    d = drive(LOOP, groups=(KVGroup(block_size=4, num_blocks=9),), caching=False)
    d.submit([1, 2, 3], handle=1, max_tokens=18, priority=0)
    d.submit([1, 2, 3, 4, 5], handle=2, max_tokens=18, repetition_detection=THREE_OF_TWO)
    d.submit([1, 2, 3, 4, 5, 6], handle=3, max_tokens=18, repetition_detection=THREE_OF_TWO)
    d.run().assert_clean()
    assert d.stats.preemptions > 0
    for handle in (2, 3):
        assert (d.tokens[handle], d.finish[handle]) == (LOOP[:9], Finish.REPETITION)


def test_later_requests_do_not_find_what_lies_behind_the_end(drive):
    d = drive(LOOP, width=5, run_ahead=1)
    d.submit([1, 2, 3], handle=1, max_tokens=18, repetition_detection=THREE_OF_TWO)
    d.run()
    d.submit([1, 2, 3, *LOOP[:9], 99], handle=2, max_tokens=2)
    d.run().assert_clean()
    assert d.cached[2] <= 12
