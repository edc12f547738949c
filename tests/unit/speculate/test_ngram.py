"""The drafter `ngram`: the longest ending that stands before, where it stands first."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from octavo.errors import ConfigError
from octavo.extensions import load_extensions
from octavo.plugin import DrafterSpec, DraftInput
from octavo.speculate.drafting import make_drafter
from octavo.speculate.ngram import NgramDrafter
from octavo.speculate.settings import drafter_spec, num_drafts


def drafter(longest: int = 3, shortest: int = 1, num_tokens: int = 4) -> NgramDrafter:
    options = {"prompt_lookup_max": longest, "prompt_lookup_min": shortest}
    return NgramDrafter(DrafterSpec(num_tokens=num_tokens, options=options))


def guess(text: list[int], most: int = 4, **sizes: int) -> list[int]:
    """Its drafts behind a text."""
    tokens = np.array(text, np.int32)
    found = drafter(**sizes).propose(
        DraftInput(rows=np.zeros(1, np.int32), tokens=[tokens], most=np.array([most], np.int32))
    )
    assert found.dtype == np.int32
    assert found.shape == (1, most)
    return [token for token in found[0].tolist() if token >= 0]


def plainly(text: list[int], most: int, longest: int, shortest: int) -> list[int]:
    """The definition, by trying everything."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(text) - size):
            if text[start : start + size] == text[len(text) - size :]:
                return text[start + size : start + size + most]
    return []


def test_what_followed_before_is_guessed() -> None:
    assert guess([1, 2, 3, 4, 5, 6, 7, 1, 2]) == [3, 4, 5, 6]
    assert guess([1, 2, 3, 4, 1, 2], most=2) == [3, 4]
    assert guess([1, 2, 3, 4]) == []
    assert guess([1]) == []


def test_the_longest_ending_wins_and_of_equal_ones_the_first() -> None:
    assert guess([2, 9, 1, 2, 7, 8, 1, 2]) == [7, 8, 1, 2]
    assert guess([2, 9, 1, 2, 7, 8, 1, 2], longest=1) == [9, 1, 2, 7]
    assert guess([1, 2, 5, 6, 1, 2, 7, 8, 1, 2], most=2) == [5, 6]


def test_a_repeated_token_is_guessed_as_often_as_it_stood() -> None:
    assert guess([5] * 6) == [5, 5, 5]


def test_endings_shorter_than_the_least_are_not_looked_for() -> None:
    assert guess([2, 9, 4, 2], shortest=2) == []
    assert guess([1, 2, 9, 4, 1, 2], shortest=2) == [9, 4, 1, 2]


def test_it_agrees_with_the_definition_on_random_texts() -> None:
    rng = random.Random(1)
    for _ in range(400):
        text = rng.choices(range(rng.randrange(2, 5)), k=rng.randrange(1, 30))
        longest = rng.randrange(1, 6)
        shortest = rng.randrange(1, longest + 1)
        most = rng.randrange(1, 6)
        want = plainly(text, most, longest, shortest)
        assert guess(text, most, longest=longest, shortest=shortest) == want, (text, longest, shortest)


def test_each_sequence_has_its_own_number_of_drafts() -> None:
    texts = [np.array(t, np.int32) for t in ([1, 2, 3, 1], [4, 5], [7, 8, 9, 7])]
    found = drafter().propose(DraftInput(rows=np.arange(3, dtype=np.int32), tokens=texts, most=np.array([1, 4, 3])))
    assert found.tolist() == [[2, -1, -1, -1], [-1] * 4, [8, 9, 7, -1]]


CONFIG = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
WRONG: dict[str, tuple[Any, str]] = {
    "no object": ("ngram", "must be an object"),
    "no method": ({"num_speculative_tokens": 3}, "speculative_config.method must name a drafter, not None"),
    "no number": ({"method": "ngram"}, "speculative_config.num_speculative_tokens must be an integer .* not None"),
    "zero": (CONFIG | {"num_speculative_tokens": 0}, "num_speculative_tokens must be an integer of at least 1, not 0"),
    "true": (CONFIG | {"num_speculative_tokens": True}, "not True"),
    "unknown": (CONFIG | {"method": "eagle3"}, "'eagle3': no drafter has that name; known: ngram"),
    "no size": ({"method": "ngram", "num_speculative_tokens": 1}, "prompt_lookup_max must be an integer .* not None"),
    "min": (CONFIG | {"prompt_lookup_min": 5}, r"prompt_lookup_min \(5\) must not exceed prompt_lookup_max \(4\)"),
    "text": (CONFIG | {"prompt_lookup_max": "4"}, "prompt_lookup_max must be an integer of at least 1, not '4'"),
    "key": (CONFIG | {"model": "x"}, "'ngram': it does not take model; it takes prompt_lookup_min, prompt_lookup_max"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_config_is_refused_by_its_key(case: str) -> None:
    config, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        make_drafter(*drafter_spec(config), load_extensions().drafters)


def test_the_drafter_gets_what_the_config_says() -> None:
    made = make_drafter(*drafter_spec(CONFIG | {"prompt_lookup_min": 2}), load_extensions().drafters)
    assert isinstance(made, NgramDrafter)
    assert (made.shortest, made.longest) == (2, 4)
    assert (num_drafts(CONFIG), num_drafts(None)) == (3, 0)
