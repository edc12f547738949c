"""The flags that the `octavo bench` commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from octavo.bench.workload import DATASETS, RANDOM_LENGTHS

COUNT = click.IntRange(min=1)
NATURAL = click.IntRange(min=0)


def existing_parent(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Learnt before the measurement, not after it."""
    if value is not None and not value.absolute().parent.is_dir():
        raise click.BadParameter(f"the folder {value.absolute().parent} does not exist")
    return value


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with --output-json and --json."""
    command = click.option("--json", "as_json", is_flag=True, help="Print one line of JSON instead of the table.")(
        command
    )
    return click.option(
        "--output-json",
        type=click.Path(dir_okay=False, writable=True, path_type=Path),
        callback=existing_parent,
        help="Also write the figures to this file.",
    )(command)


def workload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with the flags that say which requests are sent."""
    decorators = [
        click.option("--num-prompts", type=COUNT, default=1000, show_default=True, help="Number of requests."),
        click.option(
            "--dataset-name",
            type=click.Choice(DATASETS),
            default="random",
            show_default=True,
            help="random: all of one length. skewed: prompts of 32-1024 and outputs of 32-512 tokens, log-uniform. "
            "sharegpt: conversations of --dataset-path.",
        ),
        click.option(
            "--dataset-path",
            type=click.Path(dir_okay=False, path_type=Path),
            help='For sharegpt: a JSON list of {"conversations": [{"value": ...}, ...]}.',
        ),
        click.option("--input-len", type=COUNT, help=f"Tokens of a random prompt.  [default: {RANDOM_LENGTHS[0]}]"),
        click.option(
            "--output-len", type=COUNT, help=f"Tokens of an answer, for all but skewed.  [default: {RANDOM_LENGTHS[1]}]"
        ),
    ]
    for decorate in reversed(decorators):
        command = decorate(command)
    return command
