"""Engine flags: every config field has one, and nothing is set that was not given."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from octavo.cli import COMMANDS, main
from octavo.cli.options import HELP, INTERNAL, config_from, engine_options, engine_parameters, flat_name
from octavo.config import EngineConfig, dotted_fields
from octavo.errors import ConfigError


def parse(*arguments: str, env: dict[str, str] | None = None) -> tuple[EngineConfig, Result]:
    """The config that a command makes of its arguments."""
    seen: list[EngineConfig] = []

    @click.command()
    @click.option("--port", default=1)
    @engine_options
    def command(port: int, **flags: Any) -> None:
        seen.append(config_from(flags))

    result = CliRunner().invoke(command, arguments, env=env)
    return (seen[0] if seen else EngineConfig()), result


def test_every_config_field_has_a_flag_with_help() -> None:
    wanted = set(dotted_fields(EngineConfig())) - INTERNAL
    assert set(HELP) == wanted
    names = {parameter.name for parameter in engine_parameters()}
    assert names == {flat_name(dotted) for dotted in wanted}


USUAL = """
--dtype --max-model-len --max-num-seqs --max-num-batched-tokens --gpu-memory-utilization --memory-utilization
--kv-cache-dtype --block-size --enable-prefix-caching --no-enable-prefix-caching --enable-chunked-prefill
--no-enable-chunked-prefill --scheduling-policy --enforce-eager --platform --platform-opt --kernel --attention-backend
--require-native --strict --seed --tokenizer --served-model-name --chat-template --revision --load-format
--quantization --trust-remote-code --skip-tokenizer-init --num-kv-blocks --kv-cache-memory-bytes --run-ahead --threads
--tensor-parallel-size --speculative-config
"""


def test_the_usual_flags_exist() -> None:
    spelled = {text for p in engine_parameters() for text in (*p.opts, *p.secondary_opts)}
    assert set(USUAL.split()) <= spelled


def test_without_flags_nothing_counts_as_set_by_the_user() -> None:
    config, _ = parse()
    assert config == EngineConfig()
    assert config.user_set == frozenset()


def test_flags_reach_their_fields() -> None:
    config, result = parse(
        "model-dir",
        *("--max-model-len", "4K", "--max-num-batched-tokens", "2k", "--kv-cache-memory-bytes", "1.5G"),
        *("--memory-utilization", "0.5", "--no-enable-prefix-caching", "--strict", "--platform", "acme"),
        *("--platform-opt", "a=b=c", "--platform-opt", "d=1", "--kernel", "rms_norm=fast"),
        *("--require-native", "attention,linear", "--served-model-name", "x", "--served-model-name", "y"),
    )
    assert result.exit_code == 0, result.output
    assert (config.model.model, config.model.max_model_len) == ("model-dir", 4096)
    assert config.scheduler.max_num_batched_tokens == 2000
    assert config.cache.memory_bytes == 3 << 29
    assert config.cache.memory_utilization == 0.5
    assert not config.cache.enable_prefix_caching
    assert config.platform.strict
    assert config.platform.options == {"a": "b=c", "d": "1"}
    assert config.platform.kernels == (("rms_norm", "fast"),)
    assert config.platform.require_native == ("attention", "linear")
    assert config.model.served_model_name == ("x", "y")
    assert "cache.memory_utilization" in config.user_set
    assert "scheduler.max_num_seqs" not in config.user_set


def test_a_flag_of_json_is_an_object() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'
    config, result = parse("--speculative-config", text)
    assert result.exit_code == 0, result.output
    assert config.scheduler.speculative_config == json.loads(text)
    env = {"OCTAVO_SPECULATIVE_CONFIG": text}
    assert parse(env=env)[0].scheduler.speculative_config == json.loads(text)


def test_environment_variables_stand_in_for_flags() -> None:
    env = {"OCTAVO_MAX_NUM_SEQS": "3", "OCTAVO_MODEL": "here", "OCTAVO_PLATFORM_OPT": "a=1 b=2"}
    config, _ = parse(env=env)
    assert (config.scheduler.max_num_seqs, config.model.model) == (3, "here")
    assert config.platform.options == {"a": "1", "b": "2"}
    assert parse("--max-num-seqs", "5", env=env)[0].scheduler.max_num_seqs == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int3"], "'int3' is not one of"),
        (["--max-model-len", "4.5"], "not a whole number"),
        (["--max-model-len", "lots"], "not a whole number"),
        (["--kernel", "rms_norm"], "must look like key=value"),
        (["--no-such-flag"], "No such option"),
        (["--speculative-config", "ngram"], "'ngram' is not JSON"),
        (["--speculative-config", "[1]"], "is not a JSON object"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], message: str) -> None:
    _, result = parse(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_value_out_of_range_names_the_field() -> None:
    _, result = parse("--memory-utilization", "1.5")
    assert isinstance(result.exception, ConfigError)
    assert "memory_utilization" in str(result.exception)


def test_an_octavo_error_is_one_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_DEBUG", raising=False)
    result = CliRunner().invoke(main, ["explain", "--platform", "nope"])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: no installed platform is named 'nope'")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    result = CliRunner().invoke(main, ["explain", "--platform", "nope"])
    assert type(result.exception).__name__ == "PlatformNotFoundError"


def test_help_names_every_command_and_imports_no_torch() -> None:
    code = (
        "import sys\nfrom octavo.cli import main\nmain(['--help'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules or 'octavo.cli.serve' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert all(name in done.stdout for name in COMMANDS)


def test_every_command_can_be_imported() -> None:
    for name in COMMANDS:
        result = CliRunner().invoke(main, [name, "--help"])
        assert result.exit_code == 0, result.output
