from __future__ import annotations

import numpy as np

from octavo.engine.blocks import BlockPool
from octavo.engine.prefix_cache import extend_digests, find_prefix, root_digest
from octavo.plugin.step import KVGroup

FULL = KVGroup(block_size=4, num_blocks=33)
SLIDING = KVGroup(block_size=4, num_blocks=33, window=6)
TOKENS = np.arange(100, 140, dtype=np.int32)


def names(tokens, *, block_size=4, lora=0, salt=b""):
    out: list[bytes] = []
    root = root_digest(lora=lora, salt=salt)
    extend_digests(out, tokens, block_size=block_size, root=root, num_blocks=len(tokens) // block_size)
    return out


def pool_with(group, held, *, block_size=4):
    """A pool that caches the blocks of TOKENS with these indices."""
    pool = BlockPool(group.num_blocks)
    digests = names(TOKENS, block_size=block_size)
    for index in held:
        pool.publish(int(pool.take(1)[0]), digests[index])
    return pool


def find(groups, pools, tokens=TOKENS):
    return find_prefix(groups, pools, lambda size: names(tokens, block_size=size), num_tokens=len(tokens))


def test_equal_block_behind_another_prefix_has_another_name():
    other = TOKENS.copy()
    other[0] += 1
    assert all(a != b for a, b in zip(names(TOKENS), names(other), strict=True))


def test_names_grow_as_they_would_have_been_made_at_once():
    grown: list[bytes] = []
    for blocks in (1, 3, 10):
        extend_digests(grown, TOKENS, block_size=4, root=root_digest(lora=0, salt=b""), num_blocks=blocks)
    assert grown == names(TOKENS)


def test_adapter_and_salt_separate_prefixes():
    firsts = {names(TOKENS, lora=lora, salt=salt)[0] for lora in (0, 1) for salt in (b"", b"x")}
    assert len(firsts) == 4


def test_full_group_matches_up_to_the_first_miss():
    match = find([FULL], [pool_with(FULL, [0, 1, 3])])
    assert match.length == 8
    assert (match.blocks[0] > 0).all()


def test_whole_prompt_is_never_matched():
    match = find([FULL], [pool_with(FULL, range(10))])
    assert match.length == 36


def test_nothing_matches_a_prompt_shorter_than_a_block():
    assert find([FULL], [pool_with(FULL, range(10))], TOKENS[:4]).length == 0


def test_sliding_group_needs_only_its_window():
    match = find([SLIDING], [pool_with(SLIDING, [6, 7, 8])])
    assert match.length == 36
    assert (match.blocks[0] > 0).tolist() == [False] * 7 + [True] * 2


def test_sliding_group_with_a_hole_in_its_window_matches_before_it():
    match = find([SLIDING], [pool_with(SLIDING, [2, 3, 5, 8])])
    assert match.length == 16


def test_sliding_window_at_the_start_is_whole_when_it_reaches_position_zero():
    match = find([SLIDING], [pool_with(SLIDING, [0])])
    assert match.length == 4


def test_groups_agree_on_a_length_that_holds_for_all():
    # The full group allows 20 tokens; the sliding one holds windows that end at 36 and at 12.
    match = find([FULL, SLIDING], [pool_with(FULL, range(5)), pool_with(SLIDING, [1, 2, 7, 8])])
    assert match.length == 12
    assert [len(blocks) for blocks in match.blocks] == [3, 3]
    assert match.blocks[1].tolist()[0] == 0
    reverse = find([SLIDING, FULL], [pool_with(SLIDING, [1, 2, 7, 8]), pool_with(FULL, range(5))])
    assert reverse.length == 12


def test_groups_that_share_no_length_match_nothing():
    assert find([FULL, SLIDING], [pool_with(FULL, [0]), pool_with(SLIDING, [7, 8])]).length == 0


def test_match_is_a_multiple_of_all_block_sizes():
    small, large = FULL, KVGroup(block_size=6, num_blocks=33)
    pools = [pool_with(small, range(10)), pool_with(large, range(6), block_size=6)]
    match = find([small, large], pools)
    assert match.length == 36
    match = find([small, large], pools, TOKENS[:35])
    assert match.length == 24
    assert [len(blocks) for blocks in match.blocks] == [6, 4]
