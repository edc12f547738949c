"""Fixtures of the conformance kit, and its report. Options: --platform, --settings, --report, --share, --timing,
--no-device."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import OctavoError
from octavo.ops.bind import REFERENCE
from octavo.plugin.version import PLUGIN_API
from octavo.testing.conformance.journal import MAX_DEATHS, Journal
from octavo.testing.conformance.levels import native, slower
from octavo.testing.conformance.settings import read_settings, reason_for
from octavo.testing.conformance.subject import FAMILIES, Kernel, Subject, needs_device, nothing_to_check

SUBJECT: pytest.StashKey[Subject] = pytest.StashKey()
OUTCOMES: pytest.StashKey[dict[str, tuple[str, str]]] = pytest.StashKey()
USED: pytest.StashKey[set[str]] = pytest.StashKey()
EXCUSED: pytest.StashKey[dict[str, str]] = pytest.StashKey()
TIERS: pytest.StashKey[Collection[str]] = pytest.StashKey()
SECONDS: pytest.StashKey[dict[str, float]] = pytest.StashKey()
JOURNAL: pytest.StashKey[Journal] = pytest.StashKey()
COLLECTION, TIMING = "collection: what the platform registers", "timing of kernels"
"""Names in the journal and the report of what is no test but runs the platform's code."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("octavo conformance")
    group.addoption("--platform", required=True, help="platform to check")
    group.addoption("--settings", type=Path, help="conformance.toml")
    group.addoption("--report", type=Path, help="where to write the report as JSON")
    group.addoption("--share", default="0/1", help="which tests to run: I/N takes each N-th, from the I-th on")
    group.addoption("--timing", choices=("also", "no", "only"), default="also", help="whether kernels are timed")
    group.addoption("--failed", action="append", default=[], help="a test of another process: its kernel is not timed")
    group.addoption("--no-device", action="store_true", help="run only what needs no device")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "no_device: needs no device, and runs with --no-device too")
    name, report = config.getoption("platform"), config.getoption("report")
    # Asked here, as a plugin may do what it should not when it is imported: not to the process that runs the kit.
    if report is not None and (reason := nothing_to_check(name, no_device=config.getoption("no_device"))):
        report.write_text(json.dumps({"nothing_to_check": reason}))
        pytest.exit("there is nothing to check", returncode=1)
    settings = read_settings(config.getoption("settings"))
    config.stash[SUBJECT] = Subject(name, settings, no_device=config.getoption("no_device"))
    config.stash[OUTCOMES] = {}
    config.stash[USED] = set()
    config.stash[EXCUSED] = {}
    config.stash[TIERS] = set()
    config.stash[SECONDS] = {}
    resume(config, Journal(report.with_suffix(".journal") if report is not None else None))


def resume(config: pytest.Config, journal: Journal) -> None:
    """Take over what a process that died had found, and begin."""
    config.stash[JOURNAL] = journal
    subject, outcomes, spent = config.stash[SUBJECT], config.stash[OUTCOMES], config.stash[SECONDS]
    for test, seconds, outcome, message in journal.reports():
        spent[tier_of(test)] = spent.get(tier_of(test), 0.0) + seconds
        if outcome:
            outcomes[test] = (outcome, message)
    if journal.state:
        subject.changed_by_backend = journal.state["changed_by_backend"]
        subject.proved |= set(journal.state["proved"])
        subject.settings.used.update(journal.state["used"])
    if reason := journal.died.get(COLLECTION):
        subject.unusable = f"making its device and registering its kernels: {reason}"
    journal.begin(COLLECTION, seconds=subject.settings.limit("test"))


@pytest.fixture(scope="session")
def subject(pytestconfig: pytest.Config) -> Subject:
    return pytestconfig.stash[SUBJECT]


