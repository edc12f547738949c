"""Files whose tensors are not one to one those of a model: logits as of the model they came from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from octavo.testing.gguf_files import write_gguf
from octavo.testing.tiny import make_model

FACTORS = torch.tensor([1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 8.0])


def logits_of(model: torch.nn.Module, prompts: list[list[int]]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [model(torch.tensor([tokens])).logits[0] for tokens in prompts]


def assert_close(paged, path: Path, model: torch.nn.Module, prompts: list[list[int]]) -> None:
    for got, want in zip(paged(path).run(prompts), logits_of(model, prompts), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-4 * float(want.std()))


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_a_file_without_output_weight_has_the_logits_of_the_tied_model(
    model_type: str, paged, prompts, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / model_type, model_type, tokenizer=False, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    path = write_gguf(tmp_path / "model.gguf", model.config, model.state_dict())
    assert "output.weight" not in {tensor.name for tensor in GGUFReader(path).tensors}
    assert_close(paged, path, model, prompts)


def test_rope_frequencies_of_the_file_are_honoured(paged, prompts, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "llama", "llama", tokenizer=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    path = write_gguf(tmp_path / "model.gguf", model.config, model.state_dict(), extra={"rope_freqs.weight": FACTORS})
    plain = logits_of(model, prompts)
    model.model.rotary_emb.inv_freq /= FACTORS
    assert not torch.allclose(plain[0], logits_of(model, prompts)[0], atol=1e-2), "the factors matter"
    assert_close(paged, path, model, prompts)


@pytest.mark.parametrize("shape", [(0,), (0, 64), (4, 0)])
def test_a_tensor_without_elements_does_not_break_loading(
    shape: tuple[int, ...], paged, prompts, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "llama", "llama", tokenizer=False)
    expected = [part.clone() for part in paged(folder).run(prompts)]
    file = folder / "model.safetensors"
    save_file(
        load_file(file) | {"model.layers.0.self_attn.unused": torch.empty(shape)}, file, metadata={"format": "pt"}
    )
    for got, want in zip(paged(folder).run(prompts), expected, strict=True):
        torch.testing.assert_close(got, want)
