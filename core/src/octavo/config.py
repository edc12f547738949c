"""The engine's configuration: frozen, resolved once, handed out in slices.

A platform may ask for changes through `ConfigPatch`; only the fields in `TUNABLE` may be patched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from octavo.errors import ConfigError
from octavo.plugin.data import ConfigPatch
from octavo.speculate.settings import drafter_spec

DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is loaded.

    model: a folder, a .gguf file, a hub repository, or "" for the packaged demo model.
    dtype: of activations and unquantized weights; "auto" follows the checkpoint, or the platform if it cannot.
    quantization: None follows the checkpoint; "none" dequantizes everything at load; "fp8", "int8",
        "int8_per_channel_weight_only" and "int4" quantize a plain checkpoint while loading.
    max_model_len: longest prompt plus output, in tokens; None takes the model's own limit.
    logprobs_mode: what logprobs are, for requests that do not say: of the model (raw) or of what is sampled from
        (processed: behind penalties, masks, temperature and filters), log-softmax or the logits themselves.
    """

    model: str = ""
    tokenizer: str | None = None
    served_model_name: tuple[str, ...] = ()
    revision: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    max_model_len: int | None = None
    chat_template: str | None = None
    trust_remote_code: bool = False
    skip_tokenizer_init: bool = False
    generation_config: str = "auto"
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = "raw_logprobs"
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """KV memory. The pool takes `memory_utilization` of the device minus weights and the largest step's activations,
    unless `memory_bytes` or `num_blocks` fixes it. dtype: "auto" follows the model; "fp8" is float8_e4m3fn; "int8"
    has a scale for each token and head.
    group_blocks: the blocks of every KV group; set by an engine that wakes up, to be as large as it was."""

    block_size: int = 16
    dtype: str = "auto"
    memory_utilization: float = 0.9
    memory_bytes: int | None = None
    num_blocks: int | None = None
    group_blocks: tuple[int, ...] | None = None
    enable_prefix_caching: bool = True


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Continuous batching. run_ahead: steps scheduled before the last tokens are known (0 or 1, None: by caps).

    speculative_config: {"method": a drafter's name, "num_speculative_tokens": most drafts of a sequence in a step} and
        the drafter's own keys; None: a token a step.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: Literal["fcfs", "priority"] = "fcfs"
    enable_chunked_prefill: bool = True
    run_ahead: int | None = None
    max_queue: int | None = None
    speculative_config: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Ranks. world = tensor_parallel_size for now; rank is this worker's place in it."""

    tensor_parallel_size: int = 1
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class PlatformConfig:
    """Which platform and which of its kernels.

    kernels: (op, provider) choices that go before priorities. require_native: op families ("attention", "linear",
    "moe") that must not run on reference kernels. strict: a requested feature the platform lacks is an error.
    """

    name: str = "auto"
    options: Mapping[str, str] = field(default_factory=dict)
    kernels: tuple[tuple[str, str], ...] = ()
    attention_backend: str | None = None
    require_native: tuple[str, ...] = ()
    strict: bool = False
    enforce_eager: bool = False
    threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class StructuredConfig:
    """Structured outputs. backend: for requests that leave it to the server; "auto" takes, for each, one that keeps to
    all of its grammar. timeout: seconds that a grammar may take to compile. cache_bytes: compiled grammars kept.
    disable_any_whitespace, disable_additional_properties: for all requests, as `StructuredOutputs` has them."""

    structured_outputs_backend: Literal["auto", "xgrammar", "guidance"] = "auto"
    structured_outputs_timeout: float = 10.0
    structured_outputs_cache_bytes: int = 512 << 20
    structured_outputs_disable_any_whitespace: bool = False
    structured_outputs_disable_additional_properties: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All of it. `user_set` holds the dotted names of fields the user gave: those win over a platform's patches."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    structured: StructuredConfig = field(default_factory=StructuredConfig)
    platform: PlatformConfig = field(default_factory=PlatformConfig)
    user_set: frozenset[str] = frozenset()


TUNABLE = frozenset(
    {
        "model.dtype",
        "cache.block_size",
        "cache.dtype",
        "cache.memory_utilization",
        "cache.memory_bytes",
        "scheduler.max_num_seqs",
        "scheduler.max_num_batched_tokens",
        "scheduler.run_ahead",
        "platform.enforce_eager",
        "platform.threads",
    }
)
"""Fields that a platform may patch."""

ALIASES = {
    "gpu_memory_utilization": "cache.memory_utilization",
    "memory_utilization": "cache.memory_utilization",
    "kv_cache_dtype": "cache.dtype",
    "kv_cache_memory_bytes": "cache.memory_bytes",
    "num_kv_blocks": "cache.num_blocks",
    "platform": "platform.name",
    "platform_options": "platform.options",
    "scheduling_policy": "scheduler.policy",
}
"""Flat names (as in `LLM(...)` and on the command line) that differ from the field's own name."""

VALUE_ALIASES: Mapping[str, Mapping[str, str]] = {
    "cache.dtype": {
        "fp8": "float8_e4m3fn",
        "fp8_e4m3": "float8_e4m3fn",
        "fp8_e5m2": "float8_e5m2",
        "int8_per_token_head": "int8",
    },
}
"""By field: values as vLLM spells them -> ours."""


def dotted_fields(config: object, prefix: str = "") -> dict[str, Any]:
    """All leaf fields of a config by dotted name."""
    out: dict[str, Any] = {}
    for f in fields(config):  # type: ignore[arg-type]
        value = getattr(config, f.name)
        if f.name == "user_set":
            continue
        if is_dataclass(value):
            out |= dotted_fields(value, f"{prefix}{f.name}.")
        else:
            out[prefix + f.name] = value
    return out


def with_field(config: EngineConfig, dotted: str, value: object) -> EngineConfig:
    """A copy with one field changed, checked as `make_config` checks."""
    section, _, name = dotted.partition(".")
    changed = replace(getattr(config, section), **{name: value})
    result = replace(config, **{section: changed})
    check(result)
    return result


def make_config(**flat: Any) -> EngineConfig:
    """Build a config from flat names (`model=`, `dtype=`, `max_num_seqs=`, `platform=` ...). None means "default"
    where the field's default is not None. Raises ConfigError naming the field."""
    # These two have a name of their own in ALIASES; their last word means the model's.
    fields_by_name = [
        dotted for dotted in dotted_fields(EngineConfig()) if dotted not in ("platform.name", "cache.dtype")
    ]
    names = {dotted.rpartition(".")[2]: dotted for dotted in fields_by_name}
    del names["rank"], names["group_blocks"]
    names |= ALIASES
    sections: dict[str, dict[str, Any]] = {}
    given = set()
    for key, value in flat.items():
        if key not in names:
            raise ConfigError(f"unknown option {key!r}; known: {', '.join(sorted(names))}")
        if value is None:
            continue
        section, _, name = names[key].partition(".")
        if aliases := VALUE_ALIASES.get(names[key]):
            value = aliases.get(value, value)
        sections.setdefault(section, {})[name] = value
        given.add(names[key])
    base = EngineConfig()
    config = replace(
        base,
        user_set=frozenset(given),
        **{section: replace(getattr(base, section), **values) for section, values in sections.items()},
    )
    check(config)
    return config


def check(config: EngineConfig) -> None:
    """Raise ConfigError for the first field that is out of range."""
    model, cache, sched = config.model, config.cache, config.scheduler
    rules: Sequence[tuple[bool, str]] = (
        (model.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, not {model.dtype!r}"),
        (model.max_model_len is None or model.max_model_len >= 2, "max_model_len must be at least 2"),
        (0.0 < cache.memory_utilization <= 1.0, "memory_utilization must be above 0 and at most 1"),
        (cache.block_size >= 1, "block_size must be at least 1"),
        (cache.num_blocks is None or cache.num_blocks >= 2, "num_kv_blocks must be at least 2"),
        (cache.memory_bytes is None or cache.memory_bytes > 0, "kv_cache_memory_bytes must be positive"),
        (sched.max_num_seqs >= 1, "max_num_seqs must be at least 1"),
        (sched.max_num_batched_tokens >= 1, "max_num_batched_tokens must be at least 1"),
        (sched.policy in ("fcfs", "priority"), f"scheduling_policy must be fcfs or priority, not {sched.policy!r}"),
        (sched.run_ahead in (None, 0, 1), "run_ahead must be 0 or 1"),
        (config.structured.structured_outputs_timeout > 0, "structured_outputs_timeout must be above 0"),
        (config.structured.structured_outputs_cache_bytes >= 0, "structured_outputs_cache_bytes must be at least 0"),
        (config.parallel.tensor_parallel_size >= 1, "tensor_parallel_size must be at least 1"),
        (config.platform.threads is None or config.platform.threads >= 1, "threads must be at least 1"),
    )
    for ok, message in rules:
        if not ok:
            raise ConfigError(message)
    if sched.speculative_config is not None:
        drafter_spec(sched.speculative_config)
        if sched.run_ahead:
            raise ConfigError("run_ahead 1: drafts need the last step's tokens; with speculative_config it is 0")


def apply_patches(config: EngineConfig, patches: Sequence[ConfigPatch]) -> tuple[EngineConfig, list[str]]:
    """Apply a platform's patches. Returns the config and a log line per patch (applied, or refused and why)."""
    log = []
    for patch in patches:
        if patch.field not in TUNABLE:
            raise ConfigError(f"a platform may not change {patch.field!r}; it may change: {', '.join(sorted(TUNABLE))}")
        if patch.field in config.user_set and not patch.force:
            log.append(f"kept {patch.field} as you set it; the platform wanted {patch.value!r}: {patch.reason}")
            continue
        config = with_field(config, patch.field, patch.value)
        log.append(f"{patch.field} = {patch.value!r}: {patch.reason}")
    return config, log
