"""The engine's command-line flags: one table, made from the fields of `octavo.config.EngineConfig`.

A new config field needs an entry in `HELP` (a test fails otherwise) and becomes a flag of every command that runs an
engine. Flags that the user leaves out stay None, so that `EngineConfig.user_set` holds only what was really asked for.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from octavo.config import ALIASES, DTYPES, EngineConfig, dotted_fields, make_config

HELP: Mapping[str, str] = {
    "model.model": "A folder, a .gguf file, or a hub repository; the packaged demo model if left out.",
    "model.tokenizer": "Folder or repository of the tokenizer, if not the model's own.",
    "model.served_model_name": "Name under which the model is served. Repeat for several.",
    "model.revision": "Branch, tag or commit of a hub repository.",
    "model.dtype": "Dtype of activations and unquantized weights; auto follows the checkpoint.",
    "model.quantization": "Quantization format, if the checkpoint does not say; none dequantizes at load.",
    "model.load_format": "How weights are read; dummy fills them with random numbers.",
    "model.max_model_len": "Longest prompt plus output in tokens (4k = 4000, 4K = 4096).",
    "model.chat_template": "Chat template: a file or the template's text.",
    "model.trust_remote_code": "Run Python code that comes with the model's repository.",
    "model.skip_tokenizer_init": "Load no tokenizer: token ids in, token ids out.",
    "model.generation_config": "Where default sampling parameters come from; auto is the model's own file.",
    "model.logprobs_mode": "What logprobs are: of the model or of what is sampled from, log-softmax or logits.",
    "model.seed": "Seed of everything random that no request seeds.",
    "cache.block_size": "Tokens of one KV block.",
    "cache.dtype": "Dtype of the KV cache: auto follows the model; fp8 and int8 halve it.",
    "cache.memory_utilization": "Share of the device's memory that the engine may take.",
    "cache.memory_bytes": "Bytes of KV memory, instead of measuring (2G = 2 GiB).",
    "cache.num_blocks": "Number of KV blocks, instead of measuring.",
    "cache.enable_prefix_caching": "Share the KV blocks of equal prompt beginnings.",
    "scheduler.max_num_seqs": "Most sequences in one step.",
    "scheduler.max_num_batched_tokens": "Most tokens in one step.",
    "scheduler.policy": "Order of waiting requests.",
    "scheduler.enable_chunked_prefill": "Spread long prompts over several steps.",
    "scheduler.run_ahead": "Steps scheduled before the last one's tokens are known; by default the platform's choice.",
    "scheduler.max_queue": "Most waiting requests before new ones are turned away.",
    "scheduler.speculative_config": "JSON: a drafter, how many tokens it may guess in a step, its own keys; such as "
    '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}.',
    "parallel.tensor_parallel_size": "Ranks that each layer is split over.",
    "structured.structured_outputs_backend": "Grammar library of requests that name none; auto chooses for each.",
    "structured.structured_outputs_timeout": "Seconds that a schema, regex or grammar may take to compile.",
    "structured.structured_outputs_cache_bytes": "Bytes of compiled grammars that are kept (512M = 512 MiB).",
    "structured.structured_outputs_disable_any_whitespace": "JSON answers on one line, without free whitespace.",
    "structured.structured_outputs_disable_additional_properties": "No properties beyond those a schema lists.",
    "platform.name": "Platform to run on, of those `octavo plugin list` shows.",
    "platform.options": "KEY=VALUE option of the platform. Repeat for several.",
    "platform.kernels": "OP=PROVIDER: take this provider's kernel for an op. Repeat for several.",
    "platform.attention_backend": "Attention backend by name.",
    "platform.require_native": "Op families that must not run on reference kernels: attention, linear, moe.",
    "platform.strict": "Fail, rather than drop a feature, where the platform lacks it.",
    "platform.enforce_eager": "Neither capture nor compile steps.",
    "platform.threads": "CPU threads of one worker.",
}

INTERNAL = frozenset({"parallel.rank", "cache.group_blocks"})
"""Fields that are set by the engine, never by a flag."""

CHOICES: Mapping[str, tuple[str, ...]] = {"model.dtype": DTYPES}

SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "cache.memory_utilization": ("--gpu-memory-utilization", "--memory-utilization"),
    "platform.options": ("--platform-opt",),
    "platform.kernels": ("--kernel",),
}
"""Flags that are not just the flat name in kebab case."""

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Size(click.ParamType[int]):
    """An integer with an optional unit: 4k is 4000, 4K is 4096."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgtKMGT]?)", str(value))
        number = float(match[1]) * UNITS.get(match[2], 1) if match else 0.5
        if number != int(number):
            self.fail(f"{value!r} is not a whole number such as 4096, 4k or 4K", param, ctx)
        return int(number)


