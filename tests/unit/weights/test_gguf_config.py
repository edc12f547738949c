"""GGUF metadata gives the config that the model was written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.testing.gguf_files import write_gguf
from octavo.testing.tiny import tiny_config
from octavo.weights.gguf_config import ARCHITECTURES, config_of, eos_ids
from octavo.weights.gguf_header import GGUFHeader, read_header

MODEL_TYPES = sorted({arch.model_type for arch in ARCHITECTURES.values()})
NOT_STORED = {"initializer_range", "use_cache", "transformers_version", "_sliding_window_pattern", "dtype"}
"""Keys that say nothing about the computation."""


def header_of(tmp_path: Path, config: PretrainedConfig, **settings: Any) -> GGUFHeader:
    tensors = {"model.embed_tokens.weight": torch.zeros(config.vocab_size, config.hidden_size)}
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = torch.zeros(config.vocab_size, config.hidden_size)
    return read_header(write_gguf(tmp_path / "model.gguf", config, tensors, **settings))


def assert_same(ours: Any, theirs: Any, where: str = "config") -> None:
    """Equal up to the float32 that GGUF stores numbers in."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=1e-6), where
    else:
        assert ours == theirs, where


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_config_comes_back_whole(model_type: str, tmp_path: Path) -> None:
    overrides: dict[str, Any] = {"tie_word_embeddings": model_type.startswith("gemma"), "rms_norm_eps": 3e-5}
    if model_type == "gemma3_text":
        overrides["layer_types"] = ["sliding_attention", "full_attention"]
    if model_type == "smollm3":
        overrides["no_rope_layer_interval"] = 4
    if model_type == "granite":
        overrides |= {"attention_multiplier": 0.3, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
        overrides["logits_scaling"] = 8.0
    if model_type == "phi3":
        overrides["original_max_position_embeddings"] = 256
    config = tiny_config(model_type, **overrides)
    patterns = {"gemma3.attention.sliding_window_pattern": 2} if model_type == "gemma3_text" else {}
    found = config_of(header_of(tmp_path, config, metadata=patterns))
    assert (found.model_type, type(found).__name__) == (config.model_type, type(config).__name__)
    ours, theirs = ({k: v for k, v in c.to_dict().items() if k not in NOT_STORED} for c in (found, config))
    if "head_dim" not in theirs:  # most classes take it only as an extra
        assert ours.pop("head_dim") == config.hidden_size // config.num_attention_heads
    assert_same(ours, theirs)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_comes_back(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 5e5, "factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 64
    config = tiny_config("qwen2", rope_parameters=dict(rope))
    assert_same(config_of(header_of(tmp_path, config)).rope_parameters, config.rope_parameters)


def test_rope_scaling_of_gemma3_is_for_full_attention_only(tmp_path: Path) -> None:
    config = tiny_config("gemma3_text", tie_word_embeddings=True)
    scaling = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    rope = config_of(header_of(tmp_path, config, metadata=scaling)).rope_parameters
    assert rope["full_attention"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}


def test_gemma3_without_a_pattern_has_one_full_layer_in_six(tmp_path: Path) -> None:
    config = tiny_config("gemma3_text", tie_word_embeddings=True, num_hidden_layers=7)
    found = config_of(header_of(tmp_path, config))
    assert [kind == "full_attention" for kind in found.layer_types] == [False] * 5 + [True, False]


@pytest.mark.parametrize(("model_type", "num_layers"), [("gemma2", 46), ("gemma3_text", 62)])
def test_the_largest_gemmas_scale_queries_by_the_models_width(model_type: str, num_layers: int, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 96, "tie_word_embeddings": True}
    large = tiny_config(model_type, num_hidden_layers=num_layers, **sizes)
    assert config_of(header_of(tmp_path, large)).query_pre_attn_scalar == 24
    assert config_of(header_of(tmp_path, tiny_config(model_type, **sizes))).query_pre_attn_scalar == 16


def test_frequency_factors_are_handed_on_in_the_rope_parameters(tmp_path: Path) -> None:
    factors = torch.tensor([1.0, 1.0, 1.5, 2.0, 8.0, 8.0, 8.0, 8.0])
    header = header_of(tmp_path, tiny_config("llama"), extra={"rope_freqs.weight": factors})
    assert config_of(header).rope_parameters["freq_factors"] == factors.tolist()


def test_long_and_short_factors_make_longrope(tmp_path: Path) -> None:
    config = tiny_config("phi3")
    header = header_of(
        tmp_path,
        config,
        metadata={"phi3.rope.scaling.original_context_length": 64, "phi3.rope.scaling.attn_factor": 1.19},
        extra={"rope_factors_long.weight": torch.full((8,), 3.0), "rope_factors_short.weight": torch.ones(8)},
    )
    found = config_of(header)
    assert found.original_max_position_embeddings == 64
    assert found.rope_parameters["rope_type"] == "longrope"
    assert found.rope_parameters["long_factor"] == [3.0] * 8
    assert found.rope_parameters["short_factor"] == [1.0] * 8
    assert found.rope_parameters["attention_factor"] == pytest.approx(1.19)


def test_part_of_the_head_rotates_if_the_file_says_so(tmp_path: Path) -> None:
    header = header_of(tmp_path, tiny_config("phi3"), metadata={"phi3.rope.dimension_count": 12})
    assert config_of(header).rope_parameters["partial_rotary_factor"] == 0.75


def test_the_heads_width_is_read_off_the_matrices_when_no_key_gives_it(tmp_path: Path) -> None:
    config = tiny_config("llama", head_dim=32)
    missing = {"llama.attention.key_length": None, "llama.attention.value_length": None}
    tensors = {
        "model.embed_tokens.weight": torch.zeros(384, 64),
        "model.layers.0.self_attn.k_proj.weight": torch.zeros(64, 64),
    }
    header = read_header(write_gguf(tmp_path / "model.gguf", config, tensors, metadata=missing))
    assert config_of(header).head_dim == 32


def test_a_file_without_output_weight_has_tied_embeddings(tmp_path: Path) -> None:
    assert config_of(header_of(tmp_path, tiny_config("llama", tie_word_embeddings=True))).tie_word_embeddings
    assert not config_of(header_of(tmp_path, tiny_config("llama"))).tie_word_embeddings


def test_ends_of_sequence_turn_and_message_all_count(tmp_path: Path) -> None:
    more = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 9}
    assert eos_ids(header_of(tmp_path, tiny_config("llama"), metadata=more)) == (2, 7, 9)
    same = {"tokenizer.ggml.eot_token_id": 2}
    assert eos_ids(header_of(tmp_path, tiny_config("llama"), metadata=same)) == (2,)


def test_token_ids_that_the_file_does_not_name_are_none_and_not_the_class_default(tmp_path: Path) -> None:
    unnamed = {f"tokenizer.ggml.{name}_token_id": None for name in ("bos", "eos", "padding")}
    header = header_of(tmp_path, tiny_config("llama"), metadata=unnamed)
    config = config_of(header)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)
    assert eos_ids(header) == ()


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"general.architecture": "mamba"}, UnsupportedModelError, "'mamba' is not supported; known: llama"),
        ({"llama.expert_count": 8}, UnsupportedModelError, "mixtures of experts"),
        ({"llama.block_count": None}, CheckpointError, "key llama.block_count is missing"),
        ({"llama.attention.head_count": 0}, CheckpointError, "without heads"),
        ({"llama.embedding_length": "wide"}, CheckpointError, "no valid llama config"),
        ({"llama.attention.head_count_kv": [2, 1]}, UnsupportedModelError, "head_count_kv differs between layers"),
        ({"llama.attention.value_length": 8}, UnsupportedModelError, "different width"),
        ({"llama.rope.scaling.type": "odd"}, UnsupportedModelError, "rope scaling 'odd'"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_name(
    metadata: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    config = tiny_config("llama")
    if "general.architecture" in metadata:
        path = write_gguf(tmp_path / "model.gguf", config, {})
        path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
        header = read_header(path)
    else:
        header = header_of(tmp_path, config, metadata=metadata)
    with pytest.raises(error, match=message):
        config_of(header)


def test_equal_values_per_layer_are_one_value(tmp_path: Path) -> None:
    header = header_of(tmp_path, tiny_config("llama"), metadata={"llama.attention.head_count_kv": [2, 2]})
    assert config_of(header).num_key_value_heads == 2
