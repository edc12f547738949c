"""Tier 5: every collective that the platform claims, on two ranks, over even and uneven sizes, plain and recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from octavo.active_platform import protocol_members
from octavo.plugin import Communicator
from octavo.testing.conformance.collectives import SIZE, Pair, Task, wanted
from octavo.testing.conformance.subject import Subject

NEEDED = ("all_reduce", "all_gather")
"""Without these no model is divided among ranks."""
OTHERS = ("reduce_scatter", "all_to_all", "broadcast", "send", "recv")

SHAPES = ((8, 16), (1, 7), (33, 5), (1000, 33), (2, 3, 6), (0, 4))


@pytest.fixture(scope="module")
def pair(subject: Subject) -> Iterator[Pair]:
    """Two ranks with a communicator."""
    ranks(subject)
    made = Pair(subject)
    yield made
    made.close()


def ranks(subject: Subject) -> None:
    """Skip the test on a platform of single devices."""
    if subject.caps.max_world_size < SIZE:
        pytest.skip("the platform claims one rank (max_world_size 1)")


def tasks(collective: str, dtype: str) -> Iterator[Task]:
    """The shapes of one collective."""
    for shape in SHAPES:
        task = Task(collective=collective, shape=shape, dtype=dtype)
        match collective:
            case "all_gather":
                yield task
                yield replace(task, dim=len(shape) - 1)
            case "reduce_scatter":
                yield replace(task, shape=(SIZE * shape[0], *shape[1:]))
                yield replace(task, shape=(*shape[:-1], SIZE * shape[-1]), dim=len(shape) - 1)
            case "broadcast":
                yield task
                yield replace(task, src=1)
            case "all_to_all":
                rows = shape[0]
                for splits in (((rows, rows), (rows, rows)), ((0, rows), (rows // 2, 1)), ((3, 0), (0, rows))):
                    yield replace(task, splits=splits)
            case _:
                yield task
    if collective != "all_to_all":
        yield Task(collective=collective, shape=(8, 16), dtype=dtype, strided=True)


@pytest.mark.parametrize("collective", NEEDED)
def test_several_ranks_are_claimed_with_what_they_need(subject: Subject, collective: str) -> None:
    ranks(subject)
    assert collective in subject.caps.collectives, (
        f"max_world_size is {subject.caps.max_world_size}, but {collective} is not among the claimed collectives"
    )


def test_every_claimed_collective_exists(subject: Subject) -> None:
    unknown = subject.caps.collectives - {*NEEDED, *OTHERS, "barrier"}
    assert not unknown, f"no such collectives: {sorted(unknown)}; a Communicator has {protocol_members(Communicator)}"


@pytest.mark.parametrize("collective", [*NEEDED, "reduce_scatter", "all_to_all", "broadcast", "send_recv"])
def test_a_collective_gives_what_it_must(subject: Subject, pair: Pair, collective: str, dtype: str) -> None:
    skip_unclaimed(subject, collective)
    for task in tasks(collective, dtype):
        compare(pair, task)


@pytest.mark.parametrize("collective", ["all_gather", "broadcast"])
@pytest.mark.parametrize("dtype_of_ids", ["int64", "int32", "uint8"])
def test_integers_travel_unchanged(subject: Subject, pair: Pair, collective: str, dtype_of_ids: str) -> None:
    skip_unclaimed(subject, collective)
    for shape in ((1,), (5,), (3, 7)):
        compare(pair, Task(collective=collective, shape=shape, dtype=dtype_of_ids))


@pytest.mark.parametrize("collective", NEEDED)
def test_a_recorded_collective_reads_its_inputs_again(subject: Subject, pair: Pair, collective: str) -> None:
    skip_unclaimed(subject, collective)
    if subject.caps.graph == "none":
        pytest.skip("no capture claimed")
    for shape in ((4, 16), (1, 64)):
        compare(pair, Task(collective=collective, shape=shape, dtype=subject.caps.default_dtype, captured=True))


def test_ranks_can_wait_for_each_other(pair: Pair) -> None:
    pair.ask(Task(collective="barrier", shape=(), dtype="float32"))


def test_sums_have_the_same_bits_on_all_ranks(subject: Subject, pair: Pair, dtype: str) -> None:
    skip_unclaimed(subject, "all_reduce")
    mine, theirs = pair.ask(Task(collective="all_reduce", shape=(64, 96), dtype=dtype, rounds=True))
    assert torch.equal(mine[0], theirs[0]), "each rank samples for itself: sums that differ in a bit part their answers"


def skip_unclaimed(subject: Subject, collective: str) -> None:
    needed = {"send", "recv"} if collective == "send_recv" else {collective}
    if not needed <= subject.caps.collectives:
        pytest.skip(f"{collective} is not claimed")


def compare(pair: Pair, task: Task) -> None:
    """Both ranks' results with those computed from all inputs: numbers are such that every right sum is exact."""
    for rank, found in enumerate(pair.ask(task)):
        turns = (1, 2) if task.captured else (0,)
        for turn, got in zip(turns, found, strict=True):
            right = wanted(task, rank, turn)
            assert got.shape == right.shape, (
                f"{task}: shape {tuple(got.shape)} on rank {rank}, not {tuple(right.shape)}"
            )
            assert got.dtype == right.dtype, f"{task}: {got.dtype} on rank {rank}"
            assert torch.equal(got, right), f"{task}: wrong numbers on rank {rank}"
