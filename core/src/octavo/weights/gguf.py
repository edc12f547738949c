"""The tensors of a GGUF file under their Hugging Face names, as the Hugging Face model has them.

Quantized ones stay packed; what the converter changed in the contents (order of query and key rows, +1 on some norms)
is undone while reading, on packed rows too.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.quant import gguf_blocks
from octavo.weights.gguf_config import ARCHITECTURES, Architecture, architecture_of, get
from octavo.weights.gguf_header import GGUFHeader, TensorInfo, read_header
from octavo.weights.mapped import MappedTensor, map_file

PLAIN = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.(?P<stem>\w+)\.(?P<suffix>weight|bias)")
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_CONFIG = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
"""Tensors that are settings, not weights: `gguf_config` puts their numbers into the config."""


def open_tensors(path: Path | str) -> list[MappedTensor]:
    """All weights of the file (or of all parts of a split one), not yet read, in file order.

    A name without a Hugging Face counterpart is kept as it is, for the loader to report.
    Raises CheckpointError, or UnsupportedModelError for an unknown architecture.
    """
    header = read_header(path)
    arch = ARCHITECTURES[architecture_of(header)]
    files = {file: map_file(file) for file in {info.path for info in header.tensors}}
    infos = sorted((t for t in header.tensors if t.name not in IN_CONFIG), key=lambda t: (str(t.path), t.start))
    return [_tensor(info, arch, header, files[info.path]) for info in infos]


def block_types(header: GGUFHeader) -> dict[str, str]:
    """Hugging Face name of each quantized matrix, without ".weight" -> its block type. Raises UnsupportedModelError,
    naming file and tensor, for a type without a decoder."""
    arch, found = ARCHITECTURES[architecture_of(header)], {}
    for info in header.tensors:
        if info.qtype not in PLAIN:
            try:
                gguf_blocks.scheme(info.qtype)
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"{info.path}: tensor {info.name}: {error}") from None
            found[hugging_face_name(info.name, arch).removesuffix(".weight")] = info.qtype
    return found


def _tensor(info: TensorInfo, arch: Architecture, header: GGUFHeader, file: np.ndarray) -> MappedTensor:
    shape = info.shape
    if info.qtype not in PLAIN:
        columns, size = gguf_blocks.block_size(info.qtype)
        shape = (*shape[:-1], shape[-1] // columns * size)
    return MappedTensor(
        name=hugging_face_name(info.name, arch),
        shape=shape,
        dtype=PLAIN.get(info.qtype, torch.uint8),
        source=str(info.path),
        data=file[info.start : info.start + info.size],
        position=info.start,
        row_order=_row_order(info, arch, header),
        offset=-1.0 if arch.norms_plus_one and info.name.endswith("norm.weight") else 0.0,
    )


def hugging_face_name(name: str, arch: Architecture) -> str:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`; unknown names as they are."""
    if name in TOP:
        return TOP[name]
    parts = BLOCK.fullmatch(name)
    if parts is None or parts["stem"] not in arch.names:
        return name
    return f"model.layers.{parts['layer']}.{arch.names[parts['stem']]}.{parts['suffix']}"


def _row_order(info: TensorInfo, arch: Architecture, header: GGUFHeader) -> torch.Tensor | None:
    """Where the rows of the Hugging Face query or key matrix lie; None where they are in place.

    Llama's converter interleaves the two halves of each head, for the other way to write rotary embeddings:
    within a head of D rows, stored row 2 i + h holds row h D/2 + i.
    """
    parts = BLOCK.fullmatch(info.name)
    if not arch.interleaved_qk or parts is None or parts["stem"] not in ("attn_q", "attn_k"):
        return None
    heads = get(header, "attention.head_count")
    if parts["stem"] == "attn_k":
        heads = get(header, "attention.head_count_kv", heads)
    rows = info.shape[0] if info.shape else 1
    if rows % (2 * heads):
        raise CheckpointError(f"tensor {info.name} has {rows} rows for {heads} heads", path=str(info.path))
    return torch.arange(rows).reshape(heads, -1, 2).transpose(1, 2).reshape(-1)
