"""The tensors of a folder of safetensors files, checked from their headers alone.

A file is: header length u64 | header JSON {name: {dtype, shape, data_offsets}} | data. The header is checked here and
not by the library, because a bad one must name its file and its fault before any memory is taken.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.errors import CheckpointError
from octavo.weights.locate import INDEX, model_files
from octavo.weights.mapped import MappedTensor, map_file

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
MAX_HEADER = 100_000_000
"""Bytes; the limit that the format itself sets."""
SHARD = re.compile(r".*-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
AGAIN = "download it again"


def open_tensors(folder: Path) -> list[MappedTensor]:
    """All tensors of the model in `folder`, not yet read, in file order.

    Raises CheckpointError naming the file that is missing or bad, or that disagrees with the index.
    """
    if (folder / "model.safetensors").exists():
        return read_file(folder / "model.safetensors")
    if (folder / INDEX).exists():
        return _indexed(folder)
    files = model_files(folder)
    if not files:
        raise CheckpointError(_nothing(folder), path=str(folder))
    for file in files:
        if shard := SHARD.fullmatch(file.name):
            present = sum(1 for other in files if other.name.endswith(f"-of-{shard['count']}.safetensors"))
            if present != int(shard["count"]):
                raise CheckpointError(
                    f"is one of {int(shard['count'])} shards, only {present} are there; {AGAIN}", path=str(file)
                )
    tensors = [tensor for file in files for tensor in read_file(file)]
    seen: dict[str, str] = {}
    for tensor in tensors:
        if tensor.name in seen:
            raise CheckpointError(f"{tensor.name} is also in {seen[tensor.name]}", path=tensor.source)
        seen[tensor.name] = tensor.source
    return tensors


def _nothing(folder: Path) -> str:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        return (
            "holds only pickled weights (.bin, .pt), which can run code when loaded and are never read; "
            "convert them to safetensors"
        )
    return "holds no *.safetensors file with weights; finish the download, or use load_format=dummy for random ones"


def _indexed(folder: Path) -> list[MappedTensor]:
    """The shards that the index names; index and shards must say the same (a stale index is an error, not a hint)."""
    index = folder / INDEX
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        shard_of = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"is no index with a weight_map ({error!r}); {AGAIN}", path=str(index)) from error
    names = sorted(set(shard_of.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise CheckpointError(f"names a file outside of its folder: {outside[0]}", path=str(index))
    if missing := [name for name in names if not (folder / name).exists()]:
        raise CheckpointError(
            f"lists {len(names)} files, {len(missing)} of them are missing ({', '.join(missing[:10])}); the folder has "
            f"{len(model_files(folder))} safetensors files. Index and files disagree: download the missing ones, or "
            f"remove the index if it is left over from another version",
            path=str(index),
        )
    tensors = [tensor for name in names for tensor in read_file(folder / name)]
    found = {(tensor.name, Path(tensor.source).name) for tensor in tensors}
    wanted = set(shard_of.items())
    if found != wanted:
        lacking = [f"{tensor} in {file}" for tensor, file in sorted(wanted - found)]
        surplus = [f"{tensor} in {file}" for tensor, file in sorted(found - wanted)]
        raise CheckpointError(
            f"disagrees with the files: {len(lacking)} tensors it lists are not there ({', '.join(lacking[:10])}), "
            f"{len(surplus)} that are there it does not list ({', '.join(surplus[:10])}); {AGAIN}",
            path=str(index),
        )
    return tensors


def read_file(path: Path) -> list[MappedTensor]:
    """The tensors of one file in file order. Raises CheckpointError naming it."""
    data = map_file(path)
    header, data_start = _header(path, data)
    entries = sorted(
        (_entry(path, name, info, len(data) - data_start) for name, info in header.items() if name != "__metadata__"),
        key=lambda entry: entry[3:],
    )
    position = 0
    for name, _, _, start, end in entries:
        if start != position:
            what = "overlaps the tensor before it" if start < position else "leaves a gap before it"
            raise CheckpointError(f"is corrupt: {name} {what} (byte {start}, expected {position})", path=str(path))
        position = end
    if position != len(data) - data_start:
        raise CheckpointError(
            f"is corrupt: the tensors end at byte {data_start + position}, the file at {len(data)}; {AGAIN}",
            path=str(path),
        )
    return [
        MappedTensor(
            name=name,
            shape=shape,
            dtype=dtype,
            source=str(path),
            data=data[data_start + start : data_start + end],
            position=data_start + start,
        )
        for name, shape, dtype, start, end in entries
    ]


def _header(path: Path, data: np.ndarray) -> tuple[dict[str, Any], int]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(keys := dict(pairs)) != len(pairs):
            raise ValueError("a name occurs twice")
        return keys

    if len(data) < 8:
        raise CheckpointError(f"is cut short: {len(data)} bytes; {AGAIN}", path=str(path))
    length = int.from_bytes(data[:8].tobytes(), "little")
    if not 2 <= length <= MAX_HEADER or 8 + length > len(data):
        raise CheckpointError(
            f"is corrupt or cut short: its header claims {length} bytes, the file has {len(data)}; {AGAIN}",
            path=str(path),
        )
    try:
        header = json.loads(data[8 : 8 + length].tobytes(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is corrupt: its header is not valid JSON ({error}); {AGAIN}", path=str(path)) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"is corrupt: its header is not a JSON object; {AGAIN}", path=str(path))
    return header, 8 + length


def _entry(path: Path, name: str, info: Any, size: int) -> tuple[str, tuple[int, ...], torch.dtype, int, int]:
    """(name, shape, dtype, start, end), checked; start and end count from the beginning of the data."""
    try:
        kind, shape, (start, end) = str(info["dtype"]), tuple(info["shape"]), info["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"is corrupt: the entry of {name} is malformed ({error!r}); {AGAIN}", path=str(path)
        ) from error
    if kind not in DTYPES:
        raise CheckpointError(f"{name} has dtype {kind!r}; known: {', '.join(DTYPES)}", path=str(path))
    if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
        raise CheckpointError(f"is corrupt: {name} has shape {shape} and offsets {start}, {end}", path=str(path))
    if not start <= end <= size:
        raise CheckpointError(
            f"is corrupt or cut short: {name} lies at bytes {start} to {end} of {size} bytes of data; {AGAIN}",
            path=str(path),
        )
    if math.prod(shape) * DTYPES[kind].itemsize != end - start:
        raise CheckpointError(
            f"is corrupt: {name} of shape {list(shape)} and dtype {kind} cannot take {end - start} bytes",
            path=str(path),
        )
    return name, shape, DTYPES[kind], start, end
