"""Names of prefixes, and the longest one that every KV group still holds.

A full block is named by blake2b-128 over its parent's name and its token ids, so equal names mean equal prefixes. The
parent of the first block is made of what else the keys and values depend on: the LoRA adapter and the request's salt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import lcm

import numpy as np

from octavo.engine.blocks import BlockPool
from octavo.plugin.step import Ints, KVGroup

DIGEST_BYTES = 16


def root_digest(*, lora: int, salt: bytes) -> bytes:
    """The parent of a sequence's first block."""
    return blake2b(lora.to_bytes(8, "little", signed=True) + salt, digest_size=DIGEST_BYTES).digest()


def extend_digests(digests: list[bytes], tokens: Ints, *, block_size: int, root: bytes, num_blocks: int) -> None:
    """Append the names of blocks len(digests) .. num_blocks - 1 of `tokens`."""
    first = len(digests)
    if first >= num_blocks:
        return
    parent = digests[-1] if digests else root
    width = 4 * block_size
    data = np.ascontiguousarray(tokens[first * block_size : num_blocks * block_size]).tobytes()
    for at in range(0, width * (num_blocks - first), width):
        parent = blake2b(parent + data[at : at + width], digest_size=DIGEST_BYTES).digest()
        digests.append(parent)


@dataclass(frozen=True, slots=True)
class Match:
    """A prefix of `length` tokens found in all groups. blocks: per group, table entries 0 .. length / block_size - 1;
    null (0) where a sliding window no longer looks."""

    length: int
    blocks: tuple[Ints, ...]


def no_match(groups: Sequence[KVGroup]) -> Match:
    """The match of a sequence that may not, or cannot, use the cache."""
    return Match(0, tuple(np.empty(0, np.int32) for _ in groups))


def window_blocks(group: KVGroup) -> int:
    """Blocks before a block boundary that a query behind it can see. Needs a window."""
    assert group.window is not None
    return -(-(group.window - 1) // group.block_size)


def find_prefix(
    groups: Sequence[KVGroup],
    pools: Sequence[BlockPool],
    digests: Callable[[int], Sequence[bytes]],
    *,
    num_tokens: int,
) -> Match:
    """The longest cached prefix, at most num_tokens - 1 long so that something is left to compute.

    A fixed point: each group may only shorten the match; once round all of them without a change and it holds for
    all. Full groups are read left to right until a miss, sliding ones right to left until a window is whole.
    `digests(block_size)` gives the names of the sequence's blocks.
    """
    step = lcm(*(group.block_size for group in groups))
    length = (num_tokens - 1) // step * step
    entries: list[list[int]] = [[] for _ in groups]
    agreed = 0
    at = 0
    while length and agreed < len(groups):
        group, pool = groups[at], pools[at]
        names = digests(group.block_size)
        reach = _full_reach if group.window is None else _sliding_reach
        entries[at], found = reach(group, pool, names, length)
        found = found // step * step
        agreed = agreed + 1 if found == length else 1 if group.window is None else 0
        length = found
        at = (at + 1) % len(groups)
    blocks = tuple(
        np.array(held[: length // group.block_size], np.int32) for group, held in zip(groups, entries, strict=True)
    )
    return Match(length, blocks)


def _full_reach(group: KVGroup, pool: BlockPool, names: Sequence[bytes], length: int) -> tuple[list[int], int]:
    held: list[int] = []
    for name in names[: length // group.block_size]:
        block = pool.find(name)
        if not block:
            break
        held.append(block)
    return held, len(held) * group.block_size


def _sliding_reach(group: KVGroup, pool: BlockPool, names: Sequence[bytes], length: int) -> tuple[list[int], int]:
    need = window_blocks(group)
    end = length // group.block_size
    held = [0] * end
    at, run = end, 0
    while at > 0 and run < need:
        at -= 1
        held[at] = pool.find(names[at])
        if held[at]:
            run += 1
        else:
            end, run = at, 0
    return held[:end], end * group.block_size
