"""Examples of docs/examples made importable as pip would, without pip: their modules and their metadata in a folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"


def project_of(example: Path) -> dict[str, Any]:
    """What its pyproject.toml declares."""
    data: dict[str, Any] = tomllib.loads((example / "pyproject.toml").read_text())
    return data


def install(example: Path, site: Path) -> None:
    """Put an example into `site`: what its wheel would hold, its kernels compiled, and its entry points."""
    data = project_of(example)
    project, wheel = data["project"], data["tool"]["hatch"]["build"]["targets"]["wheel"]
    site.mkdir(exist_ok=True)
    for package in wheel.get("packages", ()):
        folder = site / Path(package).name
        shutil.copytree(example / package, folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        if (build := folder / "kernels" / "build.py").exists():
            subprocess.run([sys.executable, build], check=True)
    for module in wheel.get("include", ()):
        shutil.copy(example / module, site)
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups]
    (info / "entry_points.txt").write_text("\n".join(lines))


def modules_of(example: Path) -> set[str]:
    """Top-level modules that it brings."""
    wheel = project_of(example)["tool"]["hatch"]["build"]["targets"]["wheel"]
    return {Path(path).stem for path in (*wheel.get("packages", ()), *wheel.get("include", ()))}
