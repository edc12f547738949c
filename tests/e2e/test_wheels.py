"""The built wheels, in an environment that holds nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"


@pytest.mark.dist
@pytest.mark.timeout(1500)
def test_wheels_install_into_an_empty_environment_and_find_the_cpu_platform(tmp_path: Path) -> None:
    wheels = sorted(DIST.glob("*.whl"))
    platforms = {f"octavo_{folder.parent.name}" for folder in ROOT.glob("plugins/*/pyproject.toml")}
    assert {w.name.split("-")[0] for w in wheels} == {"octavo", *platforms}, "run `make dist` first"
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    constraints = ROOT / ".ci" / "constraints.txt"
    # Twice quiet: of a failure, only its errors are shown.
    install = [python, "-m", "pip", "install", "-qq", "--find-links", DIST, "--constraint", constraints]
    subprocess.run([*install, "octavo[cpu]"], check=True, timeout=1400)
    command = [python.with_name("octavo"), "plugin", "list", "--json"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    found = {entry["name"]: entry for entry in json.loads(listing.stdout)}
    assert found["cpu"]["state"] == "ready"
    assert found["cpu"]["dist"] == "octavo-cpu"
    assert sys.prefix not in listing.stdout
