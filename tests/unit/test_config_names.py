"""The flat names of config fields: each field has one, and no name means two fields."""

from __future__ import annotations

import pytest

from octavo.cli.options import INTERNAL, flat_name
from octavo.config import EngineConfig, dotted_fields, make_config


@pytest.mark.parametrize("dotted", sorted(set(dotted_fields(EngineConfig())) - INTERNAL))
def test_the_flat_name_of_a_field_sets_that_field(dotted):
    default = dotted_fields(EngineConfig())[dotted]
    speculative = {"method": "ngram", "num_speculative_tokens": 1}
    special = {"model.dtype": "float32", "cache.dtype": "float32", "scheduler.speculative_config": speculative}
    value = special.get(dotted, 1 if default is None else default)
    value = 2 if dotted in ("model.max_model_len", "cache.num_blocks") else value
    config = make_config(**{flat_name(dotted): value})
    assert config.user_set == {dotted}
    assert dotted_fields(config)[dotted] == value


@pytest.mark.parametrize(
    ("given", "dtype"), [("fp8", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2"), ("int8_per_token_head", "int8")]
)
def test_the_caches_dtype_may_be_spelt_as_vllm_does(given, dtype):
    assert make_config(kv_cache_dtype=given).cache.dtype == dtype


def test_the_models_dtype_is_not_the_caches():
    config = make_config(dtype="float32", kv_cache_dtype="float16")
    assert (config.model.dtype, config.cache.dtype) == ("float32", "float16")
