"""docs/writing-a-plugin.md as something to run: its blocks in order, each with what the line before it says.

```console           commands behind "$ ", then lines of what they print; "..." stands for anything
`PATH` holds         the block is part of the file
`PATH`:              the block is the whole file, to be written; a ```diff changes lines that stand there once
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "writing-a-plugin.md"
END = "end-of-a-command"


@dataclass(frozen=True)
class File:
    """A block about a file. how: "holds", "is" or "diff"."""

    path: str
    how: str
    text: str

    def apply(self, folder: Path) -> None:
        """Check or change the file, which lies below `folder`."""
        path = folder / self.path
        if self.how == "is":
            path.write_text(self.text)
            return
        now = path.read_text()
        if self.how == "holds":
            assert self.text in now, f"{self.path} does not hold:\n{self.text}"
            return
        lines = self.text.splitlines()
        assert all(line[:1] in ("", " ", "+", "-") for line in lines), self.text
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != sign) for sign in ("+", "-"))
        assert now.count(old) == 1, f"{self.path} has {now.count(old)} places that read:\n{old}"
        path.write_text(now.replace(old, new))


@dataclass(frozen=True)
class Command:
    """What stands behind "$ ", and the lines that it has to print, in this order, perhaps among others."""

    line: str
    printed: Sequence[str]

    @property
    def stays(self) -> bool:
        """Whether it goes on in the background."""
        return self.line.endswith("&")


Step = File | Command


def steps(page: Path = PAGE) -> Iterator[Step]:
    """All blocks of the page in order. Fails on one that is neither commands nor about a file."""
    before = ""
    lines = iter(page.read_text().splitlines())
    for line in lines:
        if not line.startswith("```"):
            before = line or before
            continue
        kind, body = line[3:], []
        while (text := next(lines)) != "```":
            body.append(text)
        if kind == "console":
            yield from commands(body)
            continue
        named = re.search(r"`([^`]+)`(:| holds)$", before)
        assert named is not None, f"what is to be done with the block behind {before!r}?"
        how = "diff" if kind == "diff" else "is" if named[2] == ":" else "holds"
        yield File(named[1], how, "".join(f"{text}\n" for text in body))


def commands(body: Sequence[str]) -> Iterator[Command]:
    """The commands of a block. One goes on in the next line while a quote is open."""
    position = 0
    while position < len(body):
        assert body[position].startswith("$ "), f"{body[position]!r} is printed by no command"
        line = body[position][2:]
        position += 1
        while not complete(line):
            line += "\n" + body[position]
            position += 1
        start = position
        while position < len(body) and not body[position].startswith("$ "):
            position += 1
        yield Command(line, body[start:position])


def complete(line: str) -> bool:
    try:
        shlex.split(line)
    except ValueError:
        return False
    return True


def fits(pattern: str, line: str) -> bool:
    """Whether a printed line is what the page shows. Runs of spaces are one."""
    parts = (re.escape(" ".join(part.split())) for part in pattern.split("..."))
    return re.fullmatch(".*".join(parts), " ".join(line.split())) is not None


class Shell:
    """One bash for all commands, as a reader has. Closing it ends whatever still runs."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._bash = subprocess.Popen(
            ["bash", "--norc"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._bash.stdout is not None
        for line in self._bash.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def run(self, command: Command, *, seconds: float = 900) -> None:
        """Run it to its end, or in the background until it has printed its lines."""
        self._write(command.line + "\n" + ("" if command.stays else f"printf '\\n%s %s\\n' {END} $?\n"))
        wanted, said = [line for line in command.printed if line.strip(" .")], []
        while True:
            line = self._lines.get(timeout=seconds)
            assert line is not None, "\n".join(["the shell has ended", *said])
            if line.startswith(END):
                assert line == f"{END} 0", "\n".join([f"{command.line!r} failed", *said])
                break
            said.append(line)
            if wanted and fits(wanted[0], line):
                del wanted[0]
            if command.stays and not wanted:
                break
        assert not wanted, "\n".join([f"{command.line!r} did not print {wanted[0]!r} but", *said])

    def folder(self) -> Path:
        """Where it stands."""
        return Path(os.readlink(f"/proc/{self._bash.pid}/cwd"))

    def _write(self, text: str) -> None:
        assert self._bash.stdin is not None
        self._bash.stdin.write(text)
        self._bash.stdin.flush()

    def close(self) -> None:
        try:
            os.killpg(self._bash.pid, signal.SIGTERM)
            self._bash.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):  # a server ends after its shell
                os.killpg(self._bash.pid, signal.SIGKILL)
        self._reader.join(60)
        for pipe in (self._bash.stdin, self._bash.stdout):
            assert pipe is not None
            pipe.close()
