from __future__ import annotations

import numpy as np
import pytest

from octavo.engine.kv import GroupTable, KVTables, join_updates
from octavo.engine.messages import Submit
from octavo.engine.prefix_cache import Match
from octavo.engine.sequence import Sequence
from octavo.errors import RequestTooLargeError
from octavo.plugin.step import KVGroup
from octavo.sampling.params import SamplingParams


def rows(*numbers):
    return np.array(numbers, np.intp)


def ints(*numbers):
    return np.array(numbers, np.int32)


def table(*, num_blocks=20, window=None):
    return GroupTable(KVGroup(block_size=4, num_blocks=num_blocks, window=window), num_rows=4, max_model_len=64)


def tables(*groups, caching=True, max_chunk=16):
    return KVTables(groups, num_rows=4, max_model_len=64, max_chunk=max_chunk, caching=caching)


def sequence(length, *, max_tokens=1):
    prompt = np.arange(1, length + 1, dtype=np.int32)
    submit = Submit(handle=0, client=0, tokens=prompt.tobytes(), params=SamplingParams(), max_tokens=max_tokens, seed=0)
    return Sequence(submit, prompt, 0, length + max_tokens)


def test_rows_get_the_blocks_that_they_lack_in_order():
    t = table()
    need = t.need(rows(0, 1, 2), ints(9, 0, 4))
    assert need is not None
    assert (need.rows.tolist(), need.counts.tolist(), need.total) == ([0, 2], [3, 1], 4)
    update = t.extend(need)
    assert update.rows.tolist() == [0, 0, 0, 2]
    assert update.indices.tolist() == [0, 1, 2, 0]
    assert len(set(update.blocks.tolist())) == 4
    assert t.blocks[0, :3].tolist() == update.blocks[:3].tolist()
    assert t.capacity.tolist() == [12, 0, 4, 0]


def test_nothing_is_needed_within_the_capacity():
    t = table()
    t.extend(t.need(rows(0), ints(5)))
    assert t.need(rows(0), ints(8)) is None
    assert t.need(rows(0), ints(9)).total == 1


def test_later_blocks_of_several_rows_follow_what_each_holds():
    t = table()
    t.extend(t.need(rows(0, 1), ints(4, 8)))
    update = t.extend(t.need(rows(0, 1), ints(12, 16)))
    assert update.rows.tolist() == [0, 0, 1, 1]
    assert update.indices.tolist() == [1, 2, 2, 3]


def test_cleared_row_gives_everything_back():
    t = table()
    t.extend(t.need(rows(0, 1), ints(20, 7)))
    t.clear(0)
    assert t.pool.num_free == t.pool.size - 2
    t.clear(1)
    assert t.pool.num_free == t.pool.size
    assert not t.blocks.any()


@pytest.mark.parametrize(("computed", "gone"), [(8, 0), (9, 1), (12, 1), (13, 2), (17, 3)])
def test_block_is_given_back_when_the_whole_of_it_is_behind_the_window(computed, gone):
    # A query at position p sees p - 5 .. p; block 0 holds 0 .. 3.
    t = table(window=6)
    t.extend(t.need(rows(0), ints(20)))
    t.pass_window(rows(0), ints(computed))
    assert t.pool.num_free == t.pool.size - 5 + gone
    assert (t.blocks[0, :5] == 0).tolist() == [True] * gone + [False] * (5 - gone)
    t.clear(0)
    assert t.pool.num_free == t.pool.size


def test_rows_pass_their_windows_at_their_own_pace():
    t = table(window=6, num_blocks=40)
    t.extend(t.need(rows(0, 1, 2), ints(40, 40, 40)))
    t.pass_window(rows(0, 1, 2), ints(33, 4, 9))
    assert t.passed.tolist() == [7, 0, 1, 0]
    assert t.pool.num_free == t.pool.size - 30 + 8


@pytest.mark.parametrize(
    ("window", "positions", "most"), [(None, 33, 9), (6, 3, 1), (6, 64, 7), (1, 64, 5), (100, 64, 16)]
)
def test_most_blocks_that_a_row_ever_holds(window, positions, most):
    assert table(window=window).most_held(positions, passed=0, chunk=16) == most


def test_sequence_that_cannot_be_served_alone_is_refused_by_the_group_that_lacks_room():
    kv = tables(KVGroup(block_size=4, num_blocks=17), KVGroup(block_size=4, num_blocks=8, window=6))
    kv.check_fits(sequence(64))
    with pytest.raises(RequestTooLargeError, match="64 tokens of KV memory") as info:
        kv.check_fits(sequence(65))
    assert info.value.field == "prompt"
    with pytest.raises(RequestTooLargeError) as info:
        kv.check_fits(sequence(60, max_tokens=6))
    assert info.value.field == "max_tokens"
    narrow = tables(KVGroup(block_size=4, num_blocks=17), KVGroup(block_size=4, num_blocks=7, window=6))
    with pytest.raises(RequestTooLargeError, match="24 tokens"):
        narrow.check_fits(sequence(64))


def test_admission_counts_cached_blocks_that_are_free_as_used():
    kv = tables(KVGroup(block_size=4, num_blocks=7))
    pool = kv.pools[0]
    seq = sequence(16)
    match = kv.match(seq)
    row_update = kv.attach(0, match, 16)
    seq.row = 0
    kv.publish(seq, seq.tokens, 16)
    kv.clear(0)
    assert len(row_update[0].blocks) == 4
    assert pool.num_free == 6
    again = sequence(24)
    match = kv.match(again)
    assert match.length == 16
    # Four revived, two new: all six are wanted.
    assert kv.admissible(match, num_tokens=24, spare=0)
    assert not kv.admissible(match, num_tokens=24, spare=1)
    assert not kv.admissible(match, num_tokens=25, spare=0)


def test_attached_prefix_and_new_blocks_make_one_table():
    kv = tables(KVGroup(block_size=4, num_blocks=20))
    hit = kv.pools[0].take(2).astype(np.int32)
    (update,) = kv.attach(3, Match(8, (hit,)), 14)
    assert update.rows.tolist() == [3] * 4
    assert update.indices.tolist() == [0, 1, 2, 3]
    assert update.blocks[:2].tolist() == hit.tolist()
    assert kv.pools[0].refs[hit].tolist() == [2, 2]


def test_updates_of_several_rounds_become_one_for_each_group():
    kv = tables(KVGroup(block_size=4, num_blocks=20), KVGroup(block_size=4, num_blocks=20))
    first = kv.extend(kv.need(rows(0), ints(4)))
    second = kv.extend(kv.need(rows(1), ints(8)))
    joined = join_updates([first, second])
    assert [u.rows.tolist() for u in joined] == [[0, 1, 1]] * 2
    assert join_updates([]) == []


def test_nothing_is_sent_when_nothing_is_needed():
    kv = tables(KVGroup(block_size=4, num_blocks=20))
    kv.extend(kv.need(rows(0), ints(4)))
    assert kv.extend(kv.need(rows(0), ints(4))) == []


def test_usage_is_that_of_the_fullest_group():
    kv = tables(KVGroup(block_size=4, num_blocks=11), KVGroup(block_size=4, num_blocks=5))
    assert kv.usage == 0
    kv.extend(kv.need(rows(0), ints(8)))
    assert kv.usage == pytest.approx(0.5)
    assert kv.num_free == 8 + 2
