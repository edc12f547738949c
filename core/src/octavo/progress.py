"""The progress bar of long work: requests offline, programs that are compiled before the first request."""

from __future__ import annotations

import sys
import time
from typing import Any

from octavo.outputs import RequestOutput

SHOW_AFTER_S = 1.0
"""Work shorter than this shows no bar."""


class ProgressBar:
    """Requests done and tokens a second, on stderr; nothing when stderr is no terminal or the work is short."""

    def __init__(self, num_requests: int | None, *, enabled: bool, title: str = "Generating") -> None:
        """num_requests: None where nobody knows how many will come; pieces of other work, if `title` names one."""
        self._num_requests = num_requests
        self._title = title
        self._enabled = enabled and sys.stderr.isatty()
        self._started = time.monotonic()
        self._num_done = 0
        self._num_tokens = 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, delta: RequestOutput) -> None:
        """Count what a delta brought."""
        if self._enabled:
            self.advance(requests=int(delta.finished), tokens=sum(len(output.token_ids) for output in delta.outputs))

    def advance(self, *, requests: int, tokens: int = 0) -> None:
        """Count requests that are done and tokens that came."""
        if not self._enabled:
            return
        self._num_done += requests
        self._num_tokens += tokens
        elapsed = time.monotonic() - self._started
        if elapsed < SHOW_AFTER_S:
            return
        self.show()
        speed = f"{self._num_tokens / elapsed:.1f} tokens/s" if self._num_tokens else ""
        self._bar.update(self._task, completed=self._num_done, speed=speed)

    def show(self) -> None:
        """Show the bar now: for work whose first piece takes long."""
        if not self._enabled or self._bar is not None:
            return
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            *progress.Progress.get_default_columns(),
            progress.TextColumn("{task.fields[speed]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(self._title, total=self._num_requests, speed="")
        self._bar.start()
