"""What is made of the conformance reports in docs/conformance: docs/compatibility.md, an index, and a page for each.

    docs/conformance/cpu.json            octavo plugin check cpu --report docs/conformance/cpu.json
    docs/conformance/NAME-DETAIL.json    further reports about a platform: another device, another runtime
    docs/conformance/*.html, README.md   generated from them

A cell says what a platform claims or brings, and how it was proved: by the label of its report, if the tier that tests
it ran and nothing of it failed. Without a report there is no column.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from octavo.testing.conformance.page import TIERS, page

REPORTS = Path(__file__).parents[4] / "docs" / "conformance"
Report = Mapping[str, Any]

MARKS = {
    "run on hardware": "H",
    "executed on simulator": "S",
    "compiled for target": "T",
    "contract only": "C",
    "": "?",
}
"""Label of a report -> its letter in a cell."""


@dataclass(frozen=True)
class Row:
    """One feature. value: its text for a report, "" where the platform does not have it; tier: what proves it."""

    title: str
    tier: str
    value: Callable[[Report], str]


def claimed(report: Report, key: str) -> Any:
    """What a platform's capabilities say."""
    return report.get("claims", {}).get(key)


UNSEEN = "?"
"""Of what only a device would have shown."""


def dtype(name: str, report: Report) -> str:
    return "yes" if name in (claimed(report, "dtypes") or ()) else ""


def feature(name: str, report: Report) -> str:
    return "yes" if name in (claimed(report, "features") or ()) else ""


def native(family: str, tier: str, report: Report) -> str:
    ran = report["by_tier"].get(tier, {})
    if report.get("no_device") or not (ran.get("passed") or ran.get("failed")):
        return UNSEEN
    return "own" if family in report["native"] else "reference"


def coverage(report: Report) -> str:
    return UNSEEN if report.get("no_device") else f"{report['op_coverage']:.0f}%"


def recorded(report: Report) -> str:
    graph = claimed(report, "graph")
    return "" if graph in (None, "none") else str(graph)


def static_shapes(report: Report) -> str:
    return "yes" if claimed(report, "shapes") == "bucketed" else ""


def ranks(report: Report) -> str:
    most = claimed(report, "max_world_size") or 1
    return f"up to {most}" if most > 1 else ""


ROWS: tuple[Row, ...] = (
    *(Row(name, "1", partial(dtype, name)) for name in ("float32", "bfloat16", "float16")),
    Row("attention kernels", "3", partial(native, "attention", "3")),
    Row("linear kernels", "4", partial(native, "linear", "4")),
    Row("expert kernels", "4", partial(native, "moe", "4")),
    Row("ops with kernels of its own", "2", coverage),
    Row("recorded steps", "1", recorded),
    Row("static shapes", "6", static_shapes),
    Row("tensor parallel ranks", "5", ranks),
    Row("prefix cache", "6", partial(feature, "prefix_cache")),
    Row("chunked prefill", "6", partial(feature, "chunked_prefill")),
    Row("structured outputs", "6", partial(feature, "structured")),
    Row("speculative decoding", "6", partial(feature, "spec_decode")),
)


def proved(report: Report, tier: str) -> str:
    """How far a tier supports what the platform says: the letter of the report's label, "failed", or "not run"."""
    outcomes = report["by_tier"].get(tier, {})
    if outcomes.get("failed"):
        return "failed"
    return MARKS.get(report.get("proof", ""), "?") if outcomes.get("passed") else "not run"


def cell(row: Row, report: Report) -> str:
    text = row.value(report)
    return f"{text} ({proved(report, row.tier)})" if text else "-"


def outcomes(tier: str, report: Report) -> str:
    """ "12 passed, 1 failed (H)", without the tests that were skipped: the report has their reasons."""
    counts = report["by_tier"].get(tier, {})
    said = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "xfailed") if counts.get(kind))
    return f"{said} ({MARKS.get(report.get('proof', ''), '?')})" if said else "not run"


