"""Several steps' messages read as one: a reader that is behind does the work per sequence once, not once a step.

step 1: a x, b y  |  step 2: a x'  |  step 3: b y', a x''        ->        a x x' x'', b y y'
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from octavo.engine.messages import Deltas, int32, int64

MOST_APART = 4
"""Messages that could not be joined, of which each may still be cut into portions."""


class Backlog:
    """Messages that wait for a reader who takes the news of at most `portion` sequences at a time (None: all).

    While the portions of some steps are read, later steps pile up and are then cut into portions together: each
    sequence is read as often as the reader gets round to it, with all that it has gained since.
    """

    def __init__(self, portion: int | None) -> None:
        self._portion = portion
        self._unread: list[Deltas] = []
        self._portions: deque[Deltas] = deque()

    def put(self, messages: Iterable[Deltas]) -> None:
        """Add what a step said."""
        self._unread += messages

    def take(self) -> list[Deltas]:
        """What is to be read next, in order; empty if nothing is left."""
        if not self._portions:
            messages, self._unread = coalesce(self._unread), []
            if self._portion is None or len(messages) > MOST_APART:
                # Every step brings more: a portion of each would never catch up with them.
                return messages
            for message in messages:
                self._portions.extend(_cut(message, self._portion))
        return [self._portions.popleft()] if self._portions else []


def coalesce(messages: Iterable[Deltas]) -> list[Deltas]:
    """The same news in fewer messages: each run of messages that hold only tokens and ends becomes one.

    Logprobs and failures keep their own message, so that whatever came before them is read before them.
    """
    result: list[Deltas] = []
    run: list[Deltas] = []
    for message in messages:
        if _is_plain(message):
            run.append(message)
        else:
            result += [*_join(run), message]
            run = []
    return result + _join(run)


def _is_plain(message: Deltas) -> bool:
    return not (message.logprobs or message.failures)


def _join(run: list[Deltas]) -> list[Deltas]:
    if len(run) < 2:
        return run
    handles = int64(b"".join([one.handles for one in run]))
    counts = int32(b"".join([one.counts for one in run]))
    tokens = int32(b"".join([one.tokens for one in run]))
    order = np.argsort(handles, kind="stable")
    handles, lengths = handles[order], counts[order]
    is_last = np.ones(len(handles), np.bool_)
    is_last[:-1] = handles[1:] != handles[:-1]
    # Entries before a sequence's last one say that it runs; how it ended is in the last.
    last = order[is_last]
    ends = np.cumsum(lengths)
    places = (np.cumsum(counts) - counts)[order] - (ends - lengths)  # where an entry's tokens were, less where they go
    return [
        Deltas(
            step=run[-1].step,
            handles=handles[is_last].tobytes(),
            counts=np.diff(ends[is_last], prepend=0).astype("<i4").tobytes(),
            finish=np.frombuffer(b"".join([one.finish for one in run]), np.int8)[last].tobytes(),
            cached=int32(b"".join([one.cached for one in run]))[last].tobytes(),
            tokens=tokens[np.repeat(places, lengths) + np.arange(len(tokens))].tobytes(),
            admitted=tuple(entry for one in run for entry in one.admitted),
            stats=run[-1].stats,
        )
    ]


def _cut(message: Deltas, portion: int) -> Iterator[Deltas]:
    """The message in parts of at most `portion` sequences."""
    num = len(message.finish)
    if num <= portion or not _is_plain(message):
        yield message
        return
    ends = np.append(0, np.cumsum(int32(message.counts))).tolist()
    for at in range(0, num, portion):
        to = min(at + portion, num)
        yield msgspec.structs.replace(
            message,
            handles=message.handles[8 * at : 8 * to],
            counts=message.counts[4 * at : 4 * to],
            finish=message.finish[at:to],
            cached=message.cached[4 * at : 4 * to],
            tokens=message.tokens[4 * ends[at] : 4 * ends[to]],
            admitted=() if at else message.admitted,
        )
