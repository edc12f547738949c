"""Sequences that wait for a row and blocks, best first; and those that wait for another's prompt."""

from __future__ import annotations

import heapq

from octavo.engine.sequence import Sequence


class WaitingQueue:
    """Ordered by (priority, arrival), or by arrival alone.

    A preempted sequence keeps its arrival. Everything that runs arrived before all that waits, so it comes back to the
    front by itself. Removing one marks it (`Sequence.ended`); marked ones are dropped when met, or when they are most.

    `hold` keeps sequences aside until the one they wait for has computed the prompt that they share: then its blocks
    are in the prefix cache, and the others start behind them.
    """

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._heap: list[tuple[int, int, Sequence]] = []
        self._num_ended = 0
        self._held: dict[Sequence, list[Sequence]] = {}
        self._num_held = 0

    def __len__(self) -> int:
        """Asked by another thread in the middle of a change it may be too large, and is never negative."""
        return len(self._heap) - self._num_ended + self._num_held

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (seq.submit.priority if self._by_priority else 0, seq.arrival, seq))

    def hold(self, seq: Sequence, leader: Sequence) -> None:
        """Keep a sequence aside until `let_go(leader)`."""
        self._held.setdefault(leader, []).append(seq)
        self._num_held += 1

    def let_go(self, leader: Sequence) -> None:
        """Queue what was held for this sequence; nothing is the usual case."""
        followers = self._held.pop(leader, ())
        self._num_held -= len(followers)
        for seq in followers:
            self.push(seq)

    def head(self) -> Sequence | None:
        """The next to serve, left in the queue; None if nothing can be served."""
        while self._heap and self._heap[0][2].ended:
            self._num_ended -= 1
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> None:
        """Take the head out."""
        heapq.heappop(self._heap)

    def remove(self, seq: Sequence) -> None:
        """Take a waiting sequence out wherever it is."""
        for followers in self._held.values():
            if seq in followers:
                followers.remove(seq)
                self._num_held -= 1
                seq.ended = True
                return
        seq.ended = True
        self._num_ended += 1
        if 2 * self._num_ended > len(self._heap):
            left = [entry for entry in self._heap if not entry[2].ended]
            heapq.heapify(left)
            self._num_ended = 0
            self._heap = left
