"""The packaged real models read as transformers reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from octavo.errors import OctavoError
from octavo.extensions import load_extensions
from octavo.plugin import MatrixSpec, QuantLayer
from octavo.plugin.torch import dequantize_weight
from octavo.quant.formats import layers_of
from octavo.testing.real_models import gemma3_gguf, smollm2_gguf
from octavo.weights.loader import load
from octavo.weights.slots import CheckpointTensor, Slot, WeightTable
from octavo.weights.source import ModelSource, open_model

pytestmark = pytest.mark.real_model
NOT_THE_MODEL = {"_name_or_path", "_model_name_or_path", "quantization_config", "dtype", "unk_token_id"}


def found(model: Callable[[], Path]) -> Path:
    try:
        return model()
    except (OctavoError, FileNotFoundError) as error:
        pytest.skip(str(error))


def state_dict(config: PretrainedConfig) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    return untied(model.state_dict(), config)


def untied(weights: Mapping[str, torch.Tensor], config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Without the head of a tied model, which is the embedding again and has no place in a file."""
    return {name: w for name, w in weights.items() if not (config.tie_word_embeddings and name == "lm_head.weight")}


def layers(source: ModelSource, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, QuantLayer]:
    """How the file keeps the matrices that are not plain."""
    found, keeps = {}, layers_of(load_extensions().quant_formats, source.quant_config)
    for name, shape in shapes.items():
        if len(shape) == 2:
            spec = MatrixSpec(
                name=name.removesuffix(".weight"), kind="linear", out_features=shape[0], in_features=shape[1]
            )
            if layer := keeps(spec):
                found[name] = layer
    return found


def table_of(
    shapes: dict[str, tuple[int, ...]], packed: Mapping[str, QuantLayer], keep: Callable[[str, CheckpointTensor], None]
) -> WeightTable:
    table = WeightTable()
    for name, shape in shapes.items():
        stored = packed[name].tensors["weight"].shape if name in packed else shape
        table.add(name, Slot(shape=stored, load=partial(keep, name)))
    return table


@pytest.mark.parametrize("model", [smollm2_gguf, gemma3_gguf])
def test_every_weight_of_the_hugging_face_model_is_there_in_its_shape(model: Callable[[], Path]) -> None:
    source = open_model(found(model))
    seen: dict[str, torch.Size] = {}
    shapes = {name: tuple(tensor.shape) for name, tensor in state_dict(source.config).items()}
    table = table_of(shapes, layers(source, shapes), lambda name, t: seen.update({name: t.read(length=1).shape}))
    load(table, source)
    assert seen.keys() == shapes.keys()


def test_smollm2_says_what_it_is() -> None:
    source = open_model(found(smollm2_gguf))
    config = source.config
    assert config.model_type == "llama"
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert config.tie_word_embeddings
    assert source.dtype == torch.bfloat16
    assert source.eos_token_ids == (2,)
    assert source.quant_config is not None
    assert set(source.quant_config["types"].values()) == {"Q4_1", "Q8_0"}


@pytest.mark.slow
@pytest.mark.timeout(1800)  # transformers takes minutes to read the larger one
@pytest.mark.parametrize("model", [smollm2_gguf, gemma3_gguf])
def test_config_and_every_number_equal_those_that_transformers_reads(model: Callable[[], Path]) -> None:
    file = found(model)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    source: ModelSource = open_model(file)
    ours, expected = (
        {key: value for key, value in config.to_dict().items() if key not in NOT_THE_MODEL}
        for config in (source.config, theirs.config)
    )
    assert ours == expected
    weights = untied(theirs.state_dict(), source.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    different, packed = list[str](), layers(source, shapes)

    def compare(name: str, tensor: CheckpointTensor) -> None:
        raw = tensor.read()
        if name in packed:
            raw = dequantize_weight({"weight": raw}, packed[name].scheme, torch.float32)
        if not torch.equal(raw, weights[name]):
            different.append(name)

    load(table_of(shapes, packed, compare), source)
    assert different == []
