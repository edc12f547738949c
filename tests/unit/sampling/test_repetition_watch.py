"""When an answer counts as repeating itself."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from octavo.errors import RequestError
from octavo.sampling.params import SamplingParams
from octavo.sampling.repetition import RepetitionDetectionParams, RepetitionWatch


def by_definition(tokens: list[int], params: RepetitionDetectionParams) -> int | None:
    """The first length whose last tokens are min_count copies of a pattern."""
    for length in range(1, len(tokens) + 1):
        for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
            tail = tokens[max(0, length - size * params.min_count) : length]
            if len(tail) == size * params.min_count and tail == tail[:size] * params.min_count:
                return length
    return None


@pytest.mark.parametrize("seed", range(300))
def test_repetitions_are_found_where_the_definition_says(seed: int) -> None:
    rng = random.Random(seed)
    smallest = rng.randrange(0, 4)
    params = RepetitionDetectionParams(
        min_pattern_size=smallest,
        max_pattern_size=max(1, smallest) + rng.randrange(0, 4),
        min_count=rng.randrange(2, 5),
    )
    tokens = rng.choices(range(rng.choice([1, 2, 3])), k=rng.randrange(0, 40))
    watch, found, at = RepetitionWatch(params), None, 0
    while found is None and at < len(tokens):
        at = min(len(tokens), at + rng.choice([1, 1, 2, 5]))
        found = watch.find(np.array(tokens[:at], np.int32))
    assert found == by_definition(tokens, params)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"max_pattern_size": 3, "min_count": 1}, "repetition_detection.min_count"),
        ({"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}, "repetition_detection.min_pattern_size"),
        ({"max_pattern_size": -1}, "repetition_detection.max_pattern_size"),
        ({"max_pattern_size": 10**9, "min_count": 2}, "repetition_detection.max_pattern_size"),
        ({"max_pattern_size": "3"}, "repetition_detection.max_pattern_size"),
        ({"size": 3}, "repetition_detection.size"),
    ],
)
def test_wrong_parameters_are_named(given: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(repetition_detection=given)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_it_is_off_by_default_and_at_size_zero() -> None:
    assert SamplingParams().repetition_detection is None
    assert not RepetitionDetectionParams().on
    given = SamplingParams(repetition_detection={"max_pattern_size": 2, "min_count": 2})  # type: ignore[arg-type]
    assert given.repetition_detection == RepetitionDetectionParams(max_pattern_size=2, min_count=2)
