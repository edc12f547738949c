"""Every known pain of users of LLM servers has a test of its own, named `test_case_<id>_<what>`.

A test stands where its subject is tested; each ends with the invariants of its fixture (`tests/unit/server/conftest.py`
has them in words): a stream joins to the plain answer, a bad request is a 4xx that names its field and the next plain
request succeeds, nothing is left running and no KV block is lost, every body is strict JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
GROUPS = {
    "A": 9,  # detokenizing, stop strings
    "B": 11,  # logprobs, echo
    "C": 16,  # checks of parameters, grammars
    "D": 10,  # streams, usage, finish reasons, tools
    "E": 5,  # chat templates and tokens
    "F": 4,  # seeds, batches, penalties
    "G": 7,  # life cycle, load, cache
    "H": 8,  # loading files
}
FURTHER = (
    "X_beam_stop",
    "X_beam_length_penalty",
    "X_beam_width",
    "X_beam_candidates",
    "X_embeddings",
    "X_anthropic_usage",
    "X_anthropic_stop_reason",
    "X_chat_echo",
    "X_generation_config",
    "X_lone_surrogate",
    "X_abort",
    "X_health",
)
IDS = [f"{group}{number}" for group, last in GROUPS.items() for number in range(1, last + 1)] + list(FURTHER)
NAME = re.compile(r"^\s*(?:async )?def test_case_(\w+)\(", re.MULTILINE)


def names() -> Iterator[str]:
    """What follows `test_case_` in the names of all tests."""
    for path in TESTS.rglob("*.py"):
        yield from NAME.findall(path.read_text())


NAMES = list(names())


@pytest.mark.parametrize("case", IDS)
def test_the_case_has_a_test(case: str) -> None:
    assert any(name.startswith(f"{case}_") for name in NAMES), f"write a test_case_{case}_..."


def test_no_test_names_a_case_that_does_not_exist() -> None:
    assert [name for name in NAMES if not name.startswith(tuple(f"{case}_" for case in IDS))] == []
