"""Flags from a file: `--config FILE` of every command that runs or measures an engine.

command line  >  environment variable  >  file  >  default

A key is a flag's name, with or without its dashes (`max-model-len`, `max_model_len`); `model` is the MODEL argument.
A list repeats a flag, a mapping gives KEY=VALUE pairs, or JSON where the flag takes JSON.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import yaml

from octavo.cli.options import Pair

READERS: Mapping[str, Callable[[str], Any]] = {
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
    ".json": json.loads,
    ".toml": tomllib.loads,
}

NOT_CONFIG = frozenset({"help", "config", "prompts"})
"""Parameters without an environment variable: texts to complete have spaces, at which a variable is split."""


class ConfigurableCommand(click.Command):
    """A command with `--config`, and an environment variable for each of its flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for param in self.params:
            if isinstance(param, click.Option) and param.name not in NOT_CONFIG and param.envvar is None:
                param.envvar = variable(param)
        self.params.append(
            click.Option(
                ["--config"],
                type=click.Path(exists=True, dir_okay=False, path_type=Path),
                envvar="OCTAVO_CONFIG",
                is_eager=True,
                expose_value=False,
                callback=use_file,
                help="Flags from this .yaml, .json or .toml file: a key is a flag's name. What the command line or "
                "an environment variable says wins.",
            )
        )


def variable(option: click.Option) -> str:
    """The environment variable of a flag: --max-model-len is OCTAVO_MAX_MODEL_LEN."""
    long = next(text for text in option.opts if text.startswith("--"))
    return "OCTAVO_" + long.removeprefix("--").replace("-", "_").upper()


def use_file(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    """Make the file's values the defaults of the command's flags."""
    if path is not None:
        ctx.default_map = {**(ctx.default_map or {}), **flags_in(path, ctx.command)}


def flags_in(path: Path, command: click.Command) -> dict[str, Any]:
    """Values by parameter name. Raises UsageError naming the file and the key."""
    known = dict(keys(command))
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    for key, value in read(path).items():
        name = str(key).replace("_", "-")
        if name not in known:
            raise click.UsageError(f"{path}: there is no flag {key!r}{nearest(name, list(known))}")
        param = known[name]
        assert param.name is not None
        if param.name in given:
            raise click.UsageError(f"{path}: {given[param.name]!r} and {key!r} are the same flag")
        given[param.name] = str(key)
        if value is not None:
            values[param.name] = as_default(value, param, f"{path}: {key}")
    return values


def read(path: Path) -> dict[Any, Any]:
    """The mapping in a file. Raises UsageError."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise click.UsageError(f"{path}: a configuration file is named {', '.join(READERS)}")
    try:
        content = reader(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:  # the parsers' errors are ValueErrors, but for YAML's
        raise click.UsageError(f"{path} cannot be read: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise click.UsageError(f"{path} must hold flags and their values, not a {type(content).__name__}")
    return content


def keys(command: click.Command) -> Iterator[tuple[str, click.Parameter]]:
    """Every name under which a file may give a parameter of the command."""
    for param in command.params:
        if param.name in ("help", "config"):
            continue
        if isinstance(param, click.Argument):
            yield str(param.name), param
        for text in param.opts:
            if text.startswith("--"):
                yield text.removeprefix("--"), param


def nearest(name: str, names: list[str]) -> str:
    """A hint at the flag that was probably meant."""
    positive = name.removeprefix("no-")
    if positive in names:
        return f": say {positive}: false"
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def as_default(value: Any, param: click.Parameter, where: str) -> Any:
    """A value as click takes it for a default. Raises UsageError where its kind does not fit."""
    if isinstance(value, dict) and isinstance(param.type, Pair):
        return [(str(key), as_text(item)) for key, item in value.items()]
    if isinstance(param, click.Option) and param.is_flag:
        if not isinstance(value, bool):
            raise click.UsageError(f"{where} must be true or false, not {value!r}")
        return value
    if getattr(param, "multiple", False):
        items = value if isinstance(value, list) else [value]
        return [as_text(item) for item in items]
    return as_text(value)


def as_text(value: Any) -> str:
    """A value as it would stand on the command line."""
    if isinstance(value, str):
        return value
    # JSON for what takes JSON; numbers and booleans look the same in it.
    return json.dumps(value, default=str)
