"""`octavo plugin new`: what it writes installs, is found and passes the kit; what it cannot write it refuses."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from octavo.cli import main
from octavo.cli.plugin_new import FILES, scaffold
from octavo.errors import ConfigError
from octavo.plugin.version import PLUGIN_API


def imports(path: Path) -> set[str]:
    """The modules that a file imports, inside functions too."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def test_every_file_is_written_and_can_be_read(tmp_path: Path) -> None:
    folder = scaffold("fast-chip", tmp_path)
    assert folder == tmp_path / "octavo-fast-chip"
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert written == {path.replace("$module", "octavo_fast_chip") for path in FILES}
    assert not [path for path in folder.rglob("*") if path.is_file() and "$" in path.read_text()]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "octavo-fast-chip"
    assert project["entry-points"]["octavo.platforms"] == {"fast-chip": "octavo_fast_chip"}
    assert not [need for need in project["dependencies"] if "==" in need]
    assert tomllib.loads((folder / "conformance.toml").read_text()) == {}
    steps = yaml.safe_load((folder / ".github/workflows/check.yml").read_text())["jobs"]["check"]["steps"]
    assert any("octavo plugin check fast-chip" in step.get("run", "") for step in steps)
    source = (folder / "octavo_fast_chip/__init__.py").read_text()
    assert f'api="{PLUGIN_API[0]}.{PLUGIN_API[1]}"' in source
    outside = set.union(*map(imports, folder.rglob("*.py")))
    # What else core holds may move from one release to the next.
    assert {module for module in outside if module.startswith("octavo.")} == {"octavo.plugin", "octavo.plugin.torch"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Acme", "use lower-case letters"),
        ("9lives", "beginning with a letter"),
        ("a_b", "single hyphens"),
        ("a--b", "single hyphens"),
        ("../up", "use lower-case letters"),
        ("", "use lower-case letters"),
        ("octavo-acme", "the distribution becomes octavo-acme"),
        ("auto", "reserved"),
        ("cpu", "octavo-cpu provides it"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scaffold(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_name_whose_package_is_installed_already_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "octavo_fast_chip.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="its package would be octavo_fast_chip, which is installed already"):
        scaffold("fast-chip", tmp_path)


@pytest.mark.parametrize("name", ["class", "none", "x", "a1-b2"])
def test_a_word_of_python_is_a_name_like_any_other(tmp_path: Path, name: str) -> None:
    package = scaffold(name, tmp_path) / f"octavo_{name.replace('-', '_')}"
    ast.parse((package / "__init__.py").read_text())


def test_a_folder_that_is_there_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "octavo-demo").mkdir()
    result = CliRunner().invoke(main, ["plugin", "new", "demo"])
    assert result.exit_code == 1
    assert "octavo-demo exists already" in result.output
    assert list((tmp_path / "octavo-demo").iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"octavo-demo/pyproject.toml cannot be written: Not a directory"):
        scaffold("demo", tmp_path / "file")


def test_the_command_says_what_to_do_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["plugin", "new", "demo"])
    assert result.exit_code == 0
    assert "cd octavo-demo" in result.output
    assert "octavo plugin check demo" in result.output


@pytest.mark.slow
def test_what_is_written_installs_is_found_and_reaches_bronze(tmp_path: Path) -> None:
    folder, installed = scaffold("demo", tmp_path), tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", installed, folder]
    subprocess.run(pip, check=True, timeout=300)
    env = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    octavo = [sys.executable, "-c", "from octavo.cli import main; main()"]

    listed = subprocess.run([*octavo, "plugin", "list", "--json"], env=env, check=True, capture_output=True, text=True)
    [found] = [entry for entry in json.loads(listed.stdout) if entry["name"] == "demo"]
    assert (found["state"], found["dist"], found["version"]) == ("ready", "octavo-demo", "0.1.0")

    subprocess.run([sys.executable, "-m", "pytest", "-q", "tests"], cwd=folder, env=env, check=True, timeout=100)

    command = [
        *octavo,
        "plugin",
        "check",
        "demo",
        "--tier",
        "0",
        "--tier",
        "1,6",
        "--report",
        "c.json",
        "--html",
        "c.html",
    ]
    checked = subprocess.run(command, cwd=folder, env=env, check=False, capture_output=True, text=True, timeout=280)
    assert checked.returncode == 0, checked.stdout
    data = json.loads((folder / "c.json").read_text())
    assert (data["level"], data["failures"]) == ("bronze", {})
    assert "bronze · proof not labelled" in (folder / "c.html").read_text()
