from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.errors import UnsupportedModelError
from octavo.layers.rope import RopeTables, frequencies
from octavo.plugin.specs import BatchLimits

SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
RULES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 10000.0},
    "linear": {"rope_theta": 10000.0, "factor": 3.0},
    "yarn": SCALED,
    "yarn with its own factors": SCALED | {"rope_type": "yarn", "beta_fast": 16.0, "attention_factor": 0.7},
    "llama3": SCALED | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "dynamic": {"rope_theta": 10000.0, "factor": 2.0},
}


def llama(**rope: Any) -> LlamaConfig:
    return LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=128, rope_parameters=rope)


def cos_sin(rotary: torch.nn.Module, length: int, **extra: Any) -> torch.Tensor:
    """The table that transformers computes on the fly, in our form."""
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None], **extra)
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize("name", sorted(RULES))
def test_tables_equal_those_of_transformers(name, make_context):
    config = llama(**({"rope_type": name} | RULES[name]))
    got = RopeTables(config, make_context()).table()
    torch.testing.assert_close(got, cos_sin(LlamaRotaryEmbedding(config), 128), atol=1e-6, rtol=1e-6)


def test_dynamic_scaling_is_resolved_for_the_longest_sequence_served(make_context):
    config = llama(rope_type="dynamic", **RULES["dynamic"])
    limits = BatchLimits(max_num_tokens=64, max_num_seqs=8, max_model_len=300)
    got = RopeTables(config, make_context(limits=limits)).table()
    assert got.shape == (300, 16)
    torch.testing.assert_close(got, cos_sin(LlamaRotaryEmbedding(config), 300), atol=1e-5, rtol=1e-5)


def test_each_layer_type_of_gemma3_has_its_table_and_layers_share_it(make_context):
    config = Gemma3TextConfig(hidden_size=64, num_attention_heads=4, head_dim=16)
    ropes = RopeTables(config, make_context())
    for kind in ("sliding_attention", "full_attention"):
        want = cos_sin(Gemma3RotaryEmbedding(config), 128, layer_type=kind)
        torch.testing.assert_close(ropes.table(kind), want, atol=1e-6, rtol=1e-6)
        assert ropes.table(kind) is ropes.table(kind)
    assert not torch.equal(ropes.table("sliding_attention"), ropes.table("full_attention"))


def test_layer_types_share_a_table_where_the_config_has_one(make_context):
    ropes = RopeTables(llama(rope_type="default", rope_theta=10000.0), make_context())
    assert ropes.table("full_attention") is ropes.table("sliding_attention")


def test_freq_factors_divide_the_frequencies():
    factors = [1.0, 2.0, 4.0, 8.0, 1.0, 1.0, 1.0, 16.0]
    config = llama(rope_type="default", rope_theta=10000.0)
    plain, _ = frequencies(config, max_model_len=128)
    config.rope_parameters["freq_factors"] = factors
    divided, _ = frequencies(config, max_model_len=128)
    torch.testing.assert_close(divided, plain / torch.tensor(factors))


def test_freq_factors_of_the_wrong_length_are_refused():
    config = llama(rope_type="default", rope_theta=10000.0)
    config.rope_parameters["freq_factors"] = [1.0, 2.0]
    with pytest.raises(UnsupportedModelError, match="freq_factors holds 2 numbers, the model has 8"):
        frequencies(config, max_model_len=128)


def test_an_unknown_rope_type_is_refused_with_the_known_ones():
    config = llama(rope_type="default", rope_theta=10000.0)
    config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(UnsupportedModelError, match=r"'spiral'.*default.*llama3.*yarn"):
        frequencies(config, max_model_len=128)


def test_the_table_has_the_dtype_of_the_model(make_context):
    config = llama(rope_type="default", rope_theta=10000.0)
    assert RopeTables(config, make_context(dtype=torch.bfloat16)).table().dtype == torch.bfloat16
