"""How a request ends, and what its client is told."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.engine.messages import Finish, ResetPrefixCache, Submit, int32
from octavo.plugin.step import KVGroup
from octavo.sampling.params import SamplingParams

both_depths = pytest.mark.parametrize("run_ahead", [0, 1])
widths = pytest.mark.parametrize("width", [1, 3])


@both_depths
@widths
def test_answer_ends_at_max_tokens(drive, run_ahead, width):
    d = drive(run_ahead=run_ahead, width=width)
    d.submit([5, 6, 7], handle=1, max_tokens=5)
    d.run().assert_clean()
    assert d.tokens[1] == [8, 9, 10, 11, 12]
    assert d.finish[1] is Finish.LENGTH


@both_depths
@widths
def test_answer_ends_at_eos_and_includes_it(drive, run_ahead, width):
    d = drive([4, 5, 6, 7], run_ahead=run_ahead, width=width)
    d.submit([1], handle=1, max_tokens=50)
    d.submit([2], handle=2, max_tokens=50, eos=(99, 6))
    d.run().assert_clean()
    assert (d.tokens[1], d.finish[1]) == ([4, 5, 6, 7, 0], Finish.STOP)
    assert (d.tokens[2], d.finish[2]) == ([4, 5, 6], Finish.STOP)


@both_depths
@widths
def test_eos_is_ignored_before_min_tokens(drive, run_ahead, width):
    d = drive([0, 0, 0, 0, 0, 0], run_ahead=run_ahead, width=width)
    d.submit([1], handle=1, max_tokens=50, min_tokens=3)
    d.run().assert_clean()
    assert (d.tokens[1], d.finish[1]) == ([0] * 4, Finish.STOP)


@both_depths
def test_stop_token_at_max_tokens_is_a_stop(drive, run_ahead):
    d = drive([4, 5], run_ahead=run_ahead)
    d.submit([1], handle=1, max_tokens=3)
    d.run()
    assert d.finish[1] is Finish.STOP


@both_depths
def test_answer_ends_where_the_context_ends(drive, run_ahead):
    d = drive(run_ahead=run_ahead, max_model_len=16)
    d.submit(range(1, 16), handle=1, max_tokens=50)
    d.submit(range(1, 13), handle=2, max_tokens=50)
    d.run().assert_clean()
    assert (d.tokens[1], d.finish[1]) == ([16], Finish.LENGTH)
    assert (len(d.tokens[2]), d.finish[2]) == (4, Finish.LENGTH)


@pytest.mark.parametrize(
    ("length", "max_tokens", "served"), [(15, 1, True), (16, 0, True), (16, 1, False), (17, 0, False), (17, 9, False)]
)
def test_prompt_that_leaves_no_room_is_refused(drive, length, max_tokens, served):
    d = drive(max_model_len=16)
    d.submit([3] * length, handle=1, max_tokens=max_tokens)
    d.run().assert_clean()
    assert (1 in d.finish) == served
    if not served:
        failure = d.failures[1]
        assert failure.client_error
        assert failure.field == "prompt"
        assert str(length) in failure.message
        assert "16" in failure.message


@both_depths
def test_max_tokens_zero_only_computes_the_prompt(drive, run_ahead):
    d = drive(run_ahead=run_ahead, max_num_batched_tokens=4)
    d.submit(range(1, 11), handle=1, max_tokens=0, prompt_logprobs=2)
    d.run().assert_clean()
    assert (d.tokens[1], d.finish[1]) == ([], Finish.LENGTH)
    positions = [p for block in d.logprobs for p in range(block.start, block.start + len(block.ranks) // 4)]
    assert positions == list(range(1, 10))
    assert all(block.prompt and block.width == 3 for block in d.logprobs)
    assert [t for b in d.logprobs for t in int32(b.ids).reshape(-1, 3)[:, 0]] == list(range(2, 11))


def test_prompt_logprobs_come_even_if_the_first_token_is_the_last(drive):
    d = drive()
    d.submit(range(1, 6), handle=1, max_tokens=1, prompt_logprobs=0)
    d.run()
    assert [(b.start, len(b.ranks) // 4) for b in d.logprobs] == [(1, 4)]


def test_prompt_logprobs_are_not_taken_from_the_cache_nor_sent_twice(drive):
    d = drive(groups=(KVGroup(block_size=4, num_blocks=9),))
    d.submit(range(1, 9), handle=1, max_tokens=16, prompt_logprobs=1)
    d.submit(range(1, 9), handle=2, max_tokens=16, prompt_logprobs=1)
    d.run().assert_clean()
    assert d.stats.preemptions > 0
    assert d.stats.prefix_queries == 0
    for handle in (1, 2):
        blocks = [b for b in d.logprobs if b.handle == handle]
        assert [p for b in blocks for p in range(b.start, b.start + len(b.ranks) // 4)] == list(range(1, 8))


@both_depths
@widths
def test_logprobs_belong_to_the_tokens_that_were_kept(drive, run_ahead, width):
    d = drive([4, 5, 6, 7], run_ahead=run_ahead, width=width)
    d.submit([1, 2], handle=1, max_tokens=50, logprobs=2, eos=(6,))
    d.run()
    assert d.tokens[1] == [4, 5, 6]
    blocks = d.logprobs
    assert [t for b in blocks for t in int32(b.ids).reshape(-1, 3)[:, 0]] == [4, 5, 6]
    assert [p for b in blocks for p in range(b.start, b.start + len(b.ranks) // 4)] == [2, 3, 4]
    assert all(np.isfinite(np.frombuffer(b.values, "<f4")).all() and not b.prompt for b in blocks)


def test_request_larger_than_all_kv_memory_is_refused_and_says_so(drive):
    d = drive(groups=(KVGroup(block_size=4, num_blocks=9),))
    d.submit([1] * 40, handle=1, max_tokens=4)
    d.submit([1] * 10, handle=2, max_tokens=40)
    d.submit([1] * 10, handle=3, max_tokens=23)
    d.run().assert_clean()
    assert d.failures[1].field == "prompt"
    assert d.failures[2].field == "max_tokens"
    assert "32 tokens of KV memory" in d.failures[2].message
    assert all(f.client_error for f in d.failures.values())
    assert len(d.tokens[3]) == 23


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "field"), [(b"", 4, "prompt"), (b"abc", 4, "prompt"), (b"abcd", -1, "max_tokens")]
)
def test_malformed_submit_is_a_failure_not_an_exception(drive, tokens, max_tokens, field):
    d = drive()
    d.loop.receive(Submit(handle=1, client=0, tokens=tokens, params=SamplingParams(), max_tokens=max_tokens, seed=0))
    d.run().assert_clean()
    assert (d.failures[1].field, d.failures[1].client_error) == (field, True)


def test_duplicate_handle_fails_and_leaves_the_first_alone(drive):
    d = drive()
    d.submit([1], handle=1, max_tokens=4)
    d.step()
    d.submit([50], handle=1, max_tokens=4)
    d.submit([70], handle=2, max_tokens=1, client=1)
    d.run().assert_clean()
    assert d.failures[1].field == "handle"
    assert (d.tokens[1], d.finish[1]) == ([2, 3, 4, 5], Finish.LENGTH)


def test_handle_may_be_used_again_after_its_end(drive):
    d = drive()
    d.submit([1], handle=1, max_tokens=1)
    d.run()
    del d.finish[1]
    d.submit([1], handle=1, max_tokens=2)
    d.run().assert_clean()
    assert d.tokens[1] == [2, 2, 3]


def test_full_queue_refuses_through_no_fault_of_the_client(drive):
    d = drive(max_queue=2)
    for handle in range(3):
        d.submit([1], handle=handle)
    d.run().assert_clean()
    assert set(d.failures) == {2}
    assert not d.failures[2].client_error
    assert len(d.tokens) == 2


def test_each_client_gets_only_its_own(drive):
    d = drive(run_ahead=1)
    for handle in range(6):
        d.submit([10 * handle + 1], handle=handle, client=handle % 3, max_tokens=3 + handle)
    d.abort(0, client=1)  # another client's handle: means nothing
    d.run().assert_clean()
    for handle in range(6):
        assert d.clients[handle] == {handle % 3}
        assert d.tokens[handle] == [10 * handle + 2 + i for i in range(3 + handle)]


@both_depths
@pytest.mark.parametrize("steps", range(8))
def test_abort_frees_everything_at_any_moment(drive, run_ahead, steps):
    d = drive(run_ahead=run_ahead, max_num_batched_tokens=4, max_num_seqs=2)
    for handle in range(4):
        d.submit(range(handle + 1, handle + 10), handle=handle, max_tokens=30)
    d.step(steps)
    d.abort(0, 2)
    d.abort(0, 2)
    d.abort(99)
    d.run().assert_clean()
    assert d.finish[0] is d.finish[2] is Finish.ABORT
    assert d.stats.aborts == 2
    for handle in (1, 3):
        assert d.tokens[handle] == list(range(handle + 10, handle + 40))


def test_abort_by_a_stop_string_is_a_stop(drive):
    d = drive(run_ahead=1)
    d.submit([1], handle=1, max_tokens=50)
    d.step(5)
    d.abort(1, finished=True)
    d.run().assert_clean()
    assert d.finish[1] is Finish.STOP
    assert d.stats.aborts == 0


def test_abort_of_a_preempted_sequence(drive):
    d = drive(groups=(KVGroup(block_size=4, num_blocks=9),))
    for handle in range(2):
        d.submit(range(1, 9), handle=handle, max_tokens=20)
    while not d.stats.preemptions:
        d.step()
    d.abort(1)
    d.run().assert_clean()
    assert (d.finish[0], d.finish[1]) == (Finish.LENGTH, Finish.ABORT)


@both_depths
def test_row_that_fails_alone_does_not_hurt_the_others(drive, run_ahead):
    d = drive(run_ahead=run_ahead, fail_rows={3: [1]})
    for handle in range(3):
        d.submit([10 * handle + 1] * 5, handle=handle, max_tokens=6)
    d.run().assert_clean()
    assert d.finish[1] is Finish.ERROR
    assert not d.failures[1].client_error
    assert "scripted failure" in d.failures[1].message
    assert len(d.tokens[0]) == len(d.tokens[2]) == 6


@both_depths
@pytest.mark.parametrize(("step", "trusted"), [(1, 0), (2, 8), (9, 8)])
def test_what_a_failed_row_computed_is_not_found_by_others(drive, run_ahead, step, trusted):
    d = drive(run_ahead=run_ahead, fail_rows={step: [0]})
    d.submit(range(1, 9), handle=0, max_tokens=20)
    d.run().assert_clean()
    assert d.finish[0] is Finish.ERROR
    d.submit(range(1, 30), handle=1, max_tokens=1)
    d.run()
    assert d.cached[1] == trusted


@both_depths
def test_engine_serves_again_after_a_step_that_raised(drive, run_ahead):
    d = drive(run_ahead=run_ahead, fail_at_step=3, max_num_seqs=2)
    for handle in range(4):
        d.submit([10 * handle + 1] * 5, handle=handle, max_tokens=6)
    with pytest.raises(RuntimeError, match="scripted failure of step 3"):
        d.run()
    d.take(d.loop.fail_all("the device failed"))
    d.assert_clean()
    assert {d.failures[h].message for h in range(4)} == {"the device failed"}
    assert all(d.finish[h] is Finish.ERROR for h in range(4))
    for handle in range(10, 14):
        d.submit([3], handle=handle, max_tokens=6)
    d.run().assert_clean()
    assert all(d.tokens[handle] == [4, 5, 6, 7, 8, 9] for handle in range(10, 14))


def test_engine_serves_again_after_a_launch_that_raised(drive, monkeypatch):
    d = drive(run_ahead=1)
    d.submit([1], handle=1, max_tokens=20)
    d.step(3)
    with monkeypatch.context() as patch:
        patch.setattr(d.executor, "launch", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            d.step()
    d.take(d.loop.fail_all("the device failed"))
    d.submit([5], handle=2, max_tokens=3)
    d.run().assert_clean()
    assert d.tokens[2] == [6, 7, 8]


def test_reset_forgets_cached_prefixes(drive):
    d = drive()
    for handle in range(3):
        d.submit(range(1, 30), handle=handle, max_tokens=1)
        if handle == 2:
            d.loop.receive(ResetPrefixCache(client=0))
        d.run()
    assert [d.cached[h] for h in range(3)] == [0, 28, 0]


def test_idle_step_does_nothing(drive):
    d = drive(run_ahead=1)
    assert not d.loop.has_work
    assert d.loop.step() == {}
    assert not d.batches


@both_depths
def test_stats_count_what_happened(drive, run_ahead):
    d = drive(run_ahead=run_ahead)
    for handle in range(3):
        d.submit(range(1, 10), handle=handle, max_tokens=5)
        d.run()
    stats = d.stats
    assert (stats.prompt_tokens, stats.generation_tokens) == (27, 15)
    assert (stats.prefix_queries, stats.prefix_hits) == (27, 16)
    assert stats.steps == len(d.batches) == 15


@both_depths
def test_an_abort_leaves_what_was_computed_to_the_next_request(drive, run_ahead):
    d = drive(run_ahead=run_ahead)
    prompt = list(range(1, 22))
    d.submit(prompt, handle=1, max_tokens=50)
    d.step(6)
    d.abort(1)
    d.run()
    d.submit(prompt, handle=2, max_tokens=2)
    d.run().assert_clean()
    assert d.cached[2] == 20
