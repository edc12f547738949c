"""The rule that every case asserts its invariants, and the switch without which Triton kernels run on no CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from invariants import Invariants

os.environ.setdefault("TRITON_INTERPRET", "1")  # before any test imports the first kernel

CASE = "test_case_"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A case that asserts no invariants is refused before it runs."""
    for item in items:
        if item.name.startswith(CASE) and "invariants" not in getattr(item, "fixturenames", ()):
            raise pytest.UsageError(
                f"{item.nodeid} asserts no invariants: use a server's fixture, or `invariants(llm)`"
            )


@pytest.fixture
def invariants(request: pytest.FixtureRequest) -> Iterator[Invariants]:
    """The invariants; a case that has asserted them of nothing fails."""
    held = Invariants()
    yield held
    assert held.asserted or not request.node.name.startswith(CASE), "this case has asserted no invariants"
