"""What deploy/ says of octavo is so: every flag and variable in it exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.cli.options import config_from
from octavo.cli.serve import DEFAULTS, serve
from octavo.server.options import ServerOptions

DEPLOY = Path(__file__).parents[3] / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
TEXTS = [path for path in FILES if path.suffix != ".json"]

OTHERS = {
    "Dockerfile": "build-arg secret mount no-deps wheel-dir constraint no-install-recommends uid user-group home-dir "
    "no-create-home from interval timeout retries start-period",
    "octavo.service": "system home-dir shell",
    "NOTES.txt": "namespace",
    "README.md": "build-arg secret gpus shm-size rm install set",
}
"""Flags of other programs, by the file that has them."""


def name_of(path: Path) -> str:
    return str(path.relative_to(DEPLOY))


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_every_flag_is_one_of_octavo_serve(path: Path, flags: set[str]) -> None:
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", path.read_text()))
    assert used - {f"--{name}" for name in OTHERS.get(path.name, "").split()} <= flags


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_variable_is_one_of_octavo_serve(path: Path, variables: set[str]) -> None:
    assert set(re.findall(r"OCTAVO_[A-Z0-9_]+", path.read_text())) <= variables


def test_the_flags_that_are_used_are_many_enough_for_the_tests_above_to_mean_something(
    flags: set[str], variables: set[str]
) -> None:
    text = "\n".join(path.read_text() for path in TEXTS)
    assert sum(bool(re.search(rf"{flag}\b", text)) for flag in flags) > 10
    assert sum(variable in text for variable in variables) > 10


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_host_is_named_but_examples_and_this_machine(path: Path) -> None:
    if path.name == "values.schema.json":
        return  # names its JSON Schema draft
    hosts = re.findall(r"https?://([\w.-]+)", path.read_text())
    assert set(hosts) <= {"127.0.0.1", "octavo"}  # octavo: nginx's upstream


def test_the_units_variables_start_a_server_that_drains_before_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (DEPLOY / "systemd" / "octavo.env").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    chosen = serve.make_context("serve", []).params
    options = ServerOptions(**{name: chosen.pop(name) for name in DEFAULTS})
    config = config_from(chosen)
    assert (config.model.model, config.platform.name) == ("/var/lib/octavo/models/model", "cpu")
    assert options.access_log
    unit = (DEPLOY / "systemd" / "octavo.service").read_text()
    stop = int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0])
    assert stop >= options.shutdown_timeout + 15
