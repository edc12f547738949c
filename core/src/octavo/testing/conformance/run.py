"""Runs the kit in a fresh process and judges what came back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, OctavoError, PlatformNotFoundError
from octavo.testing.conformance.journal import Journal, ending
from octavo.testing.conformance.levels import level, missing_for_next, native, slower
from octavo.testing.conformance.settings import read_settings

TIERS = ("0", "1", "2", "3", "4", "5", "6")
FOLDER = Path(__file__).parent
EARLY = (2, 3, 4)
"""Exit codes of pytest: interrupted (by files that cannot be imported, too), an error of its own, wrongly called."""

KERNELS = frozenset({"2", "3", "4"})
"""Tiers whose tests know nothing of each other, so that several can run at once."""


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
        own = ", ".join(data["native"]) or "none proved"
        packs = ", ".join(f"{name} ({its['pack']})" for name, its in data["classes"].items() if its["pack"])
        lines = [
            f"{data['platform']}: {counts or 'nothing ran'}; level {data['level']}"
            + (f", {data['proof']}" if data["proof"] else ""),
        ]
        if data["no_device"]:
            idle = [tier for tier in data["tiers"] if not data["by_tier"].get(tier, {}).keys() - {"skipped"}]
            lines += [f"without a device: {data['no_device']}"]
            lines += [f"not run, as it needs one: tier {', '.join(idle)}"] if idle else []
        else:
            lines += [f"own kernels: {own} ({data['op_coverage']:.0f}% of the ops)"]
            lines += [f"of kernel packs: {packs}"] if packs else []
        slow = ", ".join(
            f"{entry['op']} {entry['provider']} " + (f"{entry['ratio']}x" if "ratio" in entry else entry["error"])
            for entry in data["slower_than_reference"]
        )
        lines += [f"slower than the reference on these small samples: {slow}"] if slow else []
        lines += [f"for the next level: {'; '.join(data['missing'])}"] if data["missing"] else []
        wider = [
            f"{of}.{dtype} = {error:g}"
            for of, by_dtype in data["tolerances"].items()
            for dtype, error in by_dtype.items()
        ]
        lines += [f"{len(wider)} tolerances of its own: {', '.join(wider)}"] if wider else []
        changed = ", ".join(data["changed_by_backend"])
        lines += [f"changed by the packages that give torch the device: {changed}"] if changed else []
        lines += [f"FAILED {test}: {message}" for test, message in data["failures"].items()]
        lines += [f"expected to fail: {test}: {reason}" for test, reason in data["xfails"].items()]
        lines += [f"left out by conformance.toml: {test}: {reason}" for test, reason in data["excused"].items()]
        lines += [f"conformance.toml: {pattern!r} fits no test" for pattern in data["unused_patterns"]]
        return "\n".join(lines)


def run(
    name: str,
    *,
    tiers: Sequence[str] = TIERS,
    config: Path | None = None,
    quiet: bool = False,
    jobs: int = 1,
    no_device: bool = False,
) -> Result:
    """Run `tiers` on platform `name`. config: conformance.toml, by default the one in the current folder, if any.

    jobs: processes that share the tests of kernels, behind all others; each compiles what its own need. Behind them,
    one times the kernels, alone.
    no_device: run only what needs no device, whether there is one or not.
    A fresh process, so that hygiene is judged from a clean start. Raises ConfigError if pytest is not installed or
    `config` is wrong, PlatformNotFoundError if the platform is not installed or its device, wanted, is not here, and
    OctavoError if it ends the process outside of tests, as when it is imported.
    """
    if config is None and Path("conformance.toml").exists():
        config = Path("conformance.toml")
    if find_spec("pytest") is None:
        raise ConfigError("the conformance kit runs on pytest, which is not installed: pip install 'octavo[test]'")
    read_settings(config)  # the process reads it again; here what is wrong in it is one line
    process = partial(run_share, name, config=config, no_device=no_device)
    if jobs == 1:
        data = process(tiers, quiet=quiet)
    else:
        kernels = [tier for tier in tiers if tier in KERNELS]
        others = [tier for tier in tiers if tier not in KERNELS]
        parts = [process(others, quiet=quiet)] if others else []
        with ThreadPoolExecutor(jobs) as pool:
            shares = [
                pool.submit(process, kernels, quiet=True, share=f"{i}/{jobs}", timing="no")
                for i in range(jobs if kernels else 0)
            ]
            parts += [share.result() for share in shares]
        if kernels and not no_device:
            failed = [test for part in parts for kind in ("failures", "xfails", "excused") for test in part[kind]]
            parts.append(process(kernels, quiet=True, timing="only", failed=failed))
        data = merged(parts)
    data |= {"tiers": list(tiers), "level": level(data, tiers)}
    return Result(data | {"missing": missing_for_next(data)})


def run_share(
    name: str,
    tiers: Sequence[str],
    *,
    config: Path | None,
    quiet: bool,
    no_device: bool,
    share: str = "0/1",
    timing: str = "also",
    failed: Sequence[str] = (),
) -> dict[str, Any]:
    """The report of one process. failed: tests of others, whose kernels it does not time. Raises as `run`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "conformance.json")
        command = [sys.executable, "-m", "pytest", "-c", str(FOLDER / "pytest.ini"), "--rootdir", str(FOLDER)]
        command += ["-p", "no:cacheprovider", "--import-mode=importlib", "-q", "--tb=short"]
        command += [f"--platform={name}", f"--report={report}", f"--share={share}", f"--timing={timing}"]
        command += [f"--settings={config.resolve()}"] if config else []
        command += ["--no-device"] if no_device else []
        command += [f"--failed={test}" for test in failed]
        command += [str(path) for tier in tiers for path in sorted(FOLDER.glob(f"test_t{tier}_*.py"))]
        ended = run_until_reported(command, report, quiet=quiet)
        data: dict[str, Any] = json.loads(report.read_text())
    if ended in EARLY:
        data["failures"]["the kit itself"] = f"pytest ended early: {ending(ended)}"
    if reason := data.get("nothing_to_check"):
        raise PlatformNotFoundError(reason, platform=name)
    return data


