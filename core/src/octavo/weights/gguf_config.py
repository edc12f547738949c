"""From GGUF metadata to the Hugging Face config of the same model.

One `Architecture` per GGUF architecture says how its tensors are called, what the converter changed in them, and which
config values it has beyond those of every decoder. Names of keys: ggml's `docs/gguf.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.weights.config_classes import config_class
from octavo.weights.gguf_header import GGUFHeader

REQUIRED = object()
Values = dict[str, Any]

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SANDWICH_NORMS = {**POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}


def get(header: GGUFHeader, key: str, default: Any = REQUIRED) -> Any:
    """The value of `<architecture>.<key>`. Raises CheckpointError if it is needed and missing, or differs by layer."""
    full = f"{architecture_of(header)}.{key}"
    value = header.metadata.get(full, default)
    if value is REQUIRED:
        raise CheckpointError(f"metadata key {full} is missing; convert the model again", path=str(header.path))
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UnsupportedModelError(f"{header.path}: {full} differs between layers, which is not supported")
        value = value[0]
    return value


def architecture_of(header: GGUFHeader) -> str:
    """The GGUF architecture, one of ARCHITECTURES. Raises UnsupportedModelError naming those."""
    name = header.metadata.get("general.architecture")
    if name is None:
        raise CheckpointError("metadata key general.architecture is missing; convert it again", path=str(header.path))
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.path}: GGUF architecture {name!r} is not supported; known: {', '.join(ARCHITECTURES)}"
        )
    return str(name)


def config_of(header: GGUFHeader) -> PretrainedConfig:
    """The config, with `rope_parameters["freq_factors"]` (floats, one per frequency; inv_freq is divided by them) if
    the file has them. Raises CheckpointError or UnsupportedModelError."""
    arch = ARCHITECTURES[architecture_of(header)]
    if get(header, "expert_count", 0):
        raise UnsupportedModelError(f"{header.path}: mixtures of experts in GGUF are not supported")
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if "token_embd.weight" not in shapes:
        raise CheckpointError("tensor token_embd.weight is missing; convert the model again", path=str(header.path))
    try:
        values = _common(header, shapes)
        values["rope_parameters"] = _rope(header, values["head_dim"])
        arch.extend(header, values)
        for setting, tensor in (("attention_bias", "attn_output.bias"), ("mlp_bias", "ffn_down.bias")):
            if hasattr(config_class(arch.model_type), setting):
                values[setting] = f"blk.0.{tensor}" in shapes
        config = config_class(arch.model_type)(**values)
    except (ValueError, TypeError, ZeroDivisionError, StrictDataclassError) as error:
        raise CheckpointError(
            f"its metadata gives no valid {arch.model_type} config: {error}", path=str(header.path)
        ) from error
    if (factors := _settings(header, "rope_freqs.weight")) is not None:
        config.rope_parameters["freq_factors"] = factors
    return config


def eos_ids(header: GGUFHeader) -> tuple[int, ...]:
    """The ids that end an answer: end of sequence, of turn and of message, as far as the file names them."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(header.metadata[key] for key in keys if key in header.metadata))


