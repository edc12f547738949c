"""Trying a grammar in a child: its time and its crash are the child's own."""

from __future__ import annotations

import os
import signal
import time

import pytest

from octavo.errors import RequestError
from octavo.structured.attempt import Attempt, Verdict


def verdict(compile, *, timeout: float = 20.0) -> Verdict:
    attempt = Attempt(compile, timeout, "regex")
    while time.monotonic() < attempt.deadline and not _ended(attempt.pipe):
        time.sleep(0.005)
    found = attempt.finish()
    with pytest.raises(ChildProcessError):
        os.waitpid(attempt.pid, os.WNOHANG)  # no zombie is left
    return found


def _ended(pipe: int) -> bool:
    from multiprocessing.connection import wait

    return bool(wait([pipe], 0))


def fail(error: BaseException):
    def compile() -> None:
        raise error

    return compile


def test_what_compiles_has_no_message() -> None:
    assert verdict(lambda: 1) == Verdict()


def test_a_refusal_keeps_its_field() -> None:
    assert verdict(fail(RequestError("no", field="structured_outputs.json"))) == Verdict(
        "no", "structured_outputs.json"
    )


def test_one_that_takes_too_long_is_killed() -> None:
    found = verdict(lambda: time.sleep(60), timeout=0.3)
    assert "more than 0.3 s" in found.message
    assert found.field == "regex"


@pytest.mark.parametrize("end", [lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os._exit(3)])
def test_a_crash_of_the_library_is_the_requests_own(end) -> None:
    assert "crashed" in verdict(end).message


def test_an_error_of_any_kind_is_the_requests_own() -> None:
    assert "ZeroDivisionError" in verdict(lambda: 1 / 0).message


def test_memory_is_limited() -> None:
    assert "MiB" in verdict(lambda: bytearray(4 << 30)).message
