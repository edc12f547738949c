"""Tier 0 looks at the clock, and at the words of a claim."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.plugin import PlatformCaps
from octavo.testing.conformance import test_t0_hygiene
from octavo.testing.conformance.settings import Settings

SLEEPS = """
import pathlib, time
from octavo.plugin import PlatformInfo, Probe, hookimpl

@hookimpl
def platform_info():
    return PlatformInfo(name="sleepy", api="1.0", version="1", device_type="cpu")

@hookimpl
def platform_probe():
    with open(pathlib.Path(__file__).with_suffix(".probed"), "a") as log:
        log.write("x")
    time.sleep(SECONDS)
    return Probe(available=True)

make_device = hookimpl(lambda: None)
"""


@pytest.mark.parametrize(("seconds", "limit", "num_processes"), [(0.5, 0.4, 4), (0.0, 30.0, 1)])
def test_a_probe_that_sleeps_takes_time_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, limit: float, num_processes: int
) -> None:
    (tmp_path / "sleepy.py").write_text(SLEEPS.replace("SECONDS", str(seconds)))
    added = {"PYTHONPATH": str(tmp_path), "OCTAVO_EXTRA_PLATFORMS": "sleepy=sleepy"}
    monkeypatch.setattr(test_t0_hygiene, "ENVIRONMENT", os.environ | added)
    subject: Any = SimpleNamespace(name="sleepy", settings=Settings(max_seconds={"probe": limit}))
    opened = test_t0_hygiene.open_afresh(subject)
    if seconds < limit:
        test_t0_hygiene.test_probe_is_quick(subject, opened)
    else:
        with pytest.raises(AssertionError, match=r"import plus probe took \d\.\d\d s of 0\.4"):
            test_t0_hygiene.test_probe_is_quick(subject, opened)
    probes = (tmp_path / "sleepy.probed").read_text()
    assert len(probes) == 2 * num_processes, "one quick process is enough, and no slow one is held against it at once"


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ({"features": frozenset({"prefix_cache", "time_travel"})}, r"features: of .*structured, not \['time_travel'\]"),
        ({"graph": "record"}, "graph: of none, capture, aot, not 'record'"),
        ({"shapes": "static"}, "shapes: of dynamic, bucketed, not 'static'"),
        ({}, ""),
    ],
)
def test_a_claim_in_words_that_core_does_not_know_is_caught(claim: dict[str, Any], message: str) -> None:
    subject: Any = SimpleNamespace(platform=SimpleNamespace(caps=PlatformCaps(**claim)))
    if message:
        with pytest.raises(AssertionError, match=message):
            test_t0_hygiene.test_capabilities_are_well_formed(subject)
    else:
        test_t0_hygiene.test_capabilities_are_well_formed(subject)
