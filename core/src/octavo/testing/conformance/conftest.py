"""Fixtures of the conformance kit, and its report. Options: --platform, --settings, --report, --share."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import OctavoError
from octavo.plugin.version import PLUGIN_API
from octavo.testing.conformance.settings import read_settings, reason_for
from octavo.testing.conformance.subject import Subject

SUBJECT: pytest.StashKey[Subject] = pytest.StashKey()
OUTCOMES: pytest.StashKey[dict[str, tuple[str, str]]] = pytest.StashKey()
USED: pytest.StashKey[set[str]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("octavo conformance")
    group.addoption("--platform", required=True, help="platform to check")
    group.addoption("--settings", type=Path, help="conformance.toml")
    group.addoption("--report", type=Path, help="where to write the report as JSON")
    group.addoption("--share", default="0/1", help="which tests to run: I/N takes each N-th, from the I-th on")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SUBJECT] = Subject(config.getoption("platform"), read_settings(config.getoption("settings")))
    config.stash[OUTCOMES] = {}
    config.stash[USED] = set()


@pytest.fixture(scope="session")
def subject(pytestconfig: pytest.Config) -> Subject:
    return pytestconfig.stash[SUBJECT]


CASES: dict[str, Callable[[Subject], Any]] = {
    "op": lambda subject: list(subject.ops()),
    "linear": lambda subject: list(subject.classes("linear")),
    "attention": lambda subject: list(subject.classes("attention")),
    "dtype": lambda subject: list(subject.caps.dtypes),
}
"""Argument name of a test -> the values it is run with."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for argument, cases in CASES.items():
        if argument not in metafunc.fixturenames:
            continue
        try:
            values = cases(metafunc.config.stash[SUBJECT])
        except OctavoError as error:
            # One failing test instead of none: an unusable platform must not pass by having nothing to test.
            values = [error]
        metafunc.parametrize(argument, values, ids=[name_of(value) for value in values])


def name_of(value: object) -> str:
    return "unusable" if isinstance(value, OctavoError) else str(value)


def pytest_runtest_call(item: pytest.Item) -> None:
    for value in getattr(getattr(item, "callspec", None), "params", {}).values():
        if isinstance(value, OctavoError):
            raise value


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    settings = config.stash[SUBJECT].settings
    for item in items:
        if found := reason_for(test_id(item.nodeid), settings.skip):
            config.stash[USED].add(found[0])
            item.add_marker(pytest.mark.skip(reason=found[1]))
        if found := reason_for(test_id(item.nodeid), settings.xfail):
            config.stash[USED].add(found[0])
            # Strict: a known failure that passes is stale news, and is shown as a failure.
            item.add_marker(pytest.mark.xfail(reason=found[1], strict=True))
    first, step = map(int, config.getoption("share").split("/"))
    items[:] = items[first::step]


def test_id(nodeid: str) -> str:
    """ "test_t2_ops.py::test_x[y]", wherever the kit is installed."""
    return nodeid[nodeid.index("test_t") :] if "test_t" in nodeid else nodeid


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report: pytest.TestReport = yield
    if report.when == "call" or report.outcome != "passed":
        item.config.stash[OUTCOMES][test_id(item.nodeid)] = outcome_of(report, call)
    return report


def outcome_of(report: Any, call: pytest.CallInfo[None]) -> tuple[str, str]:
    """(passed | failed | skipped | xfailed, its message in one line)."""
    if hasattr(report, "wasxfail") and report.skipped:
        return "xfailed", report.wasxfail
    if report.skipped:
        return "skipped", report.longrepr[2].removeprefix("Skipped: ")
    if report.failed and call.excinfo is not None:
        lines = str(call.excinfo.value).strip().splitlines() or [""]
        return "failed", f"{call.excinfo.typename}: {lines[0][:400]}"
    return report.outcome, str(report.longrepr or "")


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("report")
    if path is not None:
        path.write_text(json.dumps(report_of(session.config), indent=2))


def report_of(config: pytest.Config) -> dict[str, Any]:
    """The report, but for the level, which depends on the tiers that were asked for."""
    subject, outcomes = config.stash[SUBJECT], config.stash[OUTCOMES]
    by_tier: dict[str, Counter[str]] = {}
    for test, (outcome, _) in outcomes.items():
        found = re.match(r"test_t(\d)", test)
        by_tier.setdefault(found[1] if found else "?", Counter())[outcome] += 1

    def having(wanted: str) -> dict[str, str]:
        return {test: message for test, (outcome, message) in outcomes.items() if outcome == wanted}

    patterns = [*subject.settings.skip, *subject.settings.xfail]
    failures = having("failed")
    return {
        "platform": subject.name,
        "plugin_api": ".".join(map(str, PLUGIN_API)),
        "counts": dict(Counter(outcome for outcome, _ in outcomes.values())),
        "by_tier": {tier: dict(counts) for tier, counts in by_tier.items()},
        "failures": failures,
        "xfails": having("xfailed"),
        "skipped": having("skipped"),
        "unused_patterns": [pattern for pattern in patterns if pattern not in config.stash[USED]],
        **native_kernels(subject),
        "slower_than_reference": slower(subject, by_tier, failures),
    }


def native_kernels(subject: Subject) -> dict[str, Any]:
    """Which kernels are the platform's own."""
    from octavo.ops.catalogue import CATALOGUE

    try:
        table = subject.kernels
    except OctavoError:
        return {"native": [], "native_ops": [], "op_coverage": 0.0}
    ops = [name for name in CATALOGUE if table.providers(name)]
    families = [family for family in ("attention", "linear", "moe") if table.classes(family)]
    return {"native": families, "native_ops": ops, "op_coverage": 100 * len(ops) / len(CATALOGUE)}


def slower(subject: Subject, tiers: Collection[str], failures: Collection[str]) -> list[dict[str, Any]]:
    """Kernels to look at, if there were any to time."""
    if not {"2", "3"} & set(tiers):
        return []
    from octavo.testing.conformance.speed import slower_kernels

    try:
        return slower_kernels(subject, tiers=tiers, failed=failures)
    except OctavoError:
        # The platform cannot be opened: its tests have said so.
        return []
