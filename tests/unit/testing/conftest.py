"""Bad platforms on demand, for the tests of the conformance kit."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.testing.conformance.run import Result, run

BASE = """
import os
from octavo.plugin import (
    BatchKey, PlatformCaps, PlatformInfo, Probe, YES, hookimpl,
)

API = "1.0"

@hookimpl
def platform_info():
    return PlatformInfo(name="bad", api=API, version="1", device_type="cpu")

@hookimpl
def platform_probe():
    return Probe(available=True, score=50)

@hookimpl
def make_device(local_rank):
    from octavo.plugin import MemInfo
    from octavo.plugin.torch import TorchDevice
    return TorchDevice("cpu", local_rank, memory=lambda: MemInfo(total=1 << 30, free=1 << 30))
"""

Install = Callable[..., None]
Check = Callable[..., Result]
_numbers = itertools.count()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make the base platform, with some source appended or replaced, the installed platform "bad" of new processes."""

    def go(extra: str = "", *, replace: tuple[str, str] = ("", "")) -> None:
        module = f"bad_platform_{next(_numbers)}"
        source = BASE + textwrap.dedent(extra)
        (tmp_path / f"{module}.py").write_text(source.replace(*replace) if replace[0] else source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", f"bad={module}")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")

    return go


@pytest.fixture
def check(install: Install, tmp_path: Path) -> Check:
    """Run tiers of the kit on the base platform with some source appended or replaced."""

    def go(
        extra: str = "",
        *,
        tiers: str,
        replace: tuple[str, str] = ("", ""),
        settings: str = "",
        no_device: bool = False,
        jobs: int = 1,
    ) -> Result:
        install(extra, replace=replace)
        config = tmp_path / "conformance.toml" if settings else None
        if config is not None:
            config.write_text(settings)
        return run("bad", tiers=tiers.split(","), config=config, quiet=True, jobs=jobs, no_device=no_device)

    return go
