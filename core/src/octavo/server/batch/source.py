"""The input file of a batch, read as it is needed."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from octavo.errors import ConfigError

MAX_LINE_BYTES = 2**30
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def open_input(path: str) -> BinaryIO:
    """The input file, or standard input ("-"). Raises ConfigError."""
    if path == "-":
        return sys.stdin.buffer
    if path.startswith(("http://", "https://")):
        raise ConfigError(f"-i {path}: only files and - are read; fetch it first")
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise ConfigError(f"-i {path}: {error.strerror}") from None


def count_lines(file: BinaryIO) -> int | None:
    """Lines that are not blank; None for what can be read but once."""
    if not file.seekable():
        return None
    num_lines = sum(1 for data in file if data.strip())
    file.seek(0)
    return num_lines


async def numbered(file: BinaryIO) -> AsyncIterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1."""
    number = 0
    async for data in _lines(file):
        number += 1
        if number == 1:
            data = data.removeprefix(BYTE_ORDER_MARK)
        if data.strip():
            yield number, data


async def _lines(file: BinaryIO) -> AsyncIterator[bytes]:
    """A file's lines. A pipe or a terminal may keep us waiting, and what runs goes on meanwhile."""
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        for data in file:
            yield data
        return
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    try:
        while data := await reader.readline():
            yield data
    finally:
        transport.close()
