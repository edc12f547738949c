"""Read what a GGUF file says about itself: metadata and where each tensor lies. Imports no torch.

The format (ggml's `docs/gguf.md`), little-endian:

    "GGUF" | version u32 | number of tensors u64 | number of keys u64 | (key, type u32, value) ...
    | (tensor name, dims, type, offset) ... | padding | data

Strings are a u64 length and UTF-8; an array is its element type, a u64 length and the elements. This parser replaces
the `gguf` package's, which makes several objects per vocabulary entry and takes seconds where this takes a fraction.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from octavo.errors import CheckpointError

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type -> struct format. The two others:"""
STRING, ARRAY = 8, 9
VERSIONS = (2, 3)
MAX_DIMS = 4
PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor. shape: as torch has it, rows first. qtype: "F32", "Q4_1", ... . start, size: bytes in `path`."""

    name: str
    shape: tuple[int, ...]
    qtype: str
    path: Path
    start: int
    size: int


@dataclass(frozen=True, kw_only=True)
class GGUFHeader:
    """metadata: scalars, strings, and lists of either. tensors: in file order (all parts of a split file)."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]


def read_header(path: Path | str) -> GGUFHeader:
    """The header of a GGUF file; of a split one (`name-00001-of-00003.gguf`) all parts together.

    Raises CheckpointError naming the file that is missing, cut short or not GGUF.
    """
    path = Path(path)
    parts = [_read_one(part) for part in _parts(path)]
    tensors = [tensor for part in parts for tensor in part.tensors]
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise CheckpointError(f"tensor {tensor.name} occurs twice", path=str(tensor.path))
        seen.add(tensor.name)
    return GGUFHeader(path=path, metadata=parts[0].metadata, tensors=tuple(tensors))


def _parts(path: Path) -> list[Path]:
    split = PART.fullmatch(path.name)
    if split is None:
        return [path]
    count = int(split["count"])
    parts = [path.with_name(f"{split['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise CheckpointError(f"is one of {count} parts, these are missing: {', '.join(missing)}", path=str(path))
    return parts


def _read_one(path: Path) -> GGUFHeader:
    try:
        size = path.stat().st_size
        data = memoryview(np.memmap(path, dtype=np.uint8, mode="r") if size else b"")  # type: ignore[arg-type]
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", path=str(path)) from error
    try:
        return _Parser(data, path).header()
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise CheckpointError(
            f"the header is cut short or corrupt ({error}); download it again", path=str(path)
        ) from error


class _Parser:
    """A position in the file's bytes. Reading past the end is struct.error."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data = data
        self.path = path
        self.position = 0

    def header(self) -> GGUFHeader:
        if bytes(self.data[:4]) != b"GGUF":
            raise self.error("is not a GGUF file: it does not begin with 'GGUF'")
        self.position = 4
        version = self.scalar("I")
        if version & 0xFFFF == 0:
            raise self.error("is a big-endian GGUF file; convert it to little-endian")
        if version not in VERSIONS:
            raise self.error(f"is GGUF version {version}, known are {VERSIONS}; upgrade octavo or convert it again")
        num_tensors, num_keys = self.scalar("Q"), self.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            if key in metadata:
                raise self.error(f"key {key!r} occurs twice")
            metadata[key] = self.value(self.scalar("I"))
        entries = [self.tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self.error(f"general.alignment is {alignment!r}, it must be a positive integer")
        data_start = -(-self.position // alignment) * alignment
        tensors = tuple(self.place(*entry, data_start=data_start) for entry in entries)
        self.check_overlap(tensors)
        return GGUFHeader(path=self.path, metadata=metadata, tensors=tensors)

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(message, path=str(self.path))

    def scalar(self, fmt: str) -> Any:
        (value,) = struct.unpack_from("<" + fmt, self.data, self.position)
        self.position += struct.calcsize("<" + fmt)
        return value

    def string(self) -> str:
        (text,) = self.strings(1)
        return text

    def strings(self, count: int) -> Iterator[str]:
        # Half a million strings are usual (vocabulary and merges), so this loop has no calls it can spare.
        data, position, end = self.data, self.position, len(self.data)
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            (length,) = length_at(data, position)
            position += 8 + length
            if position > end:
                raise struct.error(f"a string of {length} bytes goes past the end")
            yield str(data[position - length : position], "utf-8")
        self.position = position

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise self.error(f"the header is corrupt: {kind} is no value type; download it again")
        element, count = self.scalar("I"), self.scalar("Q")
        if element == STRING:
            return list(self.strings(count))
        if element not in SCALARS:
            raise self.error(f"holds an array of type {element}, which is not supported")
        width = struct.calcsize("<" + SCALARS[element])
        if count * width > len(self.data) - self.position:
            raise struct.error(f"an array of {count} elements goes past the end")
        values = struct.unpack_from(f"<{count}{SCALARS[element]}", self.data, self.position)
        self.position += count * width
        return list(values)

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self.string(), self.scalar("I")
        if num_dims > MAX_DIMS:
            raise self.error(f"the header is corrupt: tensor {name!r} has {num_dims} dimensions; download it again")
        dims = tuple(self.scalar("Q") for _ in range(num_dims))
        return name, dims[::-1], self.scalar("I"), self.scalar("Q")

    def place(self, name: str, shape: tuple[int, ...], kind: int, offset: int, *, data_start: int) -> TensorInfo:
        try:
            qtype = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise self.error(f"tensor {name} is of unknown type {kind}; upgrade the gguf package") from None
        columns, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
        if shape and shape[-1] % columns:
            raise self.error(f"tensor {name} has rows of {shape[-1]}, not whole {qtype.name} blocks of {columns}")
        start, size = data_start + offset, math.prod(shape) // columns * block_bytes
        if start + size > len(self.data):
            raise self.error(
                f"is cut short: tensor {name} ends at byte {start + size}, the file at {len(self.data)}; "
                f"download it again"
            )
        return TensorInfo(name=name, shape=shape, qtype=qtype.name, path=self.path, start=start, size=size)

    def check_overlap(self, tensors: tuple[TensorInfo, ...]) -> None:
        placed = sorted((t for t in tensors if t.size), key=lambda t: t.start)
        for one, two in itertools.pairwise(placed):
            if one.start + one.size > two.start:
                raise self.error(f"is corrupt: tensors {one.name} and {two.name} overlap; download it again")
