"""The blocks of one KV group: who uses them, which are free, and which free ones still hold a known prefix.

                   take                                  free (no digest)
     stack of plain free blocks  ------->  in use  ------------------------->  stack
     LRU of cached free blocks   ------->  (refs > 0)  --------------------->  LRU, newest end
          oldest first, digest forgotten                 free (published)
          acquire (prefix hit, digest kept)

Plain free blocks go first, so that a cached prefix is only evicted when nothing else is left. Everything is O(1) a
block, and `take` of plain blocks is one array copy. Block 0 is the null block: never handed out.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from octavo.plugin.step import Ints

Blocks = NDArray[np.intp]
"""Block numbers as numpy indexes fastest; tables and updates carry them as int32."""


class BlockPool:
    """Reference counts, free list and prefix index of blocks 1 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "a pool needs the null block and at least one other"
        self.size = num_blocks - 1
        self.refs = np.zeros(num_blocks, np.int32)
        self._stack: Blocks = np.arange(num_blocks - 1, 0, -1, dtype=np.intp)
        self._top = self.size
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._published = np.zeros(num_blocks, np.bool_)
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `take` could give, cached ones included."""
        return self._top + len(self._lru)

    @property
    def num_cached(self) -> int:
        """Blocks that a prefix lookup can find, in use or not."""
        return len(self._block_of)

    def take(self, count: int) -> Blocks:
        """`count` blocks with one reference each. The caller has checked `num_free`."""
        plain = min(count, self._top)
        self._top -= plain
        blocks = self._stack[self._top : self._top + plain][::-1].copy()
        if plain < count:
            assert count - plain <= len(self._lru), f"{count} blocks asked, {plain + len(self._lru)} free"
            evicted = [self._evict() for _ in range(count - plain)]
            blocks = np.concatenate((blocks, np.array(evicted, np.intp)))
        self.refs[blocks] = 1
        return blocks

    def free(self, blocks: Ints | Blocks) -> None:
        """Give back one reference of each, in table order. Tails go first, so that they are evicted first.

        A block may occur twice only if it is published (sharing comes from prefix hits alone).
        """
        np.subtract.at(self.refs, blocks, 1)
        unused = blocks[self.refs[blocks] == 0][::-1]
        published = self._published[unused]
        plain = unused[~published]
        self._stack[self._top : self._top + len(plain)] = plain[::-1]
        self._top += len(plain)
        for block in unused[published].tolist():
            self._lru[block] = None

    def find(self, digest: bytes) -> int:
        """The block that holds this prefix, 0 if none does."""
        return self._block_of.get(digest, 0)

    def acquire(self, blocks: Ints | Blocks) -> None:
        """Take a reference of each of these found blocks (distinct)."""
        for block in blocks[self.refs[blocks] == 0].tolist():
            del self._lru[block]
        self.refs[blocks] += 1

    def publish(self, block: int, digest: bytes) -> None:
        """Let later prefixes find this computed block. A second block of equal content stays private."""
        if digest not in self._block_of and not self._published[block]:
            self._block_of[digest] = block
            self._digest_of[block] = digest
            self._published[block] = True

    def forget_unused(self) -> None:
        """Drop the content of every free cached block."""
        while self._lru:
            self._stack[self._top] = self._evict()
            self._top += 1

    def _evict(self) -> int:
        block, _ = self._lru.popitem(last=False)
        del self._block_of[self._digest_of.pop(block)]
        self._published[block] = False
        return block
