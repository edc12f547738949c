"""Messages read late: joined by sequence, cut into portions, nothing lost and nothing out of order."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from octavo.engine.backlog import Backlog, coalesce
from octavo.engine.messages import Deltas, Failure, Finish, Stats, int32, int64

Row = tuple[int, list[int], Finish, int]


def rows(message: Deltas) -> list[Row]:
    """(handle, tokens, finish, cached) of every sequence in a message."""
    ends = np.cumsum(int32(message.counts))
    tokens = np.split(int32(message.tokens), ends[:-1]) if len(ends) else []
    finish = [Finish(code) for code in message.finish]
    return [
        (handle, own.tolist(), end, cached)
        for handle, own, end, cached in zip(
            int64(message.handles).tolist(), tokens, finish, int32(message.cached).tolist(), strict=True
        )
    ]


def told(messages: Iterable[Deltas]) -> dict[int, tuple[list[int], Finish, int]]:
    """What a reader of all messages knows of each sequence. An end must come last."""
    known: dict[int, tuple[list[int], Finish, int]] = defaultdict(lambda: ([], Finish.RUNNING, 0))
    for message in messages:
        for handle, tokens, finish, cached in rows(message):
            before = known[handle]
            assert before[1] is Finish.RUNNING, f"news of {handle} after its end"
            known[handle] = (before[0] + tokens, finish, cached)
    return dict(known)


@pytest.fixture
def traffic(deltas: Any) -> list[Deltas]:
    """50 steps of 20 sequences that start, gain 0 to 3 tokens a step in changing order, and end."""
    rng = random.Random(5)
    ends = {handle: rng.randint(1, 49) for handle in range(100, 120)}
    messages = []
    for step in range(50):
        live = [handle for handle, end in ends.items() if step == end or (step < end and rng.random() < 0.8)]
        rng.shuffle(live)
        messages.append(
            deltas(
                *[
                    (
                        handle,
                        [1000 * handle + step] * rng.randint(0, 3),
                        Finish.STOP if step == ends[handle] else Finish.RUNNING,
                    )
                    for handle in live
                ],
                cached=7,
                stats=Stats(steps=step),
            )
        )
    return messages


def test_joined_messages_tell_the_same_in_one(traffic: list[Deltas]) -> None:
    (one,) = coalesce(traffic)
    assert told([one]) == told(traffic)
    assert len(told([one])) == len(rows(one)) == 20
    assert one.stats == traffic[-1].stats


@pytest.mark.parametrize("portion", [None, 1, 7, 20])
@pytest.mark.parametrize("puts_per_take", [1, 5])
def test_portions_tell_the_same_as_all_messages(traffic: list[Deltas], portion: int | None, puts_per_take: int) -> None:
    backlog = Backlog(portion)
    taken: list[Deltas] = []
    for at in range(0, len(traffic), puts_per_take):
        backlog.put(traffic[at : at + puts_per_take])
        taken += backlog.take()
    while more := backlog.take():
        taken += more
    assert told(taken) == told(traffic)
    assert max(len(rows(one)) for one in taken) <= (portion or 20)


def test_slow_reader_gets_round_to_each_sequence_in_turn(deltas: Any) -> None:
    backlog = Backlog(1)
    seen = []
    for step in range(6):
        backlog.put([deltas((1, [step]), (2, [step]), (3, [step]))])
        seen += [(handle, tokens) for one in backlog.take() for handle, tokens, *_ in rows(one)]
    assert seen == [(1, [0]), (2, [0]), (3, [0]), (1, [1, 2, 3]), (2, [1, 2, 3]), (3, [1, 2, 3])]


def test_failure_is_read_after_what_came_before_it_and_before_what_comes_after(deltas: Any) -> None:
    failed = deltas((1, [], Finish.ERROR), failures=(Failure(handle=1, message="broken"),))
    messages = [deltas((1, [5])), deltas((1, [6])), failed, deltas((2, [7])), deltas((2, [8]))]
    before, middle, after = coalesce(messages)
    assert (rows(before), rows(after)) == ([(1, [5, 6], Finish.RUNNING, 0)], [(2, [7, 8], Finish.RUNNING, 0)])
    assert middle is failed


def test_logprobs_keep_their_own_message(deltas: Any, logprob_block: Any) -> None:
    messages = [deltas((1, [t]), logprobs=(logprob_block(1, [[t]], [[-1.0]], [1]),)) for t in (5, 6)]
    assert coalesce(messages) == messages


def test_messages_that_cannot_be_joined_do_not_pile_up(deltas: Any, logprob_block: Any) -> None:
    backlog = Backlog(1)
    for step in range(200):
        more = (logprob_block(1, [[5]], [[-1.0]], [1]),) if step % 2 else ()
        backlog.put([deltas(*[(handle, [step]) for handle in range(20)], logprobs=more)])
        backlog.take()
    takes_left = 0
    while backlog.take():
        takes_left += 1
    assert takes_left <= 50


def test_messages_without_sequences_leave_only_the_latest_gauges(deltas: Any) -> None:
    (one,) = coalesce([deltas(stats=Stats(running=3)), deltas(stats=Stats(running=0))])
    assert (rows(one), one.stats) == ([], Stats(running=0))
    assert coalesce([]) == []
