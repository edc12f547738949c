"""What is put into each step, and in which order."""

from __future__ import annotations

from itertools import pairwise

import pytest

from octavo.engine.messages import Finish
from octavo.plugin.data import ScheduleLimits
from octavo.plugin.step import KVGroup


def shapes(batch):
    return list(zip(batch.starts.tolist(), batch.counts.tolist(), batch.samples.tolist(), strict=True))


def small(num_blocks, block_size=4):
    return (KVGroup(block_size=block_size, num_blocks=num_blocks + 1),)


def test_long_prompt_is_computed_in_chunks_and_samples_only_at_its_end(drive):
    d = drive(max_num_batched_tokens=8)
    d.submit(range(1, 21), handle=1, max_tokens=2)
    d.run()
    assert [shapes(b) for b in d.batches] == [
        [(0, 8, False)],
        [(8, 8, False)],
        [(16, 4, True)],
        [(20, 1, True)],
    ]


def test_decodes_go_before_a_started_prompt_and_that_before_new_ones(drive):
    d = drive(max_num_batched_tokens=8)
    d.submit([1, 2], handle=1, max_tokens=20)
    d.step()
    d.submit(range(1, 11), handle=2)
    d.submit(range(1, 5), handle=3)
    d.step(2)
    assert [shapes(b) for b in d.batches[1:]] == [
        [(2, 1, True), (0, 7, False)],
        [(3, 1, True), (7, 3, True), (0, 4, True)],
    ]


def test_prompt_is_not_cut_without_chunked_prefill(drive):
    d = drive(max_num_batched_tokens=8, enable_chunked_prefill=False, caching=False)
    d.submit([1] * 5, handle=1, max_tokens=2)
    d.submit([1] * 5, handle=2, max_tokens=2)
    d.submit([1] * 9, handle=3)
    d.run().assert_clean()
    assert [b.counts.tolist() for b in d.batches] == [[5], [1, 5], [1]]
    assert d.failures[3].field == "prompt"
    assert "max_num_batched_tokens" in d.failures[3].message


def test_sequence_that_outgrew_a_step_is_recomputed_in_chunks_even_so(drive, hashed_script):
    d = drive(hashed_script, groups=small(8), max_num_batched_tokens=8, enable_chunked_prefill=False, caching=False)
    for handle in range(2):
        d.submit([handle + 1] * 6, handle=handle, max_tokens=20)
    d.run().assert_clean()
    assert d.stats.preemptions
    for handle in range(2):
        assert d.tokens[handle] == list(hashed_script((handle + 1,) * 6))[:20]


def test_no_more_rows_than_max_num_seqs(drive):
    d = drive(max_num_seqs=3, run_ahead=1)
    for handle in range(8):
        d.submit([1], handle=handle, max_tokens=3)
    d.run().assert_clean()
    assert max(b.num_seqs for b in d.batches) == 3
    assert {row for b in d.batches for row in b.rows.tolist()} == {0, 1, 2}
    assert d.finish_order == list(range(8))


def test_platform_that_cannot_mix_gets_prefills_and_decodes_by_turns(drive):
    d = drive(limits=ScheduleLimits(mix_prefill_decode=False), max_num_batched_tokens=8)
    d.submit([1, 2], handle=1, max_tokens=30)
    for handle in range(2, 6):
        d.submit([1] * 20, handle=handle, max_tokens=3)
    d.run().assert_clean()
    kinds = [bool((b.counts == 1).all()) for b in d.batches]
    assert all(one or (b.counts > 1).all() for one, b in zip(kinds, d.batches, strict=True))
    assert all(first or second for first, second in pairwise(kinds[1:])), "decodes were starved"


def test_platform_that_cannot_mix_still_serves_one_token_prompts_and_one_token_budgets(drive):
    d = drive(limits=ScheduleLimits(mix_prefill_decode=False), max_num_batched_tokens=1)
    d.submit([1], handle=1)
    d.submit([1, 2, 3], handle=2)
    d.run().assert_clean()
    assert d.tokens == {1: [2, 3, 4, 5], 2: [4, 5, 6, 7]}


def test_number_of_prefills_in_a_step_is_limited(drive):
    d = drive(limits=ScheduleLimits(max_prefills_per_step=2))
    for handle in range(5):
        d.submit([1, 2, 3], handle=handle, max_tokens=10)
    d.run().assert_clean()
    assert [int((b.counts > 1).sum()) for b in d.batches[:4]] == [2, 2, 1, 0]


def test_decode_batch_times_longest_context_is_limited(drive):
    d = drive(limits=ScheduleLimits(max_batch_context_tokens=40))
    for handle in range(4):
        d.submit([1] * (4 + 4 * handle), handle=handle, max_tokens=10)
    d.run().assert_clean()
    for batch in d.batches:
        ones = batch.counts == 1
        assert ones.sum() <= 1 or ones.sum() * (batch.starts[ones] + 1).max() <= 40
    assert all(len(d.tokens[h]) == 10 for h in range(4))


