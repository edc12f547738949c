"""What a person sees of long work."""

from __future__ import annotations

import io

import pytest

from octavo import progress
from octavo.progress import ProgressBar


class Terminal(io.StringIO):
    """A stderr that someone looks at."""

    def isatty(self) -> bool:
        return True


def look(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """In the test itself: pytest takes stderr anew when one begins."""
    made = Terminal()
    monkeypatch.setattr("sys.stderr", made)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.0)
    return made


def test_work_of_another_kind_is_named_and_counted_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = look(monkeypatch)
    with ProgressBar(4, enabled=True, title="Compiling") as bar:
        bar.show()
        assert "Compiling" in terminal.getvalue(), "before the first piece is done"
        bar.advance(requests=1)
    assert "25%" in terminal.getvalue()
    assert "tokens/s" not in terminal.getvalue()


def test_requests_are_shown_with_their_tokens_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = look(monkeypatch)
    with ProgressBar(2, enabled=True) as bar:
        bar.advance(requests=1, tokens=10)
    assert "Generating" in terminal.getvalue()
    assert "tokens/s" in terminal.getvalue()


def test_without_a_terminal_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = io.StringIO()
    monkeypatch.setattr("sys.stderr", quiet)
    with ProgressBar(1, enabled=True) as bar:
        bar.show()
        bar.advance(requests=1)
    assert quiet.getvalue() == ""
