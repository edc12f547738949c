"""What the user asked for against what the platform can do: features are dropped with a reason, limits refused.

Core branches on capabilities here, once, before anything is built. Never on a platform's name.
"""

from __future__ import annotations

from octavo.config import EngineConfig, with_field
from octavo.errors import ConfigError
from octavo.plugin.data import MultipleOf, PlatformCaps

FEATURES = (
    ("prefix_cache", "cache.enable_prefix_caching", "--no-enable-prefix-caching"),
    ("chunked_prefill", "scheduler.enable_chunked_prefill", "--no-enable-chunked-prefill"),
    ("spec_decode", "scheduler.speculative_config", ""),
)
"""(capability, field that asks for it, the flag that stops asking: none if leaving its own out does)."""

WORDS = frozenset({"structured", *(capability for capability, _, _ in FEATURES)})
"""What a platform may claim. Structured outputs ask nothing of it: they are masks of logits, and the op that applies
them has a reference."""


def negotiate(config: EngineConfig, caps: PlatformCaps) -> tuple[EngineConfig, list[str]]:
    """The config without what the platform lacks, and one line per dropped feature.

    Raises ConfigError for a limit that cannot be worked around (dtype, KV dtype, block size, ranks) and, with
    `strict`, for every feature that would be dropped.
    """
    _check_limits(config, caps)
    lines = []
    for capability, field, flag in FEATURES:
        section, _, name = field.partition(".")
        if not getattr(getattr(config, section), name) or capability in caps.features:
            continue
        reason = f"the platform does not support {capability}"
        if config.platform.strict:
            way = f"pass {flag}" if flag else "leave it out"
            raise ConfigError(f"{name}: {reason}; {way}, or leave out --strict")
        config = with_field(config, field, False if flag else None)
        lines.append(f"{field} is off: {reason}")
    return config, lines


def _check_limits(config: EngineConfig, caps: PlatformCaps) -> None:
    dtype, kv_dtype = config.model.dtype, config.cache.dtype
    ranks, block = config.parallel.tensor_parallel_size, config.cache.block_size
    if dtype != "auto" and dtype not in caps.dtypes:
        raise ConfigError(f"dtype {dtype!r}: the platform computes in {', '.join(caps.dtypes)}")
    if kv_dtype not in ("auto", *caps.kv_dtypes, *caps.dtypes):
        known = ", ".join(dict.fromkeys(("auto", *caps.kv_dtypes, *caps.dtypes)))
        raise ConfigError(f"kv_cache_dtype {kv_dtype!r}: the platform's cache takes {known}")
    if ranks > 1 and ranks > caps.max_world_size:
        raise ConfigError(f"tensor_parallel_size {ranks}: the platform runs at most {caps.max_world_size} rank(s)")
    if not any(_fits(block, rule) for rule in caps.schedule.block_sizes):
        allowed = ", ".join(
            f"multiples of {rule.value}" if isinstance(rule, MultipleOf) else str(rule)
            for rule in caps.schedule.block_sizes
        )
        raise ConfigError(f"block_size {block}: the platform's attention takes {allowed}")
    buckets = caps.buckets if caps.shapes == "bucketed" else None
    if buckets is not None:
        for name, sizes in (("max_num_seqs", buckets.num_seqs), ("max_num_batched_tokens", buckets.num_tokens)):
            if getattr(config.scheduler, name) > sizes[-1]:
                asked = getattr(config.scheduler, name)
                raise ConfigError(f"{name} {asked}: the platform's steps hold at most {sizes[-1]}")


def _fits(size: int, rule: int | MultipleOf) -> bool:
    return size % rule.value == 0 if isinstance(rule, MultipleOf) else size == rule
