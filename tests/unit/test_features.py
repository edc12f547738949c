"""Negotiation: features are dropped aloud, limits are refused."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import EngineConfig, make_config
from octavo.errors import ConfigError
from octavo.features import negotiate
from octavo.plugin import BucketSpec, MultipleOf, PlatformCaps, ScheduleLimits


def test_what_the_platform_supports_stays_as_it_is() -> None:
    config = EngineConfig()
    assert negotiate(config, PlatformCaps()) == (config, [])


def test_a_missing_feature_is_dropped_with_a_line() -> None:
    config, lines = negotiate(EngineConfig(), PlatformCaps(features=frozenset({"chunked_prefill"})))
    assert not config.cache.enable_prefix_caching
    assert config.scheduler.enable_chunked_prefill
    assert lines == ["cache.enable_prefix_caching is off: the platform does not support prefix_cache"]


def test_a_feature_nobody_asked_for_is_not_mentioned() -> None:
    config = make_config(enable_prefix_caching=False, strict=True)
    assert negotiate(config, PlatformCaps(features=frozenset({"chunked_prefill"})))[1] == []


def test_strict_refuses_instead_of_dropping() -> None:
    with pytest.raises(ConfigError, match=r"enable_prefix_caching.*--no-enable-prefix-caching"):
        negotiate(make_config(strict=True), PlatformCaps(features=frozenset({"chunked_prefill"})))


SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


def test_speculation_is_kept_where_the_platform_has_it_and_dropped_or_refused_elsewhere() -> None:
    config = make_config(speculative_config=SPECULATIVE)
    features = PlatformCaps().features
    assert negotiate(config, PlatformCaps(features=features | {"spec_decode"})) == (config, [])
    dropped, lines = negotiate(config, PlatformCaps())
    assert dropped.scheduler.speculative_config is None
    assert lines == ["scheduler.speculative_config is off: the platform does not support spec_decode"]
    with pytest.raises(ConfigError, match=r"speculative_config: .*; leave it out, or leave out --strict"):
        negotiate(make_config(speculative_config=SPECULATIVE, strict=True), PlatformCaps())


def test_speculation_and_running_ahead_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="run_ahead 1: drafts need the last step's tokens"):
        make_config(speculative_config=SPECULATIVE, run_ahead=1)


BUCKETED = PlatformCaps(shapes="bucketed", buckets=BucketSpec(num_tokens=(64, 128), num_seqs=(1, 8)))


@pytest.mark.parametrize(
    ("flags", "caps", "message"),
    [
        ({"dtype": "float16"}, PlatformCaps(dtypes=("bfloat16",)), r"dtype 'float16': .*bfloat16"),
        ({"kv_cache_dtype": "fp8_e4m3"}, PlatformCaps(), "kv_cache_dtype 'float8_e4m3fn'"),
        ({"tensor_parallel_size": 2}, PlatformCaps(), "at most 1 rank"),
        ({"block_size": 24}, PlatformCaps(schedule=ScheduleLimits(block_sizes=(16, MultipleOf(value=64)))), "64"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 128}, BUCKETED, "max_num_seqs 9: .*at most 8"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 256}, BUCKETED, "max_num_batched_tokens 256"),
    ],
)
def test_a_limit_that_cannot_be_worked_around_is_refused(
    flags: dict[str, Any], caps: PlatformCaps, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        negotiate(make_config(**flags), caps)


def test_block_sizes_by_multiple_are_accepted() -> None:
    caps = PlatformCaps(schedule=ScheduleLimits(block_sizes=(16, MultipleOf(value=64))))
    for size in (16, 64, 192):
        assert negotiate(make_config(block_size=size), caps)[1] == []
