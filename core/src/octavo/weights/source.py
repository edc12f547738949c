"""Find a model and say what it is: its config, its dtype, its tensors (headers only). Nothing is loaded here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig

from octavo.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from octavo.quant import gguf_blocks
from octavo.weights import gguf, gguf_config, safetensors
from octavo.weights.composite import text_part
from octavo.weights.config_classes import OWN
from octavo.weights.gguf_header import read_header
from octavo.weights.locate import locate
from octavo.weights.slots import CheckpointTensor

QUANT_KEYS = ("quantization_config", "compression_config")
QUANT_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that was found.

    path: the folder, or the .gguf file. kind: how its tensors are read; "dummy" draws them at random.
    config: of the decoder (the text part of a composite model). generation_config: as in its file, {} without one.
    dtype: of the checkpoint's plain tensors; bfloat16 for quantized GGUF. tokenizer_source: where its tokenizer is.
    eos_token_ids: every id that config, generation config or GGUF metadata name as an end.
    quant_config: the checkpoint's quantization config, as `octavo.plugin.QuantFormat` says; None if unquantized.
    composite: the checkpoint has more parts than the decoder; `tensors` gives the decoder's only.
    """

    path: Path
    kind: Literal["safetensors", "gguf", "dummy"]
    config: PretrainedConfig
    generation_config: dict[str, Any]
    dtype: torch.dtype
    tokenizer_source: Path
    eos_token_ids: tuple[int, ...]
    quant_config: dict[str, Any] | None = None
    composite: bool = False

    def tensors(self) -> list[CheckpointTensor]:
        """The checkpoint's tensors in file order under Hugging Face names, not yet read. Empty for "dummy".

        They hold the files mapped: drop them when done. Raises CheckpointError."""
        if self.kind == "gguf":
            return list(gguf.open_tensors(self.path))
        if self.kind == "dummy":
            return []
        tensors = safetensors.open_tensors(self.path)
        return list(text_part(tensors, path=str(self.path)) if self.composite else tensors)


def open_model(
    model: str | Path,
    *,
    revision: str | None = None,
    load_format: str = "auto",
    trust_remote_code: bool = False,
) -> ModelSource:
    """Find a model by folder, .gguf file, hub repository (`owner/name`, or `owner/name:Q4_K_M` for one of its GGUF
    files), or "" for the packaged demo model.

    Raises ModelNotFoundError saying what was tried, CheckpointError for a damaged file, UnsupportedModelError for an
    architecture without a config class, ConfigError for an unknown load_format.
    """
    path = locate(model, revision=revision, load_format=load_format, code=trust_remote_code)
    if path.is_file():
        return _from_gguf(path, dummy=load_format == "dummy")
    return _from_folder(path, dummy=load_format == "dummy", trust_remote_code=trust_remote_code)


def _from_gguf(file: Path, *, dummy: bool) -> ModelSource:
    header = read_header(file)
    config = gguf_config.config_of(header)
    types = {tensor.qtype for tensor in header.tensors}
    if types <= {"F32", "F16", "F64"}:
        dtype = torch.float16 if "F16" in types else torch.float32
    else:
        dtype = torch.bfloat16
    # Random blocks would have infinities for scales: without its weights a file is served as if it were plain.
    blocks = {} if dummy else gguf.block_types(header)
    return ModelSource(
        path=file,
        kind="dummy" if dummy else "gguf",
        config=config,
        generation_config={},
        dtype=dtype,
        tokenizer_source=file,
        eos_token_ids=gguf_config.eos_ids(header),
        quant_config={"quant_method": gguf_blocks.FAMILY, "types": blocks} if blocks else None,
    )


def _read_config(folder: Path, raw: Mapping[str, Any], *, trust_remote_code: bool) -> PretrainedConfig:
    """The config of a folder, of its own class if it brings one."""
    if raw.get("model_type") in OWN and not (trust_remote_code and "auto_map" in raw):
        return OWN[raw["model_type"]].from_pretrained(str(folder))
    from transformers import AutoConfig

    config: PretrainedConfig = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    return config


def _from_folder(folder: Path, *, dummy: bool, trust_remote_code: bool) -> ModelSource:
    raw = _read_json(folder / "config.json")
    if raw is None:
        tried = "config.json, *.gguf" if any(folder.iterdir()) else "the folder is empty; config.json, *.gguf"
        raise ModelNotFoundError(f"{folder} holds no model (looked for {tried})")
    try:
        whole = _read_config(folder, raw, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, ImportError) as error:
        raise UnsupportedModelError(f"{folder / 'config.json'}: {error}") from error
    except (OSError, TypeError, AttributeError, StrictDataclassError) as error:
        raise CheckpointError(f"is no usable config: {error}", path=str(folder / "config.json")) from error
    config = whole.get_text_config(decoder=True)
    generation = _read_json(folder / "generation_config.json") or {}
    tensors = [] if dummy else safetensors.open_tensors(folder)
    return ModelSource(
        path=folder,
        kind="dummy" if dummy else "safetensors",
        config=config,
        generation_config=generation,
        dtype=_dtype(config, whole, tensors),
        tokenizer_source=folder,
        eos_token_ids=_eos_ids(
            getattr(config, "eos_token_id", None),
            getattr(whole, "eos_token_id", None),
            generation.get("eos_token_id"),
        ),
        quant_config=_quant_config(folder, raw),
        composite=config is not whole,
    )


def _read_json(file: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file. Raises CheckpointError naming it."""
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"is not valid JSON ({error}); download it again", path=str(file)) from error
    if not isinstance(value, dict):
        raise CheckpointError("is not a JSON object; download it again", path=str(file))
    return value


def _dtype(config: PretrainedConfig, whole: PretrainedConfig, tensors: Iterable[CheckpointTensor]) -> torch.dtype:
    """As the config says; else that of the first matrix of floats; else bfloat16."""
    for said in (getattr(config, "dtype", None), getattr(whole, "dtype", None)):
        found = getattr(torch, said.removeprefix("torch."), None) if isinstance(said, str) else said
        if isinstance(found, torch.dtype):
            return found
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    return next((t.dtype for t in tensors if t.dtype in kinds and len(t.shape) > 1), torch.bfloat16)


def _eos_ids(*given: int | list[int] | None) -> tuple[int, ...]:
    ids = [number for ids in given if ids is not None for number in (ids if isinstance(ids, list) else [ids])]
    return tuple(dict.fromkeys(ids))


def _quant_config(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where the quantization tools put it: in the config, in its text part, or in a file beside it."""
    text = raw.get("text_config")
    for config in (raw, text if isinstance(text, Mapping) else {}):
        for key in QUANT_KEYS:
            if isinstance(config.get(key), Mapping):
                return dict(config[key])
    found = (_read_json(folder / name) for name in QUANT_FILES)
    return next((config for config in found if config), None)
