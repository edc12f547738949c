"""Block tables of all running rows, one per KV group, and the pools behind them.

A row's table in one group (block size 4, window 6, 14 positions held):

    index      0     1     2     3
    block      0     0    17     5        0 = null: behind the window, given back
               |--passed--|     |
    positions 0..3  4..7  8..11 12..13    held = 4 entries, room for 16 positions

Full groups have passed = 0 for ever. `capacity` is held * block_size, the positions that fit without a new block.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from math import lcm
from typing import NamedTuple

import numpy as np

from octavo.engine.blocks import BlockPool
from octavo.engine.prefix_cache import Match, extend_digests, find_prefix, no_match, root_digest
from octavo.engine.sequence import Sequence
from octavo.engine.table import Rows
from octavo.errors import RequestTooLargeError
from octavo.plugin.step import BlockUpdate, Ints, KVGroup


class Need(NamedTuple):
    """Rows that lack blocks in one group, and how many each."""

    rows: Rows
    counts: Ints
    total: int


class GroupTable:
    """The block tables of one group. rows x max_blocks."""

    def __init__(self, group: KVGroup, *, num_rows: int, max_model_len: int) -> None:
        self.group = group
        self.pool = BlockPool(group.num_blocks)
        self.blocks = np.zeros((num_rows, -(-max_model_len // group.block_size)), np.int32)
        self._flat = self.blocks.reshape(-1)
        self.held = np.zeros(num_rows, np.int32)
        self.capacity = np.zeros(num_rows, np.int32)
        self.passed = np.zeros(num_rows, np.int32)
        self.published = [0] * num_rows
        self._ones = np.ones(num_rows, np.int32)

    def need(self, rows: Rows, ends: Ints, *, single: bool = False) -> Need | None:
        """What rows lack to hold positions below `ends`; None if nothing. single: no row lacks more than one."""
        (short,) = (ends > self.capacity[rows]).nonzero()
        if not len(short):
            return None
        rows = rows[short]
        if single:
            return Need(rows, self._ones[: len(short)], len(short))
        size = self.group.block_size
        counts: Ints = (ends[short] - self.capacity[rows] + (size - 1)) // size
        return Need(rows, counts, int(counts.sum()))

    def extend(self, need: Need) -> BlockUpdate:
        """Give rows the blocks they lack."""
        rows, counts, total = need
        held = self.held[rows]
        self.held[rows] = after = held + counts
        self.capacity[rows] = after * self.group.block_size
        if total > len(rows):
            rows = np.repeat(rows, counts)
            held = np.repeat(after, counts) - np.repeat(np.cumsum(counts, dtype=np.int32), counts)
            held += np.arange(total, dtype=np.int32)
        taken = self.pool.take(total)
        self._flat[rows * self.blocks.shape[1] + held] = taken
        return BlockUpdate(rows=rows.astype(np.int32), indices=held, blocks=taken.astype(np.int32))

    def attach(self, row: int, hit: Ints) -> None:
        """Start a row with the blocks of a prefix hit."""
        self.pool.acquire(hit[hit > 0])
        count = len(hit)
        self.blocks[row, :count] = hit
        self.held[row] = count
        self.capacity[row] = count * self.group.block_size
        self.passed[row] = np.argmax(hit > 0) if count and hit[-1] else count
        self.published[row] = count

    def pass_window(self, rows: Rows, computed: Ints) -> None:
        """Give back blocks that no query at `computed` or later can see."""
        assert self.group.window is not None
        first = (computed - (self.group.window - 1)) // self.group.block_size
        behind = first > self.passed[rows]
        if not np.count_nonzero(behind):
            return
        rows, first = rows[behind], first[behind]
        while len(rows):  # one round in the steady state: rows pass a block at a time
            self.pool.free(self.blocks[rows, self.passed[rows]])
            self.blocks[rows, self.passed[rows]] = 0
            self.passed[rows] += 1
            more = self.passed[rows] < first
            rows, first = rows[more], first[more]

    def clear(self, row: int) -> None:
        """Give back everything a row holds."""
        self.pool.free(self.blocks[row, self.passed[row] : self.held[row]])
        self.blocks[row, : self.held[row]] = 0
        self.held[row] = self.capacity[row] = self.passed[row] = 0

    def publish(self, row: int, digests: Many[bytes], count: int) -> None:
        """Let prefixes find the first `count` blocks of a row."""
        for index in range(self.published[row], count):
            block = int(self.blocks[row, index])
            if block:
                self.pool.publish(block, digests[index])
        self.published[row] = max(self.published[row], count)

    def most_held(self, num_positions: int, *, passed: int, chunk: int) -> int:
        """Blocks that a row of that many positions holds at its largest, in steps of at most `chunk` tokens."""
        total = -(-num_positions // self.group.block_size) - passed
        if self.group.window is None:
            return total
        return min(total, -(-(self.group.window - 1 + chunk) // self.group.block_size) + 1)


class KVTables:
    """All groups together. Sizes come from the executor, the policy from the scheduler."""

    def __init__(
        self, groups: Many[KVGroup], *, num_rows: int, max_model_len: int, max_chunk: int, caching: bool
    ) -> None:
        self.groups = tuple(groups)
        self.tables = [GroupTable(g, num_rows=num_rows, max_model_len=max_model_len) for g in groups]
        self.pools = [table.pool for table in self.tables]
        self.sliding = [table for table in self.tables if table.group.window is not None]
        self.max_chunk = max_chunk
        self.caching = caching

    @property
    def num_free(self) -> int:
        return sum([pool.num_free for pool in self.pools])

    @property
    def least_free(self) -> int:
        """Free blocks of the group that has fewest."""
        return min((pool.num_free for pool in self.pools), default=0)

    @property
    def usage(self) -> float:
        """Share of the fullest group's blocks that are in use."""
        return 1 - min([pool.num_free / pool.size for pool in self.pools], default=1.0)

    def check_fits(self, seq: Sequence) -> None:
        """Raise RequestTooLargeError if the sequence cannot be served even alone."""
        for table in self.tables:
            size = table.pool.size
            if table.most_held(seq.num_positions, passed=0, chunk=self.max_chunk) > size:
                alone = table.most_held(len(seq.prompt), passed=0, chunk=self.max_chunk) > size
                raise RequestTooLargeError(
                    f"{len(seq.prompt)} prompt tokens with up to {seq.submit.max_tokens} new ones do not fit the "
                    f"{size * table.group.block_size} tokens of KV memory: ask for less or give it more",
                    field="prompt" if alone else "max_tokens",
                )

    def match(self, seq: Sequence) -> Match:
        """The cached prefix of a waiting sequence."""
        if not (self.caching and seq.uses_cache):
            return no_match(self.groups)
        tokens = seq.tokens

        def digests(block_size: int) -> list[bytes]:
            return self._digests(seq, tokens, block_size, len(tokens) // block_size)

        return find_prefix(self.groups, self.pools, digests, num_tokens=len(tokens))

    def shareable(self, num_tokens: int) -> bool:
        """Whether a prompt of that many tokens is long enough for another to start behind a part of it."""
        step = lcm(*(group.block_size for group in self.groups))
        return self.caching and num_tokens > step

    def admissible(self, match: Match, *, num_tokens: int, spare: int) -> bool:
        """Whether a sequence of that many tokens can be computed whole and leave `spare` free blocks in each group."""
        for table, hit in zip(self.tables, match.blocks, strict=True):
            shared = hit[hit > 0]
            most = table.most_held(num_tokens, passed=len(hit) - len(shared), chunk=self.max_chunk)
            revived = int((table.pool.refs[shared] == 0).sum())
            if max(most - len(shared), 0) + revived + spare > table.pool.num_free:
                return False
        return True

    def attach(self, row: int, match: Match, end: int) -> list[BlockUpdate]:
        """Start a row on its prefix hit with room for positions below `end`. One update per group."""
        updates = []
        for table, hit in zip(self.tables, match.blocks, strict=True):
            table.attach(row, hit)
            more = max(-(-end // table.group.block_size) - len(hit), 0)
            if more:
                table.extend(Need(np.array([row]), np.array([more], np.int32), more))
            held = int(table.held[row])
            updates.append(
                BlockUpdate(
                    rows=np.full(held, row, np.int32),
                    indices=np.arange(held, dtype=np.int32),
                    blocks=table.blocks[row, :held].copy(),
                )
            )
        return updates

    def need(self, rows: Rows, ends: Ints, *, single: bool = False) -> list[Need | None]:
        """Per group, what rows lack to hold positions below `ends`. single: no row lacks more than one block."""
        return [table.need(rows, ends, single=single) for table in self.tables]

    def fits(self, need: Many[Need | None]) -> bool:
        """Whether every group has the blocks."""
        for lacking, pool in zip(need, self.pools, strict=True):
            if lacking and lacking.total > pool.num_free:
                return False
        return True

    def extend(self, need: Many[Need | None]) -> list[BlockUpdate]:
        """Give rows what they lack. Empty if nobody lacks anything, else one update per group."""
        if not any(need):
            return []
        return [table.extend(lacking) if lacking else NOTHING for table, lacking in zip(self.tables, need, strict=True)]

    def pass_windows(self, rows: Rows, computed: Ints) -> None:
        """Give back what lies behind sliding windows once `computed` positions are confirmed."""
        for table in self.sliding:
            table.pass_window(rows, computed)

    def publish(self, seq: Sequence, tokens: Ints, num_valid: int) -> None:
        """Let prefixes find the full blocks among the first `num_valid` tokens, all computed and verified."""
        if not self.caching:
            return
        for table in self.tables:
            count = num_valid // table.group.block_size
            if count > table.published[seq.row]:
                table.publish(seq.row, self._digests(seq, tokens, table.group.block_size, count), count)

    def clear(self, row: int) -> None:
        for table in self.tables:
            table.clear(row)

    def forget_unused(self) -> None:
        for pool in self.pools:
            pool.forget_unused()

    def _digests(self, seq: Sequence, tokens: Ints, block_size: int, num_blocks: int) -> list[bytes]:
        digests = seq.digests.setdefault(block_size, [])
        root = root_digest(lora=seq.submit.lora, salt=seq.submit.salt)
        extend_digests(digests, tokens, block_size=block_size, root=root, num_blocks=num_blocks)
        return digests


NOTHING = BlockUpdate(rows=np.empty(0, np.int32), indices=np.empty(0, np.int32), blocks=np.empty(0, np.int32))


def join_updates(parts: Many[Many[BlockUpdate]]) -> list[BlockUpdate]:
    """One update per group out of several rounds of them."""
    if len(parts) <= 1:
        return list(parts[0]) if parts else []
    return [
        BlockUpdate(
            rows=np.concatenate([u.rows for u in group]),
            indices=np.concatenate([u.indices for u in group]),
            blocks=np.concatenate([u.blocks for u in group]),
        )
        for group in zip(*parts, strict=True)
    ]
