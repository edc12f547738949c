"""`--config`: every flag by its name, in the middle between environment and default; wrong keys are errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from octavo.cli.bench import bench
from octavo.cli.config_file import NOT_CONFIG, ConfigurableCommand, keys
from octavo.cli.generate import generate
from octavo.cli.options import config_from, engine_options
from octavo.cli.serve import serve
from octavo.config import EngineConfig

COMMANDS = [serve, generate, *bench.commands.values()]


def run(folder: Path, content: str, *arguments: str, name: str = "octavo.yaml", **env: str) -> tuple[Any, Result]:
    """What a command sees of a file, and the result."""
    file = folder / name
    file.write_text(content)
    seen: list[tuple[int, EngineConfig]] = []

    @click.command(cls=ConfigurableCommand)
    @click.option("--port", type=click.IntRange(0, 65535), default=8000)
    @engine_options
    def command(port: int, **flags: Any) -> None:
        seen.append((port, config_from(flags)))

    result = CliRunner().invoke(command, ["--config", str(file), *arguments], env=env)
    return (seen[0] if seen else None), result


VALUES = {
    "model": "there",
    "port": 9000,
    "max-model-len": "4K",
    "gpu_memory_utilization": 0.5,
    "enable-prefix-caching": False,
    "strict": True,
    "served-model-name": ["x", "y"],
    "platform-opt": {"a": "b", "n": 2},
    "kernel": ["rms_norm=fast"],
    "dtype": None,
}


@pytest.mark.parametrize("kind", ["yaml", "json", "toml"])
def test_each_format_sets_flags_of_every_kind(tmp_path, kind) -> None:
    if kind == "toml":
        pairs = {key: value for key, value in VALUES.items() if value is not None and not isinstance(value, dict)}
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in pairs.items())
        text += '[platform-opt]\na = "b"\nn = 2\n'
    else:
        text = json.dumps(VALUES)  # YAML is a superset of JSON
    seen, result = run(tmp_path, text, name=f"octavo.{kind}")
    assert result.exit_code == 0, result.output
    port, config = seen
    assert (port, config.model.model, config.model.max_model_len) == (9000, "there", 4096)
    assert config.cache.memory_utilization == 0.5
    assert not config.cache.enable_prefix_caching
    assert config.platform.strict
    assert config.model.served_model_name == ("x", "y")
    assert config.platform.options == {"a": "b", "n": "2"}
    assert config.platform.kernels == (("rms_norm", "fast"),)
    assert "model.dtype" not in config.user_set


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path) -> None:
    text = "max-num-seqs: 1\nport: 1\nblock-size: 1\n"
    (port, config), _ = run(tmp_path, text, "--port", "3", OCTAVO_PORT="2", OCTAVO_MAX_NUM_SEQS="2")
    assert (port, config.scheduler.max_num_seqs, config.cache.block_size) == (3, 2, 1)


def test_a_file_does_not_make_a_default_count_as_set(tmp_path) -> None:
    (_, config), _ = run(tmp_path, "")
    assert config == EngineConfig()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-modle-len: 4\n", "there is no flag 'max-modle-len'; did you mean 'max-model-len'?"),
        ("no-enable-prefix-caching: true\n", "say enable-prefix-caching: false"),
        ("zzzz: 1\n", "there is no flag 'zzzz'"),
        ("config: other.yaml\n", "there is no flag 'config'"),
        ("memory-utilization: 0.5\ngpu-memory-utilization: 0.6\n", "are the same flag"),
        ("- port\n", "must hold flags and their values, not a list"),
        ("port: [unclosed\n", "cannot be read"),
        ("port: lots\n", "'--port'"),
        ("port: 70000\n", "'--port'"),
        ("strict: maybe\n", "strict must be true or false, not 'maybe'"),
        ("max-num-seqs: 2.5\n", "not a whole number"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_key(tmp_path, text, said) -> None:
    _, result = run(tmp_path, text)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_a_file_that_is_missing_or_of_another_kind_is_refused(tmp_path) -> None:
    assert CliRunner().invoke(serve, ["--config", str(tmp_path / "no.yaml")]).exit_code == 2
    _, result = run(tmp_path, "port: 1", name="octavo.ini")
    assert "named .yaml" in result.output


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_flag_has_a_variable_of_its_name_and_a_key_of_its_own(command) -> None:
    options = [p for p in command.params if isinstance(p, click.Option) and p.name not in NOT_CONFIG]
    assert len(options) > 5
    for option in options:
        names = ["OCTAVO_" + text.removeprefix("--").replace("-", "_").upper() for text in option.opts]
        assert option.envvar in names or option.envvar == "OPENAI_API_KEY", option.name
    named = [name for name, _ in keys(command)]
    assert len(set(named)) == len(named)
