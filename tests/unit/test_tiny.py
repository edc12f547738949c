"""Tiny models: every family loads in Transformers, the seed decides, and greedy output varies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.errors import UnsupportedModelError
from octavo.testing.tiny import make_model, make_tokenizer, tiny_config

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "granite",
    "smollm3",
    "olmo2",
)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_written_and_greedy_output_varies(tmp_path: Path, model_type: str) -> None:
    make_model(tmp_path, model_type)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == model_type
    assert sum(p.numel() for p in model.parameters()) < 400_000
    ids = torch.tensor([[5, 6, 7, 8]])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    assert len(set(output[0, 4:].tolist())) >= 5


def test_windows_and_mixed_layers_are_small_enough_to_be_crossed() -> None:
    assert tiny_config("gemma3_text").layer_types == ["sliding_attention", "full_attention"]
    assert tiny_config("gemma2", num_hidden_layers=3).layer_types[2] == "sliding_attention"
    assert tiny_config("mistral").sliding_window == 8
    assert tiny_config("smollm3").no_rope_layers == [1, 0]


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    files = [make_model(tmp_path / str(i), seed=seed) / "model.safetensors" for i, seed in enumerate((3, 3, 4))]
    first, same, other = (file.read_bytes() for file in files)
    assert first == same
    assert first != other


def test_dtype_and_overrides_reach_the_files(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", dtype=torch.bfloat16, num_hidden_layers=3, tie_word_embeddings=True, tokenizer=False)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["dtype"], config["num_hidden_layers"], config["tie_word_embeddings"]) == ("bfloat16", 3, True)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2
    assert not (tmp_path / "tokenizer.json").exists()


def test_unknown_model_type_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="no_such_model"):
        tiny_config("no_such_model")


def test_training_a_tokenizer_twice_gives_the_same_file(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "a")
    make_tokenizer(tmp_path / "b")
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()


def test_transformers_reads_the_tokenizer_with_its_chat_template(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, bos=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id) == (384, 0, 2)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_vocabulary_that_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="5000"):
        make_tokenizer(tmp_path, vocab_size=5000)
