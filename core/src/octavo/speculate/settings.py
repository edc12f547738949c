"""What `speculative_config` says: which drafter, how many tokens it may guess, and what else it wants to know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import ConfigError
from octavo.plugin.drafter import DrafterSpec

EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'


def drafter_spec(config: Mapping[str, Any]) -> tuple[str, DrafterSpec]:
    """The drafter's name, and what it is made with. Raises ConfigError naming the key."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"speculative_config must be an object such as {EXAMPLE}, not {config!r}")
    options = dict(config)
    method, number = options.pop("method", None), options.pop("num_speculative_tokens", None)
    if not isinstance(method, str) or not method:
        raise ConfigError(f"speculative_config.method must name a drafter, not {method!r}: for example {EXAMPLE}")
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"speculative_config.num_speculative_tokens must be an integer of at least 1, not {number!r}")
    return method, DrafterSpec(num_tokens=number, options=options)


def num_drafts(config: Mapping[str, Any] | None) -> int:
    """Most drafts of a sequence in one step; 0 without speculation."""
    return 0 if config is None else drafter_spec(config)[1].num_tokens
