"""Tokens to text while they come: never half a character, never half a stop string.

The joined pieces of a stream are exactly the text of all ids decoded at once. Bytes that are not UTF-8 become U+FFFD,
one for each maximal ill-formed part (Unicode 3.9, table 3-8), whether streamed or not; a character that is unfinished
when the stream ends becomes one U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text of one growing sequence of tokens."""

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens and return the text that is now final (perhaps none)."""

    def finish(self) -> str:
        """No more tokens come: return what was held back."""


class ByteDetokenizer:
    """For vocabularies whose tokens are bytes. Constant work per token.

    token_bytes: id -> bytes. strip_first: the text's first space was put there by the tokenizer and is dropped.
    prompt_ids: tokens before the first one pushed. Their text is not returned, but a character that they leave
    unfinished is, once it is whole; and text after a visible prompt keeps its first space.
    """

    def __init__(
        self, token_bytes: Mapping[int, bytes], *, strip_first: bool = False, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._token_bytes = token_bytes
        self._at_start = strip_first
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        if len(prompt_ids):
            # An unfinished character has at most 3 bytes, so the last 4 visible tokens fix the state.
            tail: list[bytes] = []
            for token_id in reversed(prompt_ids):
                if data := token_bytes[token_id]:
                    tail.append(data)
                    if len(tail) == 4:
                        break
            self._at_start = strip_first and not tail
            self._decoder.decode(b"".join(reversed(tail)))

    def push(self, ids: Sequence[int]) -> str:
        table = self._token_bytes
        data = b"".join([table[i] for i in ids])
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For any other tokenizer: decodes a short window before and after each new token and returns the difference.

    Text that ends in U+FFFD may be half a character, so it waits, but for at most `MAX_HELD` tokens. So may the end of
    a prompt be: such an end counts as not yet shown.
    """

    MAX_HELD = 8
    CONTEXT = 6

    def __init__(self, decode: Callable[[list[int]], str], *, prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = [int(i) for i in prompt_ids[-self.CONTEXT :]]
        self._num_done = len(self._window)
        self._done = decode(self._window).rstrip(REPLACEMENT) if self._window else ""

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push_one(int(i)) for i in ids])

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        num_held = len(self._window) - self._num_done
        if text.endswith(REPLACEMENT) and num_held <= self.MAX_HELD:
            return ""
        return self._advance(text)

    def finish(self) -> str:
        return self._advance(self._decode(self._window)) if self._window else ""

    def _advance(self, text: str) -> str:
        new = text[len(self._done) :]
        if len(self._window) > 4 * self.CONTEXT:
            self._window = self._window[-self.CONTEXT :]
            text = self._decode(self._window)
        self._num_done, self._done = len(self._window), text
        return new


class StopMatcher:
    """Cuts a stream of text at the first stop string.

    The first one to be complete wins, as if the text came character by character; of two complete at the same
    character, the longer. So the result does not depend on how the text was cut into pieces. Held back is only what
    may still become a stop string: a suffix of the text that begins one.

    matched: the stop string found, or None. include: whether the text keeps it.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._heads = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add text and return what may be sent. After a match all further text is dropped."""
        if self.matched is not None:
            return ""
        text = self._held + text
        ends = [(start + len(s), start, s) for s in self._stops if (start := text.find(s)) >= 0]
        if ends:
            end, start, self.matched = min(ends)
            self._held = ""
            return text[: end if self._include else start]
        cut = self._hold_from(text)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """No more text comes: return what was held back."""
        held, self._held = self._held, ""
        return held

    def _hold_from(self, text: str) -> int:
        """Where the longest suffix begins that is a beginning of some stop string; len(text) if there is none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._heads and any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