def run_until_reported(command: Sequence[str], report: Path, *, quiet: bool) -> int:
    """Run the process until it has written its report, again where a test ended it: it goes on behind that test.

    Returns its exit code. Raises OctavoError if it ends outside of tests.
    """
    # Plugins of pytest that happen to be installed take seconds to load, and some would change the order of tests.
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    while True:
        with report.with_suffix(".output").open("w+") as output:
            ended = subprocess.run(command, check=False, env=alone, stdout=output if quiet else None).returncode
            if report.exists():
                return ended
            if not Journal(report.with_suffix(".journal")).bury(ended):
                output.seek(0)
                said = f"the conformance kit ended outside its tests: {ending(ended)}\n{output.read()}"
                raise OctavoError(said.rstrip())


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report of several about the same platform."""
    data = dict(parts[-1])
    data["counts"] = dict(sum((Counter(part["counts"]) for part in parts), Counter()))
    by_tier: dict[str, Counter[str]] = {}
    for part in parts:
        for tier, outcomes in part["by_tier"].items():
            by_tier.setdefault(tier, Counter()).update(outcomes)
    data["by_tier"] = {tier: dict(outcomes) for tier, outcomes in by_tier.items()}
    tiers = {tier for part in parts for tier in part["seconds"]}
    data["seconds"] = {tier: round(sum(part["seconds"].get(tier, 0.0) for part in parts), 1) for tier in sorted(tiers)}
    for field in ("failures", "xfails", "excused", "skipped"):
        data[field] = {test: message for part in parts for test, message in part[field].items()}
    data["classes"] = {
        name: its | {"proved": any(part["classes"].get(name, its)["proved"] for part in parts)}
        for name, its in data["classes"].items()
    }
    data["native"] = native(data["classes"])
    # A pattern may fit a test of one tier only.
    data["changed_by_backend"] = sorted({name for part in parts for name in part["changed_by_backend"]})
    unused = [set(part["unused_patterns"]) for part in parts]
    data["unused_patterns"] = sorted(set.intersection(*unused))
    data["timings"] = [entry for part in parts for entry in part["timings"]]
    data["slower_than_reference"] = slower(data["timings"])
    return data
