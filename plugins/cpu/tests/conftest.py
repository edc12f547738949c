"""What tests of the compiled library share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo_cpu import native


def isas() -> list[str]:
    """The instruction sets that run here."""
    if native.why_not():
        return []
    library = native.load()
    first = library.octavo_isa()
    found = [name for name in native.ISAS if library.octavo_use_isa(name.encode())]
    library.octavo_use_isa(first)
    return found


@pytest.fixture(params=isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn, with two threads; afterwards the one from before, with one."""
    library = native.load()
    first = library.octavo_isa()
    assert library.octavo_use_isa(request.param.encode())
    library.octavo_set_threads(2)
    yield request.param
    library.octavo_use_isa(first)
    library.octavo_set_threads(1)
