"""The key-value part of a GGUF file, read in one pass: a vocabulary of 260,000 tokens takes a fraction of a second.

Format: magic, version, tensor count, pair count, then pairs of (key, type, value), all little-endian; see the GGUF
specification in the ggml project. Versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import CheckpointError

NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
STRING, ARRAY = 8, 9


def read_gguf_metadata(path: Path, *, keep: Callable[[str], bool] = lambda key: True) -> dict[str, Any]:
    """Metadata by key: numbers, strings, numpy arrays of numbers, lists of strings. Keys that `keep` refuses are left
    out. Raises CheckpointError naming the file if it is not a GGUF file, is cut or is corrupt."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).pairs(keep)
    except (struct.error, ValueError, IndexError, KeyError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"is not a sound GGUF file: {error}", path=str(path)) from error
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error}", path=str(path)) from error


class _Reader:
    """A position in the file. Every read past the end raises struct.error or ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def pairs(self, keep: Callable[[str], bool]) -> dict[str, Any]:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with the letters GGUF")
        self._at = 4
        (version,) = self._unpack("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported (2 and 3 are; big-endian files are not)")
        _, num_pairs = self._unpack("<QQ")
        found = {}
        for _ in range(num_pairs):
            key = self._string()
            (kind,) = self._unpack("<I")
            value = self._value(kind, key, wanted=keep(key))
            if value is not None:
                found[key] = value
        return found

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        end = self._at + length
        if end > len(self._data):
            raise ValueError(f"a string of {length} bytes reaches beyond the end of the file")
        text = self._data[self._at : end].decode()
        self._at = end
        return text

    def _value(self, kind: int, key: str, *, wanted: bool) -> Any:
        if kind == STRING:
            text = self._string()
            return text if wanted else None
        if kind == ARRAY:
            return self._array(key, wanted=wanted)
        if kind not in NUMBERS:
            raise ValueError(f"{key} has the unknown type {kind}")
        value = self._numbers(NUMBERS[kind], 1)[0].item()
        return value if wanted else None

    def _array(self, key: str, *, wanted: bool) -> Any:
        kind, length = self._unpack("<IQ")
        if kind == STRING:
            texts = self._strings(length, wanted=wanted)
            return texts if wanted else None
        if kind in NUMBERS:
            numbers = self._numbers(NUMBERS[kind], length)
            return numbers if wanted else None
        if kind == ARRAY:
            values = [self._array(key, wanted=True) for _ in range(length)]
            return values if wanted else None
        raise ValueError(f"{key} holds values of the unknown type {kind}")

    def _strings(self, length: int, *, wanted: bool) -> list[str]:
        # The hot loop: kept free of calls, because a vocabulary and its merges are half a million strings.
        data, at, unpack = self._data, self._at, struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(length):
            begin = at + 8
            at = begin + unpack(data, at)[0]
            if at > len(data):
                raise ValueError("a string reaches beyond the end of the file")
            if wanted:
                texts.append(data[begin:at].decode())
        self._at = at
        return texts

    def _numbers(self, dtype: str, length: int) -> np.ndarray:
        size = np.dtype(dtype).itemsize * length
        if self._at + size > len(self._data):
            raise ValueError(f"an array of {length} numbers reaches beyond the end of the file")
        numbers = np.frombuffer(self._data[self._at : self._at + size], dtype=dtype)
        self._at += size
        return numbers
