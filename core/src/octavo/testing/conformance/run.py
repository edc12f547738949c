"""Runs the kit in a fresh process and judges what came back."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

TIERS = ("0", "1", "2", "3", "6")
FOLDER = Path(__file__).parent

BRONZE = frozenset({"0", "1", "6"})
SILVER = BRONZE | {"2", "3"}
NATIVE = frozenset({"attention", "linear"})
"""Kernel families that a silver platform brings itself."""


@dataclass(frozen=True)
class Result:
    """data: the report as written to conformance.json."""

    data: dict[str, Any]

    @property
    def passed(self) -> bool:
        return not self.data["failures"] and bool(self.data["counts"].get("passed"))

    def summary(self) -> str:
        """The report in a few lines."""
        data = self.data
        counts = ", ".join(f"{number} {outcome}" for outcome, number in data["counts"].items())
        native = ", ".join(data["native"]) or "none"
        lines = [
            f"{data['platform']}: {counts or 'nothing ran'}; level {data['level']}",
            f"own kernels: {native} ({data['op_coverage']:.0f}% of the ops)",
        ]
        slower = ", ".join(
            f"{entry['op']} {entry['provider']} " + (f"{entry['ratio']}x" if "ratio" in entry else entry["error"])
            for entry in data["slower_than_reference"]
        )
        lines += [f"slower than the reference on these small samples: {slower}"] if slower else []
        lines += [f"FAILED {test}: {message}" for test, message in data["failures"].items()]
        lines += [f"expected to fail: {test}: {reason}" for test, reason in data["xfails"].items()]
        lines += [f"conformance.toml: {pattern!r} fits no test" for pattern in data["unused_patterns"]]
        return "\n".join(lines)


def run(name: str, *, tiers: Sequence[str] = TIERS, config: Path | None = None, quiet: bool = False) -> Result:
    """Run `tiers` on platform `name`. config: conformance.toml, by default the one in the current folder, if any.

    A fresh process, so that hygiene is judged from a clean start. Raises ConfigError if pytest is not installed.
    """
    if config is None and Path("conformance.toml").exists():
        config = Path("conformance.toml")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "conformance.json")
        command = [sys.executable, "-m", "pytest", "-c", str(FOLDER / "pytest.ini"), "--rootdir", str(FOLDER)]
        command += ["-p", "no:cacheprovider", "--import-mode=importlib", "-q", "--tb=short"]
        command += [f"--platform={name}", f"--report={report}"]
        command += [f"--settings={config.resolve()}"] if config else []
        command += [str(path) for tier in tiers for path in sorted(FOLDER.glob(f"test_t{tier}_*.py"))]
        done = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE if quiet else None)
        if not report.exists():
            raise ConfigError(
                f"the conformance kit did not run (pytest exit code {done.returncode}): pip install 'octavo[test]'"
                + (f"\n{done.stdout}" if quiet else "")
            )
        data = json.loads(report.read_text())
    return Result(data | {"tiers": list(tiers), "level": level(data, tiers)})


def level(data: dict[str, Any], tiers: Sequence[str]) -> str:
    """bronze: serves correctly on any kernels; silver: own attention and linear kernels, all kernels right."""
    if not set(tiers) >= BRONZE:
        return f"not judged (it takes tiers {', '.join(sorted(BRONZE))} at least)"
    good = set(tiers) - {tier for tier, outcomes in data["by_tier"].items() if outcomes.get("failed")}
    if good >= SILVER and set(data["native"]) >= NATIVE:
        return "silver"
    return "bronze" if good >= BRONZE else "none"
