"""GGUF files written by the converter's rules read back as the Hugging Face model they came from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as gguf_package
import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.quant import gguf_blocks
from octavo.testing.gguf_files import write_gguf
from octavo.testing.tiny import tiny_config
from octavo.weights.gguf import open_tensors
from octavo.weights.gguf_config import ARCHITECTURES
from octavo.weights.mapped import MappedTensor
from octavo.weights.source import open_model

MODEL_TYPES = sorted({arch.model_type for arch in ARCHITECTURES.values()})
Writer = Callable[..., tuple[Path, dict[str, torch.Tensor]]]
"""Writes a random llama; gives the file and its Hugging Face state dict."""
Q = "model.layers.0.self_attn.q_proj.weight"


def random_model(model_type: str, **overrides: Any) -> tuple[PretrainedConfig, dict[str, torch.Tensor]]:
    config = tiny_config(model_type, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        state = {name: torch.randn_like(weight) for name, weight in model.state_dict().items()}
    return config, state


def by_name(path: Path) -> dict[str, MappedTensor]:
    return {tensor.name: tensor for tensor in open_tensors(path)}


@pytest.fixture
def llama(tmp_path: Path) -> Writer:
    def write(qtype: str = "F32", **settings: Any) -> tuple[Path, dict[str, torch.Tensor]]:
        config, state = random_model("llama")
        return write_gguf(tmp_path / "model.gguf", config, state, qtype=qtype, **settings), state

    return write


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_tensor_comes_back_under_its_name_with_its_contents(model_type: str, tmp_path: Path) -> None:
    tied = model_type.startswith("gemma")  # the converter knows no other Gemma
    config, state = random_model(model_type, tie_word_embeddings=tied)
    found = by_name(write_gguf(tmp_path / "model.gguf", config, state))
    assert set(found) == set(state) - ({"lm_head.weight"} if tied else set())
    for name, tensor in found.items():
        assert tensor.shape == tuple(state[name].shape)
        torch.testing.assert_close(tensor.read(), state[name], rtol=0, atol=1e-6)


def test_biases_of_queries_and_keys_are_put_in_order_too(tmp_path: Path) -> None:
    config, state = random_model("llama", attention_bias=True)
    found = by_name(write_gguf(tmp_path / "model.gguf", config, state))
    name = "model.layers.1.self_attn.k_proj.bias"
    assert torch.equal(found[name].read(), state[name])


@pytest.mark.parametrize("qtype", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_quantized_matrix_stays_packed_and_its_rows_are_in_hugging_face_order(qtype: str, llama: Writer) -> None:
    path, state = llama(qtype)
    tensor = by_name(path)[Q]
    columns, size = gguf_blocks.block_size(qtype)
    packed = tensor.read()
    assert open_model(path).quant_config["types"][Q.removesuffix(".weight")] == qtype
    assert packed.dtype == torch.uint8
    assert packed.shape == tensor.shape == (64, 64 // columns * size)
    # Quantizing row by row and ordering rows commute, so the bytes must be those of the quantized original.
    kind = gguf_package.GGMLQuantizationType[qtype]
    assert torch.equal(packed, torch.from_numpy(gguf_package.quantize(state[Q].numpy(), kind)))


@pytest.mark.parametrize("qtype", ["F16", "BF16"])
def test_half_precision_matrices_are_plain(qtype: str, llama: Writer) -> None:
    path, state = llama(qtype)
    tensor = by_name(path)[Q]
    assert open_model(path).quant_config is None
    assert tensor.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}[qtype]
    assert torch.equal(tensor.read(), state[Q].to(tensor.dtype))


@pytest.mark.parametrize("name", [Q, "model.layers.0.self_attn.v_proj.weight"])
def test_slices_of_rows_and_whole_blocks_of_columns_agree_with_the_whole(name: str, llama: Writer) -> None:
    path, _ = llama("Q8_0")
    tensor = by_name(path)[name]
    whole = tensor.read()
    assert torch.equal(tensor.read(start=5, length=9), whole[5:14])
    assert torch.equal(tensor.read(dim=0, start=20), whole[20:])
    assert torch.equal(tensor.read(dim=1, start=34, length=34), whole[:, 34:])
    assert torch.equal(tensor.read(dim=-1, start=0, length=34), whole[:, :34])
    assert tensor.read(start=3, length=0).shape == (0, 68)


def test_a_plain_matrix_can_be_cut_anywhere(llama: Writer) -> None:
    path, state = llama("F32")
    assert torch.equal(by_name(path)[Q].read(dim=1, start=3, length=7), state[Q][:, 3:10])


def test_rope_frequencies_are_no_weight_and_unknown_tensors_keep_their_name(llama: Writer) -> None:
    path, _ = llama(extra={"rope_freqs.weight": torch.ones(8), "blk.0.attn_sinks.weight": torch.ones(4)})
    names = set(by_name(path))
    assert not any("rope" in name for name in names)
    assert "blk.0.attn_sinks.weight" in names


def test_query_rows_that_the_heads_do_not_divide_are_an_error(llama: Writer) -> None:
    path, _ = llama(metadata={"llama.attention.head_count": 5})
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.attn_q\.weight has 64 rows for 5 heads"):
        open_tensors(path)


def test_tensors_come_in_file_order(llama: Writer) -> None:
    path, _ = llama("Q8_0")
    positions = [tensor.position for tensor in open_tensors(path)]
    assert positions == sorted(positions)


def test_writing_into_a_view_does_not_change_the_file(llama: Writer) -> None:
    path, state = llama("F32")
    by_name(path)["model.norm.weight"].read().zero_()
    assert torch.equal(by_name(path)["model.norm.weight"].read(), state["model.norm.weight"])


def test_a_block_type_without_decoder_is_named(llama: Writer) -> None:
    path, _ = llama("Q8_0", extra={"blk.0.last.weight": torch.zeros(2, 32)})
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.0.last.weight") + len(b"blk.0.last.weight") + 4 + 2 * 8
    assert data[at] == gguf_package.GGMLQuantizationType.F32
    data[at] = gguf_package.GGMLQuantizationType.Q8_1
    path.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.last\.weight: .*type Q8_1"):
        open_model(path)
