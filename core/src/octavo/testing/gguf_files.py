"""Write a small GGUF file from a Hugging Face model, for tests: what llama.cpp's converter and quantizer would make.

Row orders and norm offsets are computed here by the converter's own formulas, and names come from the `gguf` package,
so that reading such a file back tests `octavo.weights.gguf` against another hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PretrainedConfig

ARCHITECTURES = {"gemma3_text": "gemma3", "mistral": "llama"}
"""Model types whose GGUF architecture has another name."""
INTERLEAVED = ("llama", "granite", "smollm3")
NORMS_PLUS_ONE = ("gemma", "gemma2", "gemma3")


def write_gguf(
    path: Path,
    config: PretrainedConfig,
    tensors: Mapping[str, torch.Tensor],
    *,
    qtype: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write `tensors` (a Hugging Face state dict) and what `config` says to `path`, and return it.

    qtype: of matrices; vectors stay F32. metadata: more keys, or other values for those written; None drops a key.
    extra: tensors under their GGUF names, written as F32.
    """
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (_metadata(arch, config) | dict(metadata or {})).items():
        if value is not None:
            _add(writer, key, value)
    (arch_id,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(arch_id, config.num_hidden_layers)
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, f"gguf has no name for {name} in {arch}"
        data = _converted(name, tensor.float().numpy(), arch, config)
        kind = gguf.GGMLQuantizationType[qtype if data.ndim > 1 else "F32"]
        packed = data if kind.name == "F32" else gguf.quantize(data, kind)
        writer.add_tensor(stored, packed, raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _converted(name: str, data: np.ndarray, arch: str, config: PretrainedConfig) -> np.ndarray:
    if arch in NORMS_PLUS_ONE and name.endswith("norm.weight"):
        return data + 1
    if arch in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = data.reshape(heads, 2, len(data) // heads // 2, *data.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(data.shape))
    return data


def _metadata(arch: str, config: PretrainedConfig) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "attention.scale": getattr(config, "attention_multiplier", None),
        "embedding_scale": getattr(config, "embedding_multiplier", None),
        "residual_scale": getattr(config, "residual_multiplier", None),
        "logit_scale": getattr(config, "logits_scaling", None),
        **_rope(config, head_dim),
    }
    ids = {"bos": config.bos_token_id, "eos": config.eos_token_id, "padding": config.pad_token_id}
    tokenizer = {f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items()}
    return {f"{arch}.{key}": value for key, value in keys.items()} | tokenizer


def _rope(config: PretrainedConfig, head_dim: int) -> dict[str, Any]:
    rope = config.rope_parameters
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    keys = {
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.freq_base_swa": float(local["rope_theta"]) if local else None,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        keys["rope.scaling.type"] = rope["rope_type"]
        keys["rope.scaling.factor"] = float(rope["factor"])
        keys["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    return keys


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    add = adders.get(type(value)) or writer.add_array
    add(key, value)
