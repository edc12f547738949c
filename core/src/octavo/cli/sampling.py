"""The sampling flags that `generate` and `chat` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from octavo.sampling.params import SamplingParams
from octavo.structured.spec import StructuredOutputs

FLAGS: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "Randomness; 0 always takes the most likely token."),
    ("top_p", float, "Sample from the most likely tokens that together have this probability."),
    ("top_k", int, "Sample from this many most likely tokens; 0 is all."),
    ("min_p", float, "Leave out tokens less likely than this share of the most likely one."),
    ("presence_penalty", float, "Make tokens that were generated before less likely, -2 to 2."),
    ("frequency_penalty", float, "The same, by how often, -2 to 2."),
    ("repetition_penalty", float, "Divide the logits of tokens in prompt and answer by this."),
    ("max_tokens", int, "Longest answer in tokens; by default all the room left."),
)

SHAPES: tuple[tuple[str, str, str], ...] = (
    ("json_schema", "json", "Answer with JSON of this schema: its text, or @FILE."),
    ("regex", "regex", "Answer with a text that this regular expression matches as a whole."),
    ("grammar", "grammar", "Answer with a text of this grammar, EBNF or Lark: its text, or @FILE."),
)
"""Flag, field of StructuredOutputs, help."""


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with the sampling flags. What is left out comes from the model's generation_config."""
    command = click.option("--stop", multiple=True, help="End the answer at this text. Repeat for several.")(command)
    for name, _, text in reversed(SHAPES):
        command = click.option(f"--{name.replace('_', '-')}", name, default=None, help=text)(command)
    for name, kind, text in reversed(FLAGS):
        command = click.option(f"--{name.replace('_', '-')}", name, type=kind, default=None, help=text)(command)
    return command


def take_sampling(flags: dict[str, Any]) -> dict[str, Any]:
    """Remove the sampling flags from a command's keyword arguments; returns those that were given."""
    taken = {name: flags.pop(name) for name, _, _ in FLAGS}
    taken["stop"] = flags.pop("stop")
    shape = {field: flags.pop(name) for name, field, _ in SHAPES}
    given: dict[str, Any] = {
        field: value if field == "regex" else _text_or_file(value)
        for field, value in shape.items()
        if value is not None
    }
    if given:
        taken["structured_outputs"] = StructuredOutputs(**given)
    return {name: value for name, value in taken.items() if value is not None and value != ()}


def _text_or_file(value: str) -> str:
    """The text, or that of the file that `@` names."""
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{value[1:]} cannot be read: {error}") from error


def with_defaults(default: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """The model's defaults under what was given. Without max_tokens an answer may take all the room left."""
    return msgspec.structs.replace(default, **{"max_tokens": None, **given})