def read_reports(folder: Path) -> dict[str, Report]:
    """The reports by column: the file's name without its ending."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


ABOUT: dict[str, Callable[[Report], str]] = {
    "plugin": lambda report: report.get("plugin") or "?",
    "device": lambda report: report.get("device") or "?",
    "proof": lambda report: report.get("proof") or "not labelled",
    "level": lambda report: report["level"],
}
"""Who was tested, on what, and with which result."""


def report_page(path: Path) -> str:
    """The HTML of one report."""
    return page(json.loads(path.read_text()))


def reports_index(folder: Path = REPORTS) -> str:
    """The README.md beside the reports, which lists them."""
    lines = [
        "# Conformance reports",
        "",
        "What `octavo plugin check` found ([the kit](../conformance.md)). A report proves no more than its label of",
        "proof says; [compatibility](../compatibility.md) sets them side by side.",
        "",
        "| report | " + " | ".join(ABOUT) + " | data |",
        "|" + "---|" * (2 + len(ABOUT)),
    ]
    for name, report in read_reports(folder).items():
        facts = " | ".join(value(report) for value in ABOUT.values())
        lines.append(f"| [{name}]({name}.html) | {facts} | [JSON]({name}.json) |")
    return "\n".join([*lines, ""])


def table(head: str, reports: Mapping[str, Report], rows: Sequence[tuple[str, Callable[[Report], str]]]) -> list[str]:
    lines = ["| " + " | ".join([head, *reports]) + " |", "|" + "---|" * (1 + len(reports))]
    return lines + ["| " + " | ".join([title, *map(value, reports.values())]) + " |" for title, value in rows]


def compatibility_page(folder: Path = REPORTS) -> str:
    """The page, from the reports in a folder."""
    reports = read_reports(folder)
    linked = {f"[{name}](conformance/{name}.html)": report for name, report in reports.items()}
    lines = [
        "# Compatibility",
        "",
        "What works where, from the reports of `octavo plugin check PLATFORM` that are kept in",
        "[conformance](conformance/README.md). A column is a report: a platform, and after a dash the device or",
        "runtime that it was made on; a click on its name opens it. Letters say how a cell was proved:",
        "",
        "- **H** run on hardware: the kit ran on the platform's own device;",
        "- **S** executed on simulator: the kernels ran, on something that stands in for the device;",
        "- **T** compiled for target: the kernels were compiled for the device and did not run;",
        "- **C** contract only: the plugin keeps the plugin API, and none of its kernels ran;",
        "- **?** the report does not say (`[proof]` in `conformance.toml`).",
        "",
        "`-`: the platform does not claim it. `reference`: core's plain-PyTorch kernels do it. `not run`: claimed, but",
        "the tier that would prove it was not run. `?` in a cell: only a run on a device shows it. Ranks are tested in",
        "pairs, whatever their number. What has no column has not been checked.",
        "",
        *table("", linked, [*ABOUT.items()]),
        "",
        "## Features",
        "",
        *table("feature", reports, [(row.title, partial(cell, row)) for row in ROWS]),
        "",
        "## Tests",
        "",
        *table("tier", reports, [(f"{tier} {what}", partial(outcomes, tier)) for tier, what in TIERS.items()]),
        "",
        "## Known failures, and what was left out",
        "",
    ]
    for name, report in reports.items():
        lines += [f"- {name}: `{test}` fails: {message}" for test, message in report["failures"].items()]
        by_reason: dict[str, list[str]] = {}
        for test, reason in sorted({**report["xfails"], **report.get("excused", {})}.items()):
            by_reason.setdefault(reason, []).append(f"`{test}`")
        for reason, tests in by_reason.items():
            others = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
            lines.append(f"- {name}: {tests[0]}{others}: {reason}")
    if lines[-1] == "":
        lines.append("None.")
    return "\n".join([*lines, ""])