CASES: dict[str, Callable[[Subject], Any]] = {
    "op": lambda subject: list(subject.ops()),
    "linear": lambda subject: list(subject.classes("linear")),
    "moe": lambda subject: list(subject.classes("moe")),
    "attention": lambda subject: list(subject.classes("attention")),
    "dtype": lambda subject: list(subject.caps.dtypes),
}
"""Argument name of a test -> the values it is run with."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for argument, cases in CASES.items():
        if argument not in metafunc.fixturenames:
            continue
        subject = metafunc.config.stash[SUBJECT]
        if subject.no_device:
            # Which cases there are is known on the device only: each test is told of once.
            metafunc.parametrize(argument, [None], ids=["without a device"])
            continue
        try:
            values = cases(subject)
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
    subject = config.stash[SUBJECT]
    settings, journal = subject.settings, config.stash[JOURNAL]
    for item in items:
        if subject.no_device and item.get_closest_marker("no_device") is None:
            item.add_marker(pytest.mark.skip(reason=needs_device(subject)))
            continue
        if found := reason_for(test_id(item.nodeid), settings.skip):
            config.stash[USED].add(found[0])
            config.stash[EXCUSED][test_id(item.nodeid)] = found[1]
            item.add_marker(pytest.mark.skip(reason=found[1]))
        if found := reason_for(test_id(item.nodeid), settings.xfail):
            config.stash[USED].add(found[0])
            # Strict: a known failure that passes is stale news, and is shown as a failure.
            item.add_marker(pytest.mark.xfail(reason=found[1], strict=True))
            if test_id(item.nodeid) in journal.died:
                config.stash[OUTCOMES][test_id(item.nodeid)] = ("xfailed", found[1])
        if len(journal.died) >= MAX_DEATHS:
            item.add_marker(pytest.mark.skip(reason=f"not run: the process had died {MAX_DEATHS} times"))
    first, step = map(int, config.getoption("share").split("/"))
    config.stash[TIERS] = {tier_of(test_id(item.nodeid)) for item in items}
    items[:] = [] if config.getoption("timing") == "only" else items[first::step]
    items[:] = [item for item in items if test_id(item.nodeid) not in config.stash[OUTCOMES]]
    journal.end(COLLECTION)


def test_id(nodeid: str) -> str:
    """ "test_t2_ops.py::test_x[y]", wherever the kit is installed."""
    return nodeid[nodeid.index("test_t") :] if "test_t" in nodeid else nodeid


def tier_of(test: str) -> str:
    """Of a `test_id`."""
    found = re.match(r"test_t(\d)", test)
    return found[1] if found else "?"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    journal, limit = item.config.stash[JOURNAL], item.config.stash[SUBJECT].settings.limit("test")
    journal.begin(test_id(item.nodeid), seconds=limit)
    result = yield
    journal.end(test_id(item.nodeid))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report: pytest.TestReport = yield
    subject, test = item.config.stash[SUBJECT], test_id(item.nodeid)
    seconds, tier = item.config.stash[SECONDS], tier_of(test)
    seconds[tier] = seconds.get(tier, 0.0) + report.duration
    outcome, message = "", ""
    if report.when == "call" or report.outcome != "passed":
        outcome, message = item.config.stash[OUTCOMES][test] = outcome_of(report, call)
    state = {
        "changed_by_backend": subject.changed_by_backend,
        "proved": sorted(subject.proved),
        "used": sorted(subject.settings.used),
    }
    item.config.stash[JOURNAL].report(test, report.duration, outcome, message, state=state)
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
        by_tier.setdefault(tier_of(test), Counter())[outcome] += 1

    def having(wanted: str) -> dict[str, str]:
        return {test: message for test, (outcome, message) in outcomes.items() if outcome == wanted}

    settings, failures = subject.settings, having("failed")
    timed = []
    if config.getoption("timing") != "no" and TIMING not in failures:
        config.stash[JOURNAL].begin(TIMING, seconds=settings.limit("test"))
        known = {*failures, *having("xfailed"), *config.stash[EXCUSED], *config.getoption("failed")}
        timed = timings_of(subject, config.stash[TIERS], known)
        config.stash[JOURNAL].end(TIMING)
    kernels = native_kernels(subject)
    unknown = [name for name in settings.elsewhere if kernels["classes"] and name not in kernels["classes"]]
    excused = {test: reason for test, reason in config.stash[EXCUSED].items() if test in outcomes}
    return {
        "platform": subject.name,
        "plugin_api": ".".join(map(str, PLUGIN_API)),
        **about(subject),
        "no_device": subject.without_device,
        # Whatever label a run on the device earns, this one had none.
        "proof": "contract only" if subject.no_device else settings.proof.get("label", ""),
        "counts": dict(Counter(outcome for outcome, _ in outcomes.values())),
        "by_tier": {tier: dict(counts) for tier, counts in by_tier.items()},
        "seconds": {tier: round(spent, 1) for tier, spent in config.stash[SECONDS].items()},
        "failures": failures,
        "xfails": having("xfailed"),
        "excused": excused,
        "skipped": {test: reason for test, reason in having("skipped").items() if test not in excused},
        "tolerances": {what: dict(by_dtype) for what, by_dtype in settings.tolerance.items()},
        "changed_by_backend": subject.changed_by_backend,
        "unused_patterns": [
            *(pattern for pattern in [*settings.skip, *settings.xfail] if pattern not in config.stash[USED]),
            *([] if subject.no_device else settings.unused_tolerances()),
            *unknown,
        ],
        **kernels,
        "timings": timed,
        "slower_than_reference": slower(timed),
    }


def about(subject: Subject) -> dict[str, Any]:
    """Which plugin was tested, on what, and what it claims; empty where the platform cannot be opened."""
    unknown = {"plugin": "", "device": "", "claims": {}}
    try:
        platform, caps = subject.platform, subject.caps
        lock = platform.lock
        known = {
            "plugin": f"{lock.dist} {lock.version}, plugin API {lock.api}",
            "device": "" if subject.no_device else subject.device.describe().name,
        }
    except OctavoError:
        return unknown
    claims = {
        "dtypes": list(caps.dtypes),
        "graph": caps.graph,
        "shapes": caps.shapes,
        "max_world_size": caps.max_world_size,
        "collectives": sorted(caps.collectives),
        "features": sorted(caps.features),
    }
    return known | {"claims": claims}


def native_kernels(subject: Subject) -> dict[str, Any]:
    """Whose the kernels are: of ops by name ("" where only the reference serves it), and of families by class."""
    from octavo.ops.catalogue import CATALOGUE

    unknown = {"native": [], "classes": {}, "native_ops": [], "op_coverage": 0.0, "ops": {}}
    if subject.no_device:
        return unknown
    try:
        ops = [op for op in subject.ops() if op.provider != REFERENCE]
        families = [cls for family in FAMILIES for cls in subject.classes(family) if cls.provider != REFERENCE]
    except OctavoError:
        return unknown
    providers = {name: ", ".join(shown(op) for op in ops if op.what == name) for name in sorted(CATALOGUE)}
    native_ops = [name for name in CATALOGUE if any(op.what == name and not op.pack for op in ops)]
    classes = {str(cls): {"pack": cls.pack, "proved": str(cls) in subject.proved} for cls in families}
    return {
        "native": native(classes),
        "classes": classes,
        "native_ops": native_ops,
        "op_coverage": 100 * len(native_ops) / len(CATALOGUE),
        "ops": providers,
    }


def shown(op: Kernel) -> str:
    """A kernel by its provider, and by the pack that it is of."""
    return f"{op.provider} (kernel pack {op.pack})" if op.pack else op.provider


def timings_of(subject: Subject, tiers: Collection[str], failures: Collection[str]) -> list[dict[str, Any]]:
    """Times of the platform's kernels, if there were any to test."""
    if subject.no_device or not {"2", "3", "4"} & set(tiers):
        return []
    from octavo.testing.conformance.speed import timings

    try:
        return timings(subject, tiers=tiers, failed=failures)
    except OctavoError:
        # The platform cannot be opened: its tests have said so.
        return []
