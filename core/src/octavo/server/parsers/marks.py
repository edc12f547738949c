"""Finds a format's marks in text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Marks:
    """A set of marks: the first one in the text, the longest of those that begin there."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(texts)
        self._longest = max(map(len, self.texts), default=0)
        self._prefixes = frozenset(text[:end] for text in self.texts for end in range(1, len(text)))
        ordered = sorted(self.texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")

    def find(self, text: str, *, final: bool) -> tuple[int, str | None]:
        """(where the first mark begins, the mark), or (where the text to hold back begins, None).

        Held back is only a suffix that may become a mark, and nothing if the text is `final`. A mark at the end of
        which a longer one may yet come is held back too: how the text is split must not decide which of them it is.
        """
        found = self._pattern.search(text)
        hold = len(text) if final else self._unfinished(text)
        if found is not None and found.start() < hold:
            return found.start(), found.group()
        return hold, None

    def at_start(self, text: str, *, final: bool) -> str | None:
        """The mark that the text begins with, "" if it begins with none, None if more text must come to tell."""
        start, mark = self.find(text, final=final)
        if start > 0:
            return ""
        return mark if mark is not None or text else ""

    def _unfinished(self, text: str) -> int:
        """Where the longest suffix begins that is the beginning of a mark, and not all of it."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length:] in self._prefixes:
                return len(text) - length
        return len(text)
