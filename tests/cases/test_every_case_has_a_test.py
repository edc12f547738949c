"""Every known pain of users of LLM servers has a test of its own, named `test_case_<id>_<what>`.

A test stands where its subject is tested. Each goes through a server or an LLM, and ends with the invariants of
`tests/invariants.py`: `tests/conftest.py` refuses one that has none of the fixtures which assert them, and fails one
that has asserted them of nothing.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

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


def test_every_case_asserts_the_invariants() -> None:
    files = [str(path) for path in TESTS.rglob("test_*.py") if NAME.search(path.read_text())]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", *files]
    result = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_case_without_them_is_refused(pytestconfig: pytest.Config) -> None:
    conftest = pytestconfig.pluginmanager.getplugin(str(TESTS / "conftest.py"))
    assert conftest is not None
    case = SimpleNamespace(name="test_case_A1_bare[1]", nodeid="here::test_case_A1_bare[1]", fixturenames=["tmp_path"])
    with pytest.raises(pytest.UsageError, match="here::test_case_A1_bare"):
        conftest.pytest_collection_modifyitems([case])
    case.fixturenames.append("invariants")
    conftest.pytest_collection_modifyitems([case, SimpleNamespace(name="test_other", fixturenames=[])])


def test_a_case_that_asserts_them_of_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text("def test_case_A1_empty(invariants): pass\ndef test_other(invariants): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", f"pythonpath={TESTS}", "--rootdir", "."]
    result = subprocess.run([*command, "."], capture_output=True, text=True, cwd=tmp_path)
    assert "2 passed, 1 error" in result.stdout, result.stdout
