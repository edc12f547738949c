"""A GGUF file as a plain checkpoint, which every engine reads alike and `--quantization fp8` can quantize."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.quant import gguf_blocks
from octavo.weights.source import open_model


def unpack(model: str | Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write config and weights of `model` ("" is the packaged SmolLM2) into `folder`; the tokenizer stays in the
    file. Returns the folder."""
    source = open_model(model)
    weights, types = {}, (source.quant_config or {"types": {}})["types"]
    for tensor in source.tensors():
        data = tensor.read()
        if kind := types.get(tensor.name.removesuffix(".weight")):
            data = gguf_blocks.dequantize(data, kind, dtype)
        weights[tensor.name] = data.to(dtype).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    source.config.dtype = dtype
    source.config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[source.config.model_type]]
    source.config.save_pretrained(folder)
    return folder
