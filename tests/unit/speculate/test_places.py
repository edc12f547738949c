"""Where a step with drafts samples, against the definition; and which of the tokens count."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.plugin.step import Batch
from octavo.speculate.places import Places, accepted_counts


def ints(*values: object) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(values, np.int32)


@pytest.fixture
def places() -> Places:
    """A decode, two sequences with drafts, the end of a prompt, and a part of one that samples nothing."""
    return Places.of(
        Batch(
            step=1,
            rows=ints(5, 2, 7, 1, 3),
            starts=ints(10, 20, 30, 0, 4),
            counts=ints(1, 3, 2, 4, 6),
            samples=np.array([True, True, True, True, False]),
            drafts=ints([-1, -1], [8, 9], [6, -1], [-1, -1], [-1, -1]),
        )
    )


def test_each_place_is_a_token_of_the_step_and_the_position_behind_it(places: Places) -> None:
    assert places.at.tolist() == [0, 1, 2, 3, 4, 5, 9]
    assert places.rows.tolist() == [5, 2, 2, 2, 7, 7, 1]
    assert places.positions.tolist() == [11, 21, 22, 23, 31, 32, 4]
    assert places.expected.tolist() == [-1, 8, 9, -1, 6, -1, -1]
    assert places.before.tolist() == [0, 0, 1, 2, 0, 1, 0]
    assert places.firsts.tolist() == [0, 1, 1, 1, 4, 4, 6]
    assert places.owners.tolist() == [0, 1, 1, 1, 2, 2, 3]


def test_the_history_of_a_place_is_the_drafts_before_it(places: Places) -> None:
    which, ids = places.history(np.array([0, 2, 3, 5, 6]))
    assert list(zip(which.tolist(), ids.tolist(), strict=True)) == [(1, 8), (2, 8), (2, 9), (3, 6)]


@pytest.mark.parametrize(
    ("sampled", "tokens", "counts"),
    [
        ([1, 8, 9, 4, 6, 3, 2], [[1, -1, -1], [8, 9, 4], [6, 3, -1], [2, -1, -1]], [1, 3, 2, 1]),
        ([1, 8, 7, 4, 5, 3, 2], [[1, -1, -1], [8, 7, -1], [5, -1, -1], [2, -1, -1]], [1, 2, 1, 1]),
        # Behind a wrong one a right one is chance; a failure counts only where it is reached.
        ([1, 7, 9, -1, -1, 3, -1], [[1, -1, -1], [7, -1, -1], [-1, -1, -1], [-1, -1, -1]], [1, 1, 1, 1]),
    ],
)
def test_tokens_count_up_to_the_first_that_is_not_its_draft(
    places: Places, sampled: list[int], tokens: list[list[int]], counts: list[int]
) -> None:
    found = places.accepted(ints(*sampled))
    assert found[0].tolist() == tokens
    assert found[1].tolist() == counts


def test_a_failure_behind_the_last_draft_is_no_agreement() -> None:
    assert accepted_counts(ints([4, -1, -1]), ints([4, -1])).tolist() == [2]
