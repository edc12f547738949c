"""Several answers to one prompt: it is computed once, whatever happens to the first of them."""

from __future__ import annotations

import pytest

from octavo.engine.messages import Finish
from octavo.plugin.step import KVGroup

PROMPT = list(range(1, 22))  # five blocks of four, and one token


def ask(d, *, num_answers=4, prompt=PROMPT, **how):
    for handle in range(1, num_answers + 1):
        d.submit(prompt, handle=handle, leader=0 if handle == 1 else 1, **how)


def computed(d):
    return sum(batch.num_tokens for batch in d.batches)


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("budget", [64, 8])
def test_a_prompt_is_computed_once_for_all_answers(drive, run_ahead, budget):
    alone = drive(run_ahead=run_ahead, max_num_batched_tokens=budget)
    alone.submit(PROMPT, handle=1)
    alone.run()
    d = drive(run_ahead=run_ahead, max_num_batched_tokens=budget)
    ask(d)
    d.run().assert_clean()
    assert d.tokens == dict.fromkeys((1, 2, 3, 4), alone.tokens[1])
    # The others compute what the blocks do not hold of the prompt, one token, and their answers.
    assert computed(d) == computed(alone) + 3 * (1 + len(alone.tokens[1]) - 1)
    assert [d.cached[handle] for handle in (2, 3, 4)] == [20, 20, 20]


def test_answers_start_in_their_order_and_before_later_requests(drive):
    d = drive(max_num_seqs=3)
    ask(d)
    d.submit([9, 9], handle=5)
    d.step(2)
    assert [admit.token_ids[0] for batch in d.batches for admit in batch.admits][:3] == [1, 9, 1]
    d.run().assert_clean()
    assert d.finish_order.index(2) < d.finish_order.index(3) < d.finish_order.index(4)


def test_held_answers_count_as_waiting(drive):
    d = drive()
    ask(d)
    assert d.stats.waiting == 4
    d.step()
    assert (d.stats.running, d.stats.waiting) == (1, 3)
    d.run().assert_clean()


@pytest.mark.parametrize("how", [{"caching": False}, {"groups": (KVGroup(block_size=32, num_blocks=16),)}])
def test_answers_start_at_once_where_nothing_can_be_shared(drive, how):
    d = drive(max_num_batched_tokens=128, **how)
    ask(d)
    d.step()
    assert len(d.batches[0].rows) == 4
    d.run().assert_clean()


def test_the_first_computes_the_prompts_logprobs_and_the_others_its_blocks(drive):
    d = drive()
    d.submit(PROMPT, handle=1, prompt_logprobs=1)
    for handle in (2, 3):
        d.submit(PROMPT, handle=handle, leader=1)
    d.run().assert_clean()
    assert d.cached == {1: 0, 2: 20, 3: 20}


@pytest.mark.parametrize("steps", [0, 1])
def test_aborting_the_first_lets_the_others_go_on(drive, steps):
    d = drive(max_num_batched_tokens=8)
    ask(d)
    d.step(steps)
    d.abort(1)
    d.run().assert_clean()
    assert d.finish[1] is Finish.ABORT
    assert [d.finish[handle] for handle in (2, 3, 4)] == [Finish.LENGTH] * 3


def test_aborting_one_that_is_held_leaves_the_others(drive):
    d = drive()
    ask(d)
    d.step()
    d.abort(3)
    d.run().assert_clean()
    assert d.finish[3] is Finish.ABORT
    assert not d.tokens[3]
    assert len(d.tokens[2]) == len(d.tokens[4]) == 4


def test_a_failing_first_lets_the_others_go_on(drive):
    d = drive(fail_rows={1: {0}})
    ask(d)
    d.run().assert_clean()
    assert d.finish[1] is Finish.ERROR
    assert [d.finish[handle] for handle in (2, 3, 4)] == [Finish.LENGTH] * 3


def test_one_that_comes_after_the_prompt_was_computed_need_not_wait(drive):
    d = drive()
    d.submit(PROMPT, handle=1, max_tokens=8)
    d.step()
    d.submit(PROMPT, handle=2, leader=1)
    d.step()
    assert [len(batch.rows) for batch in d.batches] == [1, 2]
    d.run().assert_clean()


def test_little_memory_and_preemption_end_all_the_same(drive, hashed_script):
    d = drive(hashed_script, groups=(KVGroup(block_size=4, num_blocks=13),), max_num_batched_tokens=8, run_ahead=1)
    ask(d, max_tokens=12)
    d.submit([7] * 9, handle=9, max_tokens=20)
    d.run().assert_clean()
    assert d.tokens[2] == d.tokens[1] == list(hashed_script(tuple(PROMPT)))[:12]
    assert len(d.tokens[9]) == 20
