"""`octavo`: the command line. Each subcommand lives in the module of its name and is imported when it is used."""

from __future__ import annotations

import importlib
import os
from typing import Any

import click

from octavo import __version__
from octavo.errors import OctavoError

COMMANDS = {
    "serve": "Serve a model over HTTP (OpenAI-compatible).",
    "generate": "Complete a prompt and print the text.",
    "chat": "Talk with a model in the terminal.",
    "run-batch": "Answer a file of requests (OpenAI's batch format).",
    "bench": "Measure latency, throughput, or a running server.",
    "explain": "Show which kernel serves each op of a model, and why.",
    "plugin": "List, check and begin hardware platforms.",
}
"""Subcommand -> its line of help. Command X-Y is the click command `X_Y` of `octavo.cli.X_Y`."""


class LazyGroup(click.Group):
    """A group that imports a subcommand only to run it, and turns Octavo's own errors into one line on stderr."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(f"octavo.cli.{name}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OctavoError as error:
            if os.environ.get("OCTAVO_DEBUG"):
                raise
            raise click.ClickException(str(error)) from None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="octavo")
def main() -> None:
    """LLM inference on any hardware that has a platform plugin. OCTAVO_DEBUG=1 shows tracebacks."""