class Pair(click.ParamType[tuple[str, str]]):
    """KEY=VALUE."""

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, equals, text = str(value).partition("=")
        if not key or not equals:
            self.fail(f"{value!r} must look like key=value", param, ctx)
        return key, text


class Json(click.ParamType[dict[str, Any]]):
    """A JSON object."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        try:
            found = value if isinstance(value, dict) else json.loads(value)
        except ValueError as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)
        if not isinstance(found, dict):
            self.fail(f"{value!r} is not a JSON object", param, ctx)
        return found


def flat_name(dotted: str) -> str:
    """The name that `make_config` takes for a field."""
    return next((flat for flat, target in ALIASES.items() if target == dotted), dotted.rpartition(".")[2])


def _field_types() -> dict[str, Any]:
    sections = get_type_hints(EngineConfig)
    return {
        d: get_type_hints(sections[d.partition(".")[0]])[d.partition(".")[2]] for d in dotted_fields(EngineConfig())
    }


def _click_type(dotted: str, hint: Any) -> Any:
    """The click type of a field: choices, sizes for integers, pairs for mappings."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if dotted in CHOICES:
        return click.Choice(CHOICES[dotted])
    if get_origin(hint) is Literal:
        return click.Choice(get_args(hint))
    if dotted in ("platform.options", "platform.kernels"):
        return Pair()
    if dotted == "scheduler.speculative_config":
        return Json()
    return {int: Size(), float: float, bool: bool}.get(hint, str)


def _default_text(value: object) -> str:
    if value is None or value == () or value == {} or value == "":
        return ""
    return f"  [default: {('off', 'on')[value] if isinstance(value, bool) else value}]"


def engine_parameters() -> list[click.Parameter]:
    """All engine flags, and the MODEL argument, in the order of the config's fields."""
    hints = _field_types()
    parameters: list[click.Parameter] = []
    for dotted, default in dotted_fields(EngineConfig()).items():
        if dotted in INTERNAL:
            continue
        name = flat_name(dotted)
        if dotted == "model.model":
            parameters.append(click.Argument([name], required=False, envvar="OCTAVO_MODEL"))
            continue
        kebab = name.replace("_", "-")
        first = SPELLINGS.get(dotted, (f"--{kebab}",))[0]
        envvar = "OCTAVO_" + first.removeprefix("--").replace("-", "_").upper()
        kind = _click_type(dotted, hints[dotted])
        repeated = get_origin(hints[dotted]) is tuple or isinstance(kind, Pair)
        if kind is bool:
            # A switch that is on by default needs a way to turn it off; one that is off needs none.
            spelling = [f"--{kebab}/--no-{kebab}" if default else f"--{kebab}"]
            settings: dict[str, Any] = {"is_flag": True}
        else:
            spelling = list(SPELLINGS.get(dotted, (f"--{kebab}",)))
            settings = {"type": kind, "multiple": repeated}
        parameters.append(
            click.Option(
                [*spelling, name],
                default=None,
                envvar=envvar,
                show_envvar=False,
                help=HELP[dotted] + _default_text(default),
                **settings,
            )
        )
    return parameters


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command function (under `@click.command`) with MODEL and all engine flags, passed by flat name."""
    known: list[click.Parameter] = getattr(command, "__click_params__", [])
    # click keeps the decorators' parameters in reverse order.
    command.__click_params__ = [*known, *reversed(engine_parameters())]  # type: ignore[attr-defined]
    return command


def config_from(flags: Mapping[str, Any]) -> EngineConfig:
    """The config for the keyword arguments that `engine_options` produced. Raises ConfigError naming a bad field."""
    flat = {name: value for name, value in flags.items() if value is not None and value != ()}
    if "platform_options" in flat:
        flat["platform_options"] = dict(flat["platform_options"])
    if "require_native" in flat:
        flat["require_native"] = tuple(part for text in flat["require_native"] for part in text.split(",") if part)
    return make_config(**flat)