def test_last_comer_is_preempted_and_all_answers_are_as_alone(drive, hashed_script):
    prompts = [[h + 1] * 10 for h in range(4)]
    d = drive(hashed_script, groups=small(10))
    for handle, prompt in enumerate(prompts):
        d.submit(prompt, handle=handle, max_tokens=20)
    d.run().assert_clean()
    assert d.stats.preemptions > 0
    assert d.finish_order == [0, 1, 2, 3]
    for handle, prompt in enumerate(prompts):
        assert d.tokens[handle] == list(hashed_script(tuple(prompt)))[:20]


def test_preempted_sequence_comes_back_before_new_ones_with_all_its_tokens(drive):
    d = drive(groups=small(6), caching=False)
    d.submit([1] * 8, handle=0, max_tokens=16)
    d.submit([2] * 8, handle=1, max_tokens=16)
    while not d.stats.preemptions:
        d.step()
    d.submit([3] * 2, handle=2, max_tokens=2)
    d.run()
    admits = [a for b in d.batches for a in b.admits]
    assert [a.num_prompt_tokens for a in admits] == [8, 8, 8, 2]
    again = admits[2].token_ids.tolist()
    assert again[:8] == [2] * 8
    assert again[8:] == list(range(3, len(again) - 5))
    assert d.finish_order[0] == 0


def test_nothing_is_admitted_that_would_leave_running_ones_without_a_block(drive):
    d = drive(groups=small(8), caching=False)
    d.submit([1] * 8, handle=0, max_tokens=9)
    d.submit([2] * 12, handle=1, max_tokens=4)
    d.step(3)
    assert (d.stats.running, d.stats.free_blocks) == (2, 1)
    d.submit([3], handle=2, max_tokens=1)
    d.step()
    assert d.stats.waiting == 1
    d.run().assert_clean()


def test_priority_is_served_first_then_arrival(drive):
    d = drive(policy="priority", max_num_seqs=1)
    for handle, priority in enumerate([5, 1, 0, 1, -3]):
        d.submit([1], handle=handle, priority=priority, max_tokens=2)
    d.run().assert_clean()
    assert d.finish_order == [4, 2, 1, 3, 0]


def test_priority_means_nothing_to_fcfs(drive):
    d = drive(max_num_seqs=1)
    for handle, priority in enumerate([5, 1, 0]):
        d.submit([1], handle=handle, priority=priority, max_tokens=2)
    d.run()
    assert d.finish_order == [0, 1, 2]


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_urgent_request_takes_memory_from_one_of_less_priority(drive, run_ahead):
    d = drive(policy="priority", groups=small(8), caching=False, run_ahead=run_ahead)
    d.submit([1] * 8, handle=0, priority=1, max_tokens=20)
    d.submit([2] * 8, handle=1, priority=1, max_tokens=16)
    d.step(3)
    assert d.stats.running == 2
    d.submit([3] * 20, handle=2, priority=0, max_tokens=4)
    d.submit([4] * 20, handle=3, priority=1, max_tokens=4)
    d.run().assert_clean()
    assert d.stats.preemptions >= 1
    assert d.finish_order.index(2) == 0
    assert [len(d.tokens[h]) for h in range(4)] == [20, 16, 4, 4]
    assert d.tokens[1] == list(range(3, 19))


def test_least_priority_is_preempted_though_it_came_first(drive):
    d = drive(policy="priority", groups=small(8), caching=False)
    d.submit([1] * 8, handle=0, priority=7, max_tokens=14)
    d.step()
    d.submit([2] * 8, handle=1, priority=0, max_tokens=14)
    d.run().assert_clean()
    assert d.stats.preemptions
    assert d.finish_order == [1, 0]
    admits = [a.token_ids[0] for b in d.batches for a in b.admits]
    assert admits == [1, 2, 1]


@pytest.mark.parametrize("width", [1, 3])
def test_long_answers_are_kept_whole(drive, hashed_script, width):
    d = drive(hashed_script, groups=small(300), max_model_len=400, width=width)
    for handle in range(3):
        d.submit([handle + 1] * 3, handle=handle, max_tokens=90 + 100 * handle)
    d.run()
    for handle in range(3):
        said = [handle + 1, handle + 1, handle + 1, *d.tokens[handle]]
        d.submit([*said, 7], handle=10 + handle, max_tokens=1)
        d.run().assert_clean()
        # Found under names made of all its tokens but those of the last step: they were kept, in their places.
        assert d.cached[10 + handle] >= (len(said) - width) // 4 * 4


def test_shared_prefix_is_computed_once(drive):
    d = drive()
    prefix = list(range(1, 21))
    d.submit([*prefix, 50], handle=1, max_tokens=2)
    d.run()
    d.submit([*prefix, 60, 61], handle=2, max_tokens=2)
    d.run().assert_clean()
    assert (d.cached[1], d.cached[2]) == (0, 20)
    assert shapes(d.batches[2]) == [(20, 2, True)]