def _common(header: GGUFHeader, shapes: Mapping[str, tuple[int, ...]]) -> Values:
    heads = get(header, "attention.head_count")
    kv_heads = get(header, "attention.head_count_kv", heads)
    hidden = get(header, "embedding_length")
    if not heads or not kv_heads or not hidden:
        raise CheckpointError("its metadata gives a model without heads or width", path=str(header.path))
    head_dim = get(header, "attention.key_length", None)
    if head_dim is None:  # older files: only the matrices tell
        head_dim = shapes["blk.0.attn_k.weight"][0] // kv_heads if "blk.0.attn_k.weight" in shapes else hidden // heads
    if get(header, "attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{header.path}: keys and values of different width are not supported")
    tokenizer = {
        f"{ours}_token_id": header.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": get(header, "feed_forward_length"),
        "num_hidden_layers": get(header, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": get(header, "context_length"),
        "rms_norm_eps": get(header, "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in shapes,
        **tokenizer,
    }


def _rope(header: GGUFHeader, head_dim: int) -> Values:
    rope: Values = {"rope_type": "default", "rope_theta": get(header, "rope.freq_base", 10000.0)}
    rotated = get(header, "rope.dimension_count", head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    kind = get(header, "rope.scaling.type", "none")
    factor = get(header, "rope.scaling.factor", get(header, "rope.scale_linear", 1.0))
    if kind == "yarn":
        original = get(header, "rope.scaling.original_context_length")
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if (value := get(header, f"rope.scaling.{theirs}", None)) is not None:
                rope[ours] = value
        if (scale := get(header, "rope.scaling.attn_factor", None)) is not None and factor > 1:
            rope["attention_factor"] = scale * (1 + 0.1 * math.log(factor))  # the file has what comes on top
    elif kind == "linear" or (kind == "none" and factor not in (0.0, 1.0)):
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "longrope"):
        raise UnsupportedModelError(f"{header.path}: rope scaling {kind!r} is not supported")
    return rope


def _settings(header: GGUFHeader, name: str) -> list[float] | None:
    """The numbers of a float32 tensor that belongs to the config; None if the file has none of that name."""
    for tensor in header.tensors:
        if tensor.name == name:
            if tensor.qtype != "F32":
                raise CheckpointError(f"tensor {name} is {tensor.qtype}, expected F32", path=str(tensor.path))
            data = np.memmap(tensor.path, dtype=np.uint8, mode="r", offset=tensor.start, shape=(tensor.size,))
            return [float(x) for x in data.view("<f4")]
    return None


def _llama(header: GGUFHeader, values: Values) -> None:
    """Nothing beyond the common values."""


def _gemma2(header: GGUFHeader, values: Values) -> None:
    # Only the largest model scales queries by something else than the head's width, and no key says so.
    wide = values["num_hidden_layers"] == 46
    values["query_pre_attn_scalar"] = _width(values) if wide else values["head_dim"]
    values["sliding_window"] = get(header, "attention.sliding_window", 4096)
    values["attn_logit_softcapping"] = get(header, "attn_logit_softcapping", 50.0)
    values["final_logit_softcapping"] = get(header, "final_logit_softcapping", 30.0)


def _gemma3(header: GGUFHeader, values: Values) -> None:
    wide = values["num_hidden_layers"] == 62  # as in Gemma 2
    values["query_pre_attn_scalar"] = _width(values) if wide else values["head_dim"]
    values["sliding_window"] = get(header, "attention.sliding_window")
    values["final_logit_softcapping"] = get(header, "final_logit_softcapping", None)
    local = {"rope_type": "default", "rope_theta": get(header, "rope.freq_base_swa", 10000.0)}
    values["rope_parameters"] = {"full_attention": values["rope_parameters"], "sliding_attention": local}
    # Every sixth layer sees everything, unless the file says otherwise (a period, or a flag per layer).
    pattern = header.metadata.get("gemma3.attention.sliding_window_pattern", 6)
    layers = range(values["num_hidden_layers"])
    sliding = pattern if isinstance(pattern, list) else [(layer + 1) % pattern != 0 for layer in layers]
    values["layer_types"] = ["sliding_attention" if sliding[layer] else "full_attention" for layer in layers]


def _width(values: Values) -> int:
    return int(values["hidden_size"] // values["num_attention_heads"])


def _phi3(header: GGUFHeader, values: Values) -> None:
    rope = values["rope_parameters"]
    rope.setdefault("partial_rotary_factor", 1.0)
    values["sliding_window"] = get(header, "attention.sliding_window", None) or None
    original = get(header, "rope.scaling.original_context_length", values["max_position_embeddings"])
    values["original_max_position_embeddings"] = original
    long, short = (_settings(header, f"rope_factors_{kind}.weight") for kind in ("long", "short"))
    if long is not None and short is not None:
        rope |= {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        rope["original_max_position_embeddings"] = original
        if (scale := get(header, "rope.scaling.attn_factor", None)) is not None:
            rope["attention_factor"] = scale


def _granite(header: GGUFHeader, values: Values) -> None:
    values["attention_multiplier"] = get(header, "attention.scale")
    values["embedding_multiplier"] = get(header, "embedding_scale", 1.0)
    values["residual_multiplier"] = get(header, "residual_scale", 1.0)
    values["logits_scaling"] = get(header, "logit_scale", 1.0)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How one GGUF architecture relates to its Hugging Face model.

    names: tensor of a block -> its Hugging Face name within the layer. interleaved_qk: the converter reordered the
    rows of queries and keys. norms_plus_one: norm weights are stored as 1 + w. extend: adds config values.
    """

    model_type: str
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    interleaved_qk: bool = False
    norms_plus_one: bool = False
    extend: Callable[[GGUFHeader, Values], None] = _llama


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(model_type="llama", interleaved_qk=True),  # Mistral's files say "llama" too
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3", names=NAMES | QK_NORMS),
    "gemma": Architecture(model_type="gemma", norms_plus_one=True),
    "gemma2": Architecture(model_type="gemma2", names=NAMES | SANDWICH_NORMS, norms_plus_one=True, extend=_gemma2),
    "gemma3": Architecture(
        model_type="gemma3_text", names=NAMES | QK_NORMS | SANDWICH_NORMS, norms_plus_one=True, extend=_gemma3
    ),
    "phi3": Architecture(
        model_type="phi3",
        names=NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        extend=_phi3,
    ),
    "granite": Architecture(model_type="granite", interleaved_qk=True, extend=_granite),
    "smollm3": Architecture(model_type="smollm3", interleaved_qk=True),
    "olmo2": Architecture(model_type="olmo2", names=NAMES | QK_NORMS | POST_NORMS),
}
