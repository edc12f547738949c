from __future__ import annotations

import numpy as np
import pytest

from octavo.engine.blocks import BlockPool


def ids(*blocks: int):
    return np.array(blocks, np.int32)


def test_block_zero_is_never_handed_out():
    pool = BlockPool(5)
    assert sorted(pool.take(4).tolist()) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_taking_more_than_is_free_is_a_bug():
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="3 blocks asked, 2 free"):
        pool.take(3)


def test_freed_block_is_reused_before_eviction():
    pool = BlockPool(4)
    first, second = pool.take(2).tolist()
    pool.publish(first, b"a")
    pool.free(ids(first))
    pool.free(ids(second))
    assert set(pool.take(2).tolist()) == {second, 3}
    assert pool.find(b"a") == first
    assert pool.take(1).tolist() == [first]
    assert pool.find(b"a") == 0


def test_tail_of_a_freed_sequence_is_evicted_first():
    pool = BlockPool(4)
    blocks = pool.take(3)
    for block, digest in zip(blocks.tolist(), (b"1", b"2", b"3"), strict=True):
        pool.publish(block, digest)
    pool.free(blocks)
    assert pool.num_free == 3
    assert pool.take(1).tolist() == [blocks[2]]
    assert [pool.find(d) for d in (b"1", b"2", b"3")] == [blocks[0], blocks[1], 0]


def test_least_recently_used_prefix_is_evicted_first():
    pool = BlockPool(3)
    old, new = pool.take(2).tolist()
    pool.publish(old, b"old")
    pool.publish(new, b"new")
    pool.free(ids(old))
    pool.free(ids(new))
    pool.acquire(ids(old))
    pool.free(ids(old))
    assert pool.take(1).tolist() == [new]


def test_shared_block_is_free_only_when_its_last_user_goes():
    pool = BlockPool(3)
    block = pool.take(1)
    pool.publish(int(block[0]), b"a")
    pool.acquire(block)
    pool.free(block)
    assert pool.num_free == 1
    pool.free(block)
    assert pool.num_free == 2
    assert pool.find(b"a") == block[0]


def test_shared_block_freed_by_two_rows_at_once_is_counted_once():
    pool = BlockPool(3)
    block = pool.take(1)
    pool.publish(int(block[0]), b"a")
    pool.acquire(block)
    pool.free(np.concatenate((block, block)))
    assert pool.num_free == 2
    assert len(set(pool.take(2).tolist())) == 2


def test_second_block_of_equal_content_stays_private():
    pool = BlockPool(3)
    first, second = pool.take(2).tolist()
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    pool.free(ids(first, second))
    assert pool.num_cached == 1
    assert pool.find(b"a") == first
    assert pool.take(1).tolist() == [second]


def test_forgetting_keeps_what_is_in_use():
    pool = BlockPool(4)
    used, unused = pool.take(2).tolist()
    pool.publish(used, b"used")
    pool.publish(unused, b"unused")
    pool.free(ids(unused))
    pool.forget_unused()
    assert (pool.find(b"used"), pool.find(b"unused")) == (used, 0)
    assert pool.num_free == 2
    assert sorted(pool.take(2).tolist()) == sorted({1, 2, 3} - {used})