def test_prefix_is_shared_while_its_first_user_still_runs(drive):
    d = drive()
    d.submit(range(1, 22), handle=1, max_tokens=20)
    d.step(2)
    d.submit(range(1, 22), handle=2, max_tokens=20)
    d.run().assert_clean()
    assert d.cached[2] == 20
    assert d.tokens[1] == d.tokens[2] == list(range(22, 42))


@pytest.mark.parametrize(("max_tokens", "hit"), [(10, 8), (11, 12)])
def test_generated_tokens_are_found_by_the_next_turn_but_never_the_last_which_was_not_computed(drive, max_tokens, hit):
    d = drive()
    d.submit([1, 2], handle=1, max_tokens=max_tokens)
    d.run()
    d.submit([1, 2, *d.tokens[1], 90], handle=2, max_tokens=2)
    d.run().assert_clean()
    assert d.cached[2] == hit


@pytest.mark.parametrize(("lora", "salt", "hit"), [(0, b"", 20), (1, b"", 0), (0, b"x", 0)])
def test_prefix_of_another_adapter_or_salt_is_not_shared(drive, lora, salt, hit):
    d = drive()
    d.submit(range(1, 22), handle=1, max_tokens=2)
    d.run()
    d.submit(range(1, 22), handle=2, max_tokens=2, lora=lora, salt=salt)
    d.run().assert_clean()
    assert d.cached[2] == hit


def test_nothing_is_shared_without_prefix_caching(drive):
    d = drive(caching=False)
    for handle in range(2):
        d.submit(range(1, 22), handle=handle, max_tokens=2)
        d.run()
    assert d.cached[1] == 0
    assert d.stats.prefix_queries == 0


def test_blocks_behind_a_sliding_window_are_given_back_while_running(drive):
    groups = (KVGroup(block_size=4, num_blocks=33), KVGroup(block_size=4, num_blocks=9, window=8))
    d = drive(groups=groups, max_num_batched_tokens=8)
    d.submit(range(1, 60), handle=1, max_tokens=40)
    d.run().assert_clean()
    assert d.tokens[1] == list(range(60, 100))
    assert d.finish[1] is Finish.LENGTH


def test_hybrid_prefix_hit_needs_both_groups(drive):
    groups = (KVGroup(block_size=4, num_blocks=65), KVGroup(block_size=4, num_blocks=65, window=6))
    d = drive(groups=groups)
    prompt = list(range(1, 42))
    for handle in range(2):
        d.submit(prompt, handle=handle, max_tokens=2)
        d.run().assert_clean()
    assert d.cached[1] == 40
    sliding = d.batches[2].blocks[1]
    assert (sliding.blocks[:10] > 0).tolist() == [False] * 8 + [True] * 2


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_row_is_not_reused_while_a_step_holds_it(drive, run_ahead):
    d = drive([4], max_num_seqs=1, run_ahead=run_ahead)
    for handle in range(3):
        d.submit([1], handle=handle, max_tokens=9)
    d.run().assert_clean()
    # EOS is learnt one step late: with run-ahead each answer takes one useless step more.
    assert len(d.batches) == 3 * (2 + run_ahead)
    assert [b.step for b in d.batches if b.admits] == [1 + (2 + run_ahead) * i for i in range(3)]


def test_no_step_is_run_ahead_of_a_known_end(drive):
    d = drive(run_ahead=1)
    d.submit([1], handle=1, max_tokens=5)
    d.run()
    assert len(d.batches) == 5


def test_run_ahead_launches_before_it_collects(drive):
    d = drive(run_ahead=1)
    d.submit([1], handle=1, max_tokens=5)
    d.step()
    assert (len(d.batches), d.tokens[1]) == (1, [])
    d.step()
    assert (len(d.batches), d.tokens[1]) == (2, [2])


def test_table_entries_are_sent_only_when_a_block_is_new(drive):
    d = drive()
    d.submit([1, 2, 3], handle=1, max_tokens=7)
    d.run()
    sent = [[list(map(int, u.indices)) for u in b.blocks] for b in d.batches]
    assert sent == [[[0]], [], [[1]], [], [], [], [[2]]]


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_prefix_ends_before_what_a_step_behind_the_end_would_have_computed(drive, run_ahead):
    d = drive([10, 11], run_ahead=run_ahead)
    d.submit([1, 2, 3, 4, 5], handle=1, max_tokens=20)
    d.run()
    # The stop token is the last one of the second block; nobody has computed its key and value.
    assert d.tokens[1] == [10, 11, 0]
    d.submit([1, 2, 3, 4, 5, 10, 11, 0, 9], handle=2)
    d.run()
    assert d.cached[2] == 4
