"""Files of models as users have them: what is damaged is refused by its name, what is odd is served as its twin is."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from octavo.errors import CheckpointError
from octavo.testing.gguf_files import write_gguf
from octavo.testing.tiny import make_model

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
PROMPT = [30, 31, 32, 33, 40]
GREEDY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


async def answer(server: Any) -> list[int]:
    ids: list[int] = (await server.both(PATH, GREEDY))["choices"][0]["token_ids"]
    return ids


def reference(model: torch.nn.Module) -> list[int]:
    """What transformers says."""
    with torch.inference_mode():
        ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=-1)
    return ids[0, len(PROMPT) :].tolist()


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:100], "header claims"),
        (lambda data: data[:-4], "cut short"),
        (lambda data: b"", "the file is empty"),
        (lambda data: struct.pack("<Q", 0) + data[8:], "header claims 0 bytes"),
        (lambda data: struct.pack("<Q", 2**60) + data[8:], f"header claims {2**60} bytes"),
        (lambda data: data[:8] + b"\xff\xfe" + data[10:], "not valid JSON"),
    ],
)
async def test_case_H1_a_damaged_file_is_refused_by_name_and_served_when_whole(serve_model, tmp_path, damage, message):
    folder = make_model(tmp_path / "model", "llama")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    with pytest.raises(CheckpointError, match=message) as caught:
        await serve_model(folder)
    assert caught.value.path == str(file)
    file.write_bytes(whole)
    assert await answer(await serve_model(folder)) == reference(load(folder))


async def test_case_H2_an_index_of_absent_shards_is_refused_by_name_and_served_when_right(serve_model, tmp_path):
    folder = make_model(tmp_path / "model", "llama")
    expected, tensors = reference(load(folder)), load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{part:05}-of-00002.safetensors" for part in (1, 2)]
    weight_map = {name: names[at % 2] for at, name in enumerate(tensors)}
    for name in names:
        part = {key: value for key, value in tensors.items() if weight_map[key] == name}
        save_file(part, folder / name, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    stale = weight_map | {f"x{part}": f"model-{part:05}-of-00030.safetensors" for part in range(1, 31)}
    index.write_text(json.dumps({"weight_map": stale}))
    with pytest.raises(CheckpointError, match=r"lists 32 files, 30 of them are missing.*has 2") as caught:
        await serve_model(folder)
    assert caught.value.path == str(index)
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert await answer(await serve_model(folder)) == expected


@pytest.mark.parametrize("shape", [(0,), (0, 64), (4, 0)])
async def test_case_H4_a_tensor_without_elements_changes_nothing(serve_model, tmp_path, shape):
    folder = make_model(tmp_path / "model", "llama")
    expected, file = reference(load(folder)), folder / "model.safetensors"
    empty = {"model.layers.0.self_attn.unused": torch.empty(shape)}
    save_file(load_file(file) | empty, file, metadata={"format": "pt"})
    assert await answer(await serve_model(folder)) == expected


async def test_case_H5_a_gguf_file_without_output_weight_uses_the_embedding(serve_model, tmp_path):
    model = load(make_model(tmp_path / "model", "llama", tokenizer=False, tie_word_embeddings=True))
    path = write_gguf(tmp_path / "model.gguf", model.config, model.state_dict())
    assert await answer(await serve_model(path, skip_tokenizer_init=True)) == reference(model)


async def test_case_H6_rope_frequencies_of_a_gguf_file_are_honoured(serve_model, tmp_path):
    model = load(make_model(tmp_path / "model", "llama", tokenizer=False))
    factors = torch.tensor([1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 8.0])
    path = write_gguf(tmp_path / "model.gguf", model.config, model.state_dict(), extra={"rope_freqs.weight": factors})
    plain = reference(model)
    model.model.rotary_emb.inv_freq /= factors
    scaled = reference(model)
    assert plain != scaled, "the factors matter"
    assert await answer(await serve_model(path, skip_tokenizer_init=True)) == scaled
