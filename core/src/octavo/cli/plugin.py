"""`octavo plugin`: which platforms are installed, and whether one keeps the plugin contract."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from octavo.cli.table import columns, size
from octavo.discovery import PlatformReport, survey


@click.group()
def plugin() -> None:
    """List and check hardware platforms."""


@plugin.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_platforms(as_json: bool) -> None:
    """Every installed platform: its state, and why it cannot be used if it cannot."""
    reports = survey()
    if as_json:
        click.echo(json.dumps([asdict(report) for report in reports], indent=2))
        return
    rows = [(r.name, r.dist, r.version, r.state, devices(r) or "-", r.reason or "-") for r in reports]
    click.echo(columns(("NAME", "DISTRIBUTION", "VERSION", "STATE", "DEVICES", "REASON"), rows))


@plugin.command()
@click.argument("name")
@click.option("--tier", default="", help="Tiers to run, for example 0,1,2; by default all: 0, 1, 2, 3, 6.")
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="conformance.toml; by default the one in the current folder, if any.",
)
@click.option("--report", type=click.Path(path_type=Path), help="Where to write conformance.json.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes that share the tests of kernels (tiers 2 and 3): for a device whose compiler they wait for.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON and nothing else.")
def check(name: str, tier: str, config: Path | None, report: Path | None, jobs: int, as_json: bool) -> None:
    """Run the conformance kit on platform NAME. Exit code 1 if it fails."""
    from octavo.testing.conformance.run import TIERS, run

    chosen = [part.strip() for part in tier.split(",") if part.strip()] or list(TIERS)
    if unknown := [part for part in chosen if part not in TIERS]:
        raise click.BadParameter(f"{', '.join(unknown)} (tiers are {', '.join(TIERS)})", param_hint="--tier")
    result = run(name, tiers=chosen, config=config, quiet=as_json, jobs=jobs)
    if report is not None:
        report.write_text(json.dumps(result.data, indent=2) + "\n")
    click.echo(json.dumps(result.data, indent=2) if as_json else result.summary())
    sys.exit(0 if result.passed else 1)


def devices(report: PlatformReport) -> str:
    """The devices of a platform in a few words."""
    return ", ".join(f"{d.name} ({size(d.memory)})" if d.memory else d.name for d in report.devices)
