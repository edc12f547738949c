"""What a run of the kit has found so far, on disk: a kernel that takes its process down takes no result along.

The process that tests adds a line as each test begins, reports and ends. If it dies, `run` notes that the test that was
running has failed and starts another, which goes on behind it. A test that takes too long dies too, by a watchdog that
needs no help of the interpreter.
"""

from __future__ import annotations

import faulthandler
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_DEATHS = 5
"""So often a process is started again; then the tests that are left are skipped."""


class Journal:
    """Lines of JSON: {"begin": what}, {"report": [test, seconds, outcome or "", message]}, {"end": what}. What a later
    process cannot know is in "state" of a report; "died" marks one that was written for a dead process.

    path: the file, read here; None: nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._hung = path.with_suffix(".hung") if path is not None else None
        text = path.read_text() if path is not None and path.exists() else ""
        self._lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def begin(self, what: str, *, seconds: float | None = None) -> None:
        """Something begins that may end the process. seconds: from then on it counts as hanging."""
        self._write({"begin": what})
        if self._hung is not None and seconds is not None:
            self._watchdog = self._hung.open("w")
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._watchdog)

    def report(self, test: str, seconds: float, outcome: str, message: str, **more: Any) -> None:
        self._write({"report": [test, seconds, outcome, message], **more})

    def end(self, what: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._write({"end": what})

    def reports(self) -> Iterator[tuple[str, float, str, str]]:
        """(test, seconds, outcome, message) of all that was reported, in order."""
        for line in self._lines:
            if "report" in line:
                test, seconds, outcome, message = line["report"]
                yield test, seconds, outcome, message

    @property
    def state(self) -> dict[str, Any]:
        """The last that was reported."""
        return next((line["state"] for line in reversed(self._lines) if "state" in line), {})

    @property
    def died(self) -> dict[str, str]:
        """What was running when a process died -> how it died."""
        return {line["report"][0]: line["report"][3] for line in self._lines if line.get("died")}

    @property
    def running(self) -> str:
        """What began and did not end."""
        turns = [line for line in self._lines if "report" not in line]
        return str(turns[-1].get("begin", "")) if turns else ""

    def bury(self, returncode: int) -> bool:
        """The process has ended without a report: note that what was running has failed.

        False if nothing was, or what did so before: then it is no use to go on.
        """
        what = self.running
        if not what or what in self.died:
            return False
        trace = self._hung.read_text() if self._hung is not None and self._hung.exists() else ""
        message = f"it hangs: {innermost(trace)}" if trace else f"the process died: {ending(returncode)}"
        self.report(what, 0.0, "failed", message, died=True)
        self.end(what)
        return True

    def _write(self, line: dict[str, Any]) -> None:
        self._lines.append(line)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def innermost(trace: str) -> str:
    """Of the main thread, the last of those that `faulthandler` tells of: how long it was given, and where it was."""
    limit = trace.partition("!")[0].replace("Timeout", "no end after")
    frames = trace.rpartition("(most recent call first):")[2].strip().splitlines()
    return f"{limit}, in {frames[0].strip()}" if frames else limit


def ending(returncode: int) -> str:
    """How a process ended, in words."""
    return f"signal {signal.Signals(-returncode).name}" if returncode < 0 else f"exit code {returncode}"
