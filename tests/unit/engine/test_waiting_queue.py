from __future__ import annotations

import random

import pytest

from octavo.engine.messages import Submit
from octavo.engine.queue import WaitingQueue
from octavo.engine.sequence import NO_TOKENS, Sequence
from octavo.sampling.params import SamplingParams


def sequence(arrival, *, priority=0):
    submit = Submit(
        handle=arrival, client=0, tokens=b"", params=SamplingParams(), max_tokens=1, seed=0, priority=priority
    )
    return Sequence(submit, NO_TOKENS, arrival, 1)


def drain(queue):
    order = []
    while seq := queue.head():
        order.append(seq.arrival)
        queue.pop()
    return order


@pytest.mark.parametrize(("by_priority", "order"), [(False, [0, 1, 2, 3]), (True, [3, 1, 2, 0])])
def test_order_is_arrival_or_priority_then_arrival(by_priority, order):
    queue = WaitingQueue(by_priority=by_priority)
    for arrival, priority in enumerate([5, 1, 1, 0]):
        queue.push(sequence(arrival, priority=priority))
    assert drain(queue) == order


def test_sequence_that_comes_back_goes_to_the_front():
    queue = WaitingQueue(by_priority=False)
    first, second = sequence(0), sequence(1)
    queue.push(first)
    queue.pop()
    queue.push(second)
    queue.push(first)
    assert queue.head() is first


def test_removed_sequences_are_never_served_and_do_not_count():
    queue = WaitingQueue(by_priority=True)
    rng = random.Random(0)
    kept = [sequence(i, priority=rng.randrange(5)) for i in range(200)]
    for seq in kept:
        queue.push(seq)
    rng.shuffle(kept)
    while len(kept) > 7:
        queue.remove(kept.pop())
        assert len(queue) == len(kept)
    assert drain(queue) == [s.arrival for s in sorted(kept, key=lambda s: (s.submit.priority, s.arrival))]
    assert len(queue) == 0
    assert queue.head() is None
