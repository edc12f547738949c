"""The output file of a batch: written line by line, and taken up again where an earlier run ended.

What an earlier run answered stays and is not asked again. A last line that was cut (the run was killed while it wrote
it) is removed, or gets its line break if nothing else is missing.
"""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from octavo.errors import ConfigError
from octavo.server.batch.lines import BatchResult

_encode = msgspec.json.Encoder().encode


class ResultFile:
    """An open output file. done_ids, done_lines: what it held when it was opened: custom ids, and the numbers of
    lines that were no requests."""

    def __init__(self, file: BinaryIO, *, done_ids: set[str], done_lines: set[int]) -> None:
        self._file = file
        self.done_ids = done_ids
        self.done_lines = done_lines

    def write(self, result: BatchResult) -> None:
        """Append a line. It is with the system when this returns, so that a killed run loses nothing."""
        self._file.write(_encode(result) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; standard output stays open."""
        if self._file is not sys.stdout.buffer:
            self._file.close()


def open_results(path: str) -> ResultFile:
    """Open an output file ("-": standard output) for more lines, repairing what a killed run left.

    Raises ConfigError if it cannot be written, is in use by another run, or holds something else.
    """
    if path == "-":
        return ResultFile(sys.stdout.buffer, done_ids=set(), done_lines=set())
    try:
        file = Path(path).open("a+b")  # noqa: SIM115 (closed by ResultFile)
    except OSError as error:
        raise ConfigError(f"-o {path}: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return ResultFile(file, **_take_up(file, path))
    except BlockingIOError:
        file.close()
        raise ConfigError(f"-o {path}: another run writes to this file") from None
    except BaseException:
        file.close()
        raise


def _take_up(file: BinaryIO, path: str) -> dict[str, Any]:
    """What is done in a file, which then ends with a whole line."""
    done_ids: set[str] = set()
    done_lines: set[int] = set()
    file.seek(0)
    end = 0
    for number, data in enumerate(file, start=1):
        whole = data.endswith(b"\n")
        if data.strip():
            try:
                result = msgspec.json.decode(data, type=BatchResult)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if not whole:
                    break
                raise ConfigError(f"-o {path}: line {number} is no answer of a batch ({error})") from None
            if result.error is not None and result.error.line is not None:
                done_lines.add(result.error.line)
            elif result.custom_id is not None:
                done_ids.add(result.custom_id)
        end += len(data)
        if not whole:
            file.write(b"\n")
            file.flush()
            end += 1
    file.truncate(end)
    return {"done_ids": done_ids, "done_lines": done_lines}
