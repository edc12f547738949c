"""Every native model against transformers' eager one: equal logits at every position of a ragged, chunked run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.models.registry import MODELS

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases and a tied head": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama with one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama with heads that do not fill the hidden size": ("llama", {"head_dim": 24}),
    "llama with llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama with linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama with yarn rope": ("llama", {"rope_parameters": YARN}),
    "llama with gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2 with sliding upper layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "gemma3 with linear rope on its full layers": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "final_logit_softcapping": 20.0,
        },
    ),
    "phi3 with a partial rotation": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "granite with multipliers": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
        },
    ),
    "smollm3 that slides where it does not rotate": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 4},
    ),
}


def longrope(factor_of_long: float) -> dict[str, Any]:
    return {
        "max_position_embeddings": 128,
        "original_max_position_embeddings": 8,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [factor_of_long + i for i in range(8)],
            "original_max_position_embeddings": 8,
        },
    }


@torch.inference_mode()
def expected(folder: Any, prompts: list[list[int]], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()
    return [model(torch.tensor([tokens])).logits[0].float() for tokens in prompts]


def worst(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return max(float((g - w).abs().max()) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("model_type", sorted(MODELS))
def test_logits_of_a_ragged_chunked_run_equal_transformers(model_type, tiny_folder, paged, prompts):
    folder = tiny_folder(model_type)
    want = expected(folder, prompts)
    assert max(float(w.std()) for w in want) > 0.2, "logits this flat would hide mistakes"
    assert worst(paged(folder).run(prompts), want) < 1e-4


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_config_variants_equal_transformers(name, tiny_folder, paged, prompts):
    model_type, overrides = VARIANTS[name]
    folder = tiny_folder(model_type, **overrides)
    assert worst(paged(folder).run(prompts), expected(folder, prompts)) < 1e-4


@pytest.mark.parametrize("max_model_len", [8, 128])
def test_longrope_takes_the_factors_for_the_longest_sequence_served(max_model_len, tiny_folder, paged):
    folder = tiny_folder("phi3", num_attention_heads=4, num_key_value_heads=2, **longrope(4.0))
    tokens = list(range(3, 3 + (8 if max_model_len == 8 else 40)))
    got = paged(folder, max_model_len=max_model_len).run([tokens])
    assert worst(got, expected(folder, [tokens])) < 1e-4


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gemma3_text", "olmo2"])
def test_bfloat16_logits_stay_near_those_of_transformers(model_type, tiny_folder, paged, prompts):
    folder = tiny_folder(model_type)
    exact = expected(folder, prompts)
    theirs = worst(expected(folder, prompts, torch.bfloat16), exact)
    ours = worst(paged(folder, dtype=torch.bfloat16).run(prompts), exact)
    assert ours < 2 * theirs, f"our rounding error {ours} against {theirs}"


def test_a_window_longer_than_every_sequence_shares_the_group_of_full_attention(tiny_folder, paged, prompts):
    folder = tiny_folder("gemma3_text", sliding_window=100)
    model = paged(folder, max_model_len=64)
    assert [spec.kind for spec in model.groups] == ["full"]
    assert worst(model.run(prompts), expected(folder, prompts)) < 1e-4


def test_layers_of_both_kinds_get_a_group_each(tiny_folder, paged):
    model = paged(tiny_folder("gemma2", num_hidden_layers=4))
    assert [spec.kind for spec in model.groups] == ["sliding", "full"]
    assert model.ctx.attention.layers_of_kv(0) == [0, 2]
