"""`octavo plugin`: what is installed, whether a platform keeps the contract, and the beginning of a new one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from octavo.cli.table import columns, size
from octavo.discovery import PlatformReport, survey, survey_additions
from octavo.plugin.data import DeviceDesc


@click.group()
def plugin() -> None:
    """List, check and begin hardware platforms."""


@plugin.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_plugins(as_json: bool) -> None:
    """Every installed plugin: its state, and why it cannot be used if it cannot.

    Platforms, kernel packs and extensions.
    """
    reports = [*survey(), *survey_additions()]
    if as_json:
        click.echo(json.dumps([asdict(report) for report in reports], indent=2))
        return
    rows = [
        # An error may come in several lines; a plugin's row is one.
        (r.kind, r.name, r.dist, r.version, r.state, where(r) or "-", " ".join(r.reason.split()) or "-")
        for r in reports
    ]
    click.echo(columns(("KIND", "NAME", "DISTRIBUTION", "VERSION", "STATE", "DEVICES", "REASON"), rows))


@plugin.command()
@click.argument("name")
def new(name: str) -> None:
    """Begin a plugin for platform NAME in the folder ./octavo-NAME.

    It installs and passes the kit as it is, with its tensors on the CPU.
    """
    from octavo.cli.plugin_new import scaffold

    folder = scaffold(name, Path())
    click.echo(
        f"wrote {folder}. Next:\n"
        f"  cd {folder}\n"
        '  pip install -e ".[test]"\n'
        f"  octavo plugin check {name}\n"
        "Its README says what to fill in first."
    )


def in_a_folder(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file that could not be written once the kit has run."""
    if path is not None and not path.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {str(path.parent)!r}")
    return path


def to_write(name: str, *, help: str) -> Callable[[Any], Any]:
    """An option that names a file to write."""
    kind = click.Path(dir_okay=False, writable=True, path_type=Path)
    return click.option(name, type=kind, callback=in_a_folder, help=help)


@plugin.command()
@click.argument("name")
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    help="Tiers to run, for example 0,1,2; may be given several times. By default all: 0 to 6.",
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="conformance.toml; by default the one in the current folder, if any.",
)
@to_write("--report", help="Where to write conformance.json.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes that share the tests of kernels (tiers 2 to 4): for a device whose compiler they wait for.",
)
@click.option(
    "--no-device",
    is_flag=True,
    help="Run only what needs no device, for a machine that has none; it reaches no level.",
)
@to_write("--html", help="Where to write the report as a page.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON and nothing else.")
def check(
    name: str,
    tiers: tuple[str, ...],
    config: Path | None,
    report: Path | None,
    jobs: int,
    no_device: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Run the conformance kit on platform NAME. Exit code 1 if it fails."""
    from octavo.testing.conformance.run import TIERS, run

    asked = [part.strip() for given in tiers for part in given.split(",") if part.strip()]
    if unknown := [part for part in asked if part not in TIERS]:
        raise click.BadParameter(f"{', '.join(unknown)} (tiers are {', '.join(TIERS)})", param_hint="--tier")
    chosen = [tier for tier in TIERS if tier in asked] or list(TIERS)
    result = run(name, tiers=chosen, config=config, quiet=as_json, jobs=jobs, no_device=no_device)
    if report is not None:
        report.write_text(json.dumps(result.data, indent=2) + "\n")
    if html is not None:
        from octavo.testing.conformance.page import page

        html.write_text(page(result.data), encoding="utf-8")
    click.echo(json.dumps(result.data, indent=2) if as_json else result.summary())
    sys.exit(0 if result.passed else 1)


def where(report: PlatformReport) -> str:
    """The devices of a platform, or the platforms of a kernel pack, in a few words."""
    if report.platforms:
        return f"for {', '.join(report.platforms)}"
    return ", ".join(described(device) for device in report.devices)


def described(desc: DeviceDesc) -> str:
    """A device by its name, its memory and its place on the bus."""
    facts = [size(desc.memory)] if desc.memory else []
    facts += [desc.pci] if desc.pci else []
    return f"{desc.name} ({', '.join(facts)})" if facts else desc.name
