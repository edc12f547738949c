"""What the `octavo bench` commands show: progress, a table or JSON, and what every kept figure must say."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from octavo import __version__


def environment() -> dict[str, Any]:
    """What every kept figure must say: when, and with which version."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "octavo_version": __version__}


def show(figures: Mapping[str, Any], table: str, *, output_json: Path | None, as_json: bool) -> None:
    """Write the file if asked for; print JSON or the table."""
    if output_json is not None:
        output_json.write_text(json.dumps(figures, indent=2) + "\n")
    click.echo(json.dumps(figures) if as_json else table)


def seconds(value: float) -> str:
    return f"{value:.3f} s"


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


@contextmanager
def counter(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, advanced by calling what it yields; nothing when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # Drawn rarely: the bar shares this process's CPU with what is measured.
    with Progress(console=Console(stderr=True), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
