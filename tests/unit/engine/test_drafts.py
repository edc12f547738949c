"""Drafts in the scheduler: fewer steps when they come true, the same tokens whatever they are, and nothing is lost."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest

from octavo.engine.messages import Finish
from octavo.plugin.data import ScheduleLimits
from octavo.plugin.step import KVGroup
from octavo.sampling.repetition import RepetitionDetectionParams

EOS = 0


def drafts_of(batch):
    """How many drafts each sequence of a batch has."""
    return [0] * batch.num_seqs if batch.drafts is None else (batch.drafts >= 0).sum(axis=1).tolist()


def test_right_drafts_save_steps_and_change_no_token(drive):
    plain = drive()
    plain.submit([7, 8], handle=1, max_tokens=20)
    d = drive(drafter="right", num_drafts=4)
    d.submit([7, 8], handle=1, max_tokens=20)
    assert plain.run().tokens == d.run().tokens
    # Four drafts and one more token each step; the first token comes with the prompt.
    assert (len(plain.batches), len(d.batches)) == (20, 5)
    assert (d.stats.spec_drafts, d.stats.spec_draft_tokens, d.stats.spec_accepted) == (4, 15, (4, 4, 4, 3))
    d.assert_clean()


def test_wrong_drafts_cost_no_step_and_change_no_token(drive):
    d = drive(drafter="wrong", num_drafts=4)
    d.submit([7, 8], handle=1, max_tokens=20)
    d.run().assert_clean()
    assert d.tokens[1] == list(range(9, 29))
    assert len(d.batches) == 20
    assert d.stats.spec_accepted == (0, 0, 0, 0)


def test_drafts_stop_short_of_the_limit(drive):
    d = drive(drafter="right", num_drafts=5)
    for handle, most in enumerate((1, 2, 3, 7, 8)):
        d.submit([10 * handle + 5], handle=handle, max_tokens=most)
    d.run().assert_clean()
    assert [len(d.tokens[handle]) for handle in range(5)] == [1, 2, 3, 7, 8]
    assert set(d.finish.values()) == {Finish.LENGTH}


def test_an_end_among_drafts_that_came_true_cuts_what_stands_behind_it(drive):
    d = drive(drafter="right", num_drafts=6)
    d.submit([7], handle=1, max_tokens=20, eos=(11,))
    d.submit([40], handle=2, max_tokens=20, eos=(41, 44), min_tokens=3)
    d.run().assert_clean()
    assert (d.tokens[1], d.finish[1]) == ([8, 9, 10, 11], Finish.STOP)
    assert (d.tokens[2], d.finish[2]) == ([41, 42, 43, 44], Finish.STOP)


def test_a_repetition_among_drafts_ends_the_answer_at_its_token(drive):
    watch = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
    answers = []
    for drafter in (None, "right"):
        d = drive([4, 5, 6, 5, 6, 5, 6, 7, 8], drafter=drafter, num_drafts=6)
        d.submit([1], handle=1, max_tokens=9, repetition_detection=watch)
        d.run().assert_clean()
        answers.append((d.tokens[1], d.finish[1]))
    assert answers[0] == answers[1] == ([4, 5, 6, 5, 6, 5, 6], Finish.REPETITION)


def test_every_token_of_a_step_has_its_logprobs(drive):
    d = drive(drafter="mixed", num_drafts=4)
    d.submit([7, 8], handle=1, max_tokens=20, logprobs=1)
    d.run().assert_clean()
    blocks = [block for block in d.logprobs if not block.prompt]
    assert [p for b in blocks for p in range(b.start, b.start + len(b.ranks) // 4)] == list(range(2, 22))
    assert max(len(block.ranks) // 4 for block in blocks) > 1


def test_drafts_take_only_what_a_step_has_left(drive):
    d = drive(drafter="right", num_drafts=4, max_num_batched_tokens=8)
    for handle in range(3):
        d.submit([30 * handle + 5], handle=handle, max_tokens=30)
    d.step(3)
    d.submit(list(range(100, 140)), handle=9, max_tokens=2)
    before = len(d.batches)
    d.run().assert_clean()
    assert all(batch.num_tokens <= 8 for batch in d.batches)
    # The prompt has five of eight tokens in each step, and while it is computed the three decodes have no drafts.
    filling = d.batches[before : before + 8]
    assert [drafts_of(batch) for batch in filling] == [[0, 0, 0, 0]] * 8
    assert any(sum(drafts_of(batch)) == 5 for batch in d.batches)
    assert d.tokens[0] == list(range(6, 36))


def test_drafts_preempt_nobody(drive):
    """Blocks that only drafts would need are not taken from others."""
    groups = (KVGroup(block_size=4, num_blocks=8),)
    runs = []
    for drafter in (None, "wrong"):
        d = drive(groups=groups, drafter=drafter, num_drafts=6, max_model_len=28)
        d.submit([5, 6, 7, 8], handle=1, max_tokens=9, eos=())
        d.submit([9, 10, 11, 12], handle=2, max_tokens=9, eos=())
        d.run().assert_clean()
        runs.append((d.tokens, d.stats.preemptions))
    assert runs[0] == runs[1]
    assert runs[0][1] == 0


def test_a_preempted_sequence_goes_on_with_drafts(drive):
    groups = (KVGroup(block_size=4, num_blocks=10),)
    d = drive(groups=groups, drafter="mixed", num_drafts=5, max_model_len=36)
    for handle in range(4):
        d.submit([30 * handle + 5] * 3, handle=handle, max_tokens=20, eos=())
    d.run().assert_clean()
    assert d.stats.preemptions > 0
    assert [d.tokens[h] for h in range(4)] == [list(range(30 * h + 6, 30 * h + 26)) for h in range(4)]


def test_the_prefix_cache_holds_only_tokens_that_were_accepted(drive):
    """A later prompt that is what wrong drafts said finds none of their blocks: the executor checks what it reads."""
    d = drive(drafter="wrong", num_drafts=6)
    d.submit([7, 8, 9, 10], handle=1, max_tokens=13)
    d.run()
    said = d.tokens[1]
    d.submit([7, 8, 9, 10, *said[:8], 1], handle=2, max_tokens=4)
    d.submit([7, 8, 9, 10, *[token % 200 + 1 for token in said[:8]], 1], handle=3, max_tokens=4)
    d.run().assert_clean()
    assert (d.cached[2], d.cached[3]) == (12, 4)


def test_a_request_with_a_logits_processor_has_no_drafts(drive):
    d = drive(drafter="right", num_drafts=4)
    d.submit([7, 8], handle=1, max_tokens=6, extra_args={"mine": 1})
    d.run().assert_clean()
    assert len(d.batches) == 6
    assert d.seer.asked == 0


@pytest.mark.parametrize(
    "limits",
    [
        ScheduleLimits(mix_prefill_decode=False),
        ScheduleLimits(max_prefills_per_step=1),
        ScheduleLimits(max_batch_context_tokens=40),
    ],
)
def test_the_platforms_limits_hold_with_drafts(drive, limits):
    d = drive(drafter="right", num_drafts=3, limits=limits)
    for handle in range(3):
        d.submit([30 * handle + 5] * (1 + handle), handle=handle, max_tokens=12)
        d.step()
    d.run().assert_clean()
    assert d.stats.spec_drafts > 0
    for batch in d.batches:
        drafts = np.array(drafts_of(batch))
        prefills = batch.counts - drafts > 1
        assert limits.mix_prefill_decode or prefills.all() or not prefills.any()
        assert limits.max_prefills_per_step is None or prefills.sum() <= 1
        if limits.max_batch_context_tokens is not None and (drafts > 0).any():
            longest = int((batch.starts + batch.counts)[~prefills].max())
            assert (~prefills).sum() * longest <= 40
    assert d.tokens[2] == list(range(66, 78))


class Broken:
    """Gives what `answer` makes of what it is asked."""

    def __init__(self, answer):
        self.answer = answer
        self.calls = 0

    def propose(self, batch):
        self.calls += 1
        return self.answer(batch)


def fail(batch):
    raise KeyError("lost")


FAULTS = {
    "raises": (fail, "KeyError: 'lost'"),
    "nothing": (lambda batch: None, "gave NoneType instead of an array of integers"),
    "a list": (lambda batch: [[1]], "gave list instead"),
    "floats": (lambda batch: np.ones((1, 1)), r"gave float64 \[1, 1\] instead"),
    "one axis": (lambda batch: np.ones(1, np.int32), r"gave int32 \[1\] instead"),
    "more rows": (lambda batch: np.ones((2, 1), np.int32), "drafts of 2 sequences for 1"),
    "too many": (lambda batch: np.ones((1, 9), np.int32), "gave 9 drafts where at most 3 were asked for"),
    "a gap": (lambda batch: np.array([[1, -1, 2]], np.int32), "something other than -1"),
    "below": (lambda batch: np.array([[1, -7, -7]], np.int32), "something other than -1"),
    "no token": (lambda batch: np.array([[1, 256, -1]], np.int32), "token 256; the vocabulary has ids 0 to 255"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_drafter_that_fails_is_named_once_and_no_request_is_lost(drive, caplog, fault):
    answer, message = FAULTS[fault]
    broken = Broken(answer)
    d = drive(drafter=broken, num_drafts=3)
    with caplog.at_level(logging.ERROR, "octavo.speculate"):
        d.submit([7, 8], handle=1, max_tokens=6)
        d.run().assert_clean()
    assert (d.tokens[1], d.finish[1]) == (list(range(9, 15)), Finish.LENGTH)
    assert broken.calls == 1
    (record,) = caplog.records
    assert "the drafter 'seer' (Broken) failed" in record.getMessage()
    assert re.search(message, record.getMessage())
