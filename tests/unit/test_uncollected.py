"""Start-up without the garbage collector: off meanwhile, and afterwards as it was."""

from __future__ import annotations

import gc

import pytest

from octavo.uncollected import uncollected


def test_the_collector_rests_and_works_again_even_after_an_error() -> None:
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), uncollected():
        raise KeyError
    assert gc.isenabled()


def test_a_program_that_collects_by_itself_still_does() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
