"""A kernel that ends its process, or does not end, is a failure by its test's name; the rest is tested all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.errors import OctavoError
from octavo.testing.conformance.journal import Journal
from octavo.testing.conformance.run import Result

Check = Callable[..., Result]

DEADLY = """
@hookimpl
def platform_caps():
    return PlatformCaps(dtypes=("float32",), default_dtype="float32")

def crashes(x, weight, eps):
    import ctypes
    ctypes.string_at(0)

def hangs(logits):
    import time
    while True:
        time.sleep(1)

@hookimpl
def register_kernels(registry):
    registry.op("rms_norm", crashes, provider="deadly")
    registry.op("greedy", hangs, provider="endless")
"""
AGREES = "test_t2_ops.py::test_an_op_kernel_agrees_with_the_reference"


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_kernels_that_crash_and_hang_are_named_and_the_others_tested(check: Check, jobs: int) -> None:
    settings = "[max_seconds]\ntest = 20\n[tolerance]\nadd_rms_norm.float32 = 1e-3\nattention.float32 = 1e-3\n"
    result = check(DEADLY, tiers="2", settings=settings, jobs=jobs)
    failures = result.data["failures"]
    assert set(failures) == {f"{AGREES}[rms_norm-deadly-float32]", f"{AGREES}[greedy-endless-float32]"}
    assert failures[f"{AGREES}[rms_norm-deadly-float32]"] == "the process died: signal SIGSEGV"
    assert failures[f"{AGREES}[greedy-endless-float32]"].startswith("it hangs: no end after (0:00:20), in File")
    assert "in hangs" in failures[f"{AGREES}[greedy-endless-float32]"]
    counts = result.data["by_tier"]["2"]
    assert counts["passed"] > 20, "the tests before and behind them"
    assert counts["failed"] == 2
    assert result.data["unused_patterns"] == ["attention.float32"]
    assert not result.passed


def test_a_known_crash_is_a_known_failure(check: Check) -> None:
    known = '[xfail]\n"*agrees*rms_norm-deadly*" = "the driver crashes"\n[skip]\n"*greedy-endless*" = "it hangs"\n'
    result = check(DEADLY, tiers="2", settings=known)
    assert result.passed
    assert result.data["xfails"] == {f"{AGREES}[rms_norm-deadly-float32]": "the driver crashes"}


@pytest.mark.slow
def test_a_platform_whose_registration_crashes_fails_by_that(check: Check) -> None:
    result = check("@hookimpl\ndef register_kernels():\n    os.kill(os.getpid(), 11)", tiers="2,3")
    failures = result.data["failures"]
    assert failures["collection: what the platform registers"] == "the process died: signal SIGSEGV"
    unusable = [message for test, message in failures.items() if test.startswith(AGREES)]
    assert unusable
    assert all("making its device and registering its kernels" in message for message in unusable)
    assert not result.passed


def test_a_platform_that_ends_the_process_when_imported_is_told_in_a_line(check: Check) -> None:
    with pytest.raises(OctavoError, match="ended outside its tests: exit code 3") as told:
        check("os._exit(3)", tiers="2")
    assert "pip install" not in str(told.value)


def test_a_journal_knows_what_ran_when_its_process_died(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = Journal(path)
    assert not first.bury(1), "nothing was running"
    for number in range(2):
        first.begin(f"test_{number}")
        first.report(f"test_{number}", 0.5, "", "", state={"turn": number})
        if number == 0:
            first.report(f"test_{number}", 1.0, "passed", "", state={"turn": number})
            first.end(f"test_{number}")
    second = Journal(path)
    assert second.running == "test_1"
    assert second.bury(-6)
    assert not second.bury(-6), "once is enough"
    second.begin("test_1")
    assert not second.bury(-6), "what ended two processes would end a third"
    second.end("test_1")
    third = Journal(path)
    assert third.died == {"test_1": "the process died: signal SIGABRT"}
    assert third.state == {"turn": 1}
    assert [(test, outcome) for test, _, outcome, _ in third.reports() if outcome] == [
        ("test_0", "passed"),
        ("test_1", "failed"),
    ]


MANY = """
def crashes(*args):
    os.abort()

@hookimpl
def register_kernels(registry):
    for op in ("rms_norm", "add_rms_norm", "scaled_add", "greedy", "sample", "logits", "embedding"):
        registry.op(op, crashes, provider="deadly")
"""


@pytest.mark.slow
def test_after_five_deaths_the_rest_is_skipped(check: Check) -> None:
    result = check(MANY, tiers="2")
    deaths = [message for message in result.data["failures"].values() if message == "the process died: signal SIGABRT"]
    assert len(deaths) >= 5
    assert "not run: the process had died 5 times" in result.data["skipped"].values()
    assert not result.passed


RUDE = """    class Rude(TorchDevice):
        def pin(self, t):
            raise KeyboardInterrupt

    return Rude("""


def test_a_kit_that_ends_early_has_failed(check: Check) -> None:
    data = check(tiers="1", replace=("    return TorchDevice(", RUDE)).data
    assert data["by_tier"]["1"]["passed"] > 3
    assert data["failures"] == {"the kit itself": "pytest ended early: exit code 2"}
