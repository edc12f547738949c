"""The compatibility matrix says what reports say, and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.testing.compatibility_page import compatibility_page, reports_index

REPORT: dict[str, Any] = {
    "platform": "acme",
    "plugin": "octavo-acme 0.1, plugin API 1.0",
    "device": "Acme One",
    "proof": "executed on simulator",
    "level": "bronze",
    "claims": {
        "dtypes": ["float32"],
        "graph": "capture",
        "shapes": "dynamic",
        "max_world_size": 2,
        "features": ["prefix_cache"],
    },
    "native": ["attention"],
    "op_coverage": 25.0,
    "by_tier": {"1": {"passed": 3}, "3": {"passed": 4, "failed": 1}, "6": {"passed": 2, "skipped": 9}},
    "failures": {"test_t3_attention.py::test_x": "AssertionError: far off"},
    "xfails": {},
    "excused": {"test_t6_engine.py::test_y": "needs more memory"},
}


def cells(folder: Path, **changes: Any) -> dict[str, str]:
    """First column -> second, of all tables of the page."""
    (folder / "acme.json").write_text(json.dumps(REPORT | changes))
    lines = [line.split("|") for line in compatibility_page(folder).splitlines() if line.startswith("|")]
    return {line[1].strip(): line[2].strip() for line in lines}


def test_a_cell_is_labelled_by_the_report_and_proved_by_its_tier(tmp_path: Path) -> None:
    found = cells(tmp_path)
    assert found["float32"] == "yes (S)"
    assert found["float16"] == "-"
    assert found["attention kernels"] == "own (failed)"
    assert found["linear kernels"] == "? (not run)"
    assert found["recorded steps"] == "capture (S)"
    assert found["tensor parallel ranks"] == "up to 2 (not run)"
    assert found["prefix cache"] == "yes (S)"
    assert found["structured outputs"] == "-"
    assert found["3 attention"] == "4 passed, 1 failed (S)"
    assert found["6 engine"] == "2 passed (S)"


def test_a_report_without_a_label_proves_nothing_by_name(tmp_path: Path) -> None:
    found = cells(tmp_path, proof="")
    assert found["proof"] == "not labelled"
    assert found["float32"] == "yes (?)"


def test_without_a_device_nobody_knows_whose_kernels_run(tmp_path: Path) -> None:
    found = cells(tmp_path, no_device="no card", native=[], op_coverage=0.0)
    assert found["attention kernels"] == "? (failed)"
    assert found["linear kernels"] == "? (not run)"
    assert found["ops with kernels of its own"].startswith("? ")


def test_what_failed_and_what_was_left_out_is_on_the_page(tmp_path: Path) -> None:
    cells(tmp_path)
    page = compatibility_page(tmp_path)
    assert "- acme: `test_t3_attention.py::test_x` fails: AssertionError: far off" in page
    assert "- acme: `test_t6_engine.py::test_y`: needs more memory" in page


def test_without_failures_the_page_says_none(tmp_path: Path) -> None:
    cells(tmp_path, failures={}, excused={})
    assert compatibility_page(tmp_path).endswith("None.\n")


def test_tests_left_out_for_one_reason_are_one_line(tmp_path: Path) -> None:
    cells(tmp_path, excused={f"test_t6_engine.py::test_{i}": "needs more memory" for i in range(3)})
    assert "- acme: `test_t6_engine.py::test_0` and 2 more: needs more memory" in compatibility_page(tmp_path)


def test_every_report_is_listed_with_its_page_and_its_proof(tmp_path: Path) -> None:
    cells(tmp_path)
    (tmp_path / "acme-two.json").write_text(json.dumps(REPORT | {"proof": "contract only"}))
    assert "| [acme](acme.html) | octavo-acme 0.1, plugin API 1.0 | Acme One | executed on simulator | bronze |" in (
        reports_index(tmp_path)
    )
    assert "[JSON](acme-two.json)" in reports_index(tmp_path)
    assert "[acme-two](conformance/acme-two.html)" in compatibility_page(tmp_path)
