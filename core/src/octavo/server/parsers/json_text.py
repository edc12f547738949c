"""Reads one JSON value out of a stream of text and gives it on as it comes, valid at every moment.

What is given out can always be closed: a key without its value, a comma with nothing behind it or half a number is
held back. So a call that is cut off still has arguments that parse.

Models' usual slips are mended: raw line breaks and unknown escapes in strings, a comma before a closing bracket,
Python's True, False and None, NaN (which JSON lacks: null), half a surrogate pair (U+FFFD).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
WORD = re.compile(r"[A-Za-z0-9_.+\-]+")
BARE_KEY = re.compile(r'[^\s"{}\[\],:<]+')
BARE_VALUE = re.compile(r'[^"{}\[\],<]+')
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
WORDS = {"True": "true", "False": "false", "None": "null"} | dict.fromkeys(("NaN", "Infinity", "-Infinity"), "null")
WORDS |= {word: word for word in ("true", "false", "null")}
CLOSERS = {"{": "}", "[": "]"}

Convert = Callable[[str, str], str]
"""(key of the argument, word) -> JSON."""


def quoted(text: str) -> str:
    """The text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def as_json(value: Any) -> str:
    """The value as JSON that can be sent as UTF-8: half a surrogate pair stays an escape."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def word_value(word: str) -> str | None:
    """A number or literal as JSON; None if it is neither."""
    return word if NUMBER.fullmatch(word) else WORDS.get(word)


class JsonScanner:
    """One JSON value. `done`: it has ended.

    convert: keys and words without quotes are taken as well (`{city:Paris,days:3}`); it says what a word in the place
    of a value is.
    """

    def __init__(self, convert: Convert | None = None) -> None:
        self.done = False
        self._convert = convert
        self._open: list[str] = []
        self._expects = "value"  # value, key, colon or comma: the latter also takes a closing bracket
        self._pending = ""  # read, but not to be given out before a value follows
        self._out: list[str] = []
        self._in_string = False
        self._is_key = False
        self._escape = ""
        self._high = ""  # half a surrogate pair, waiting for the other
        self._word = ""
        self._key = ""

    def feed(self, text: str) -> tuple[str, str]:
        """(what can be given out, what was not read). The latter is empty unless the value is done or goes wrong."""
        at = 0
        while at < len(text) and not self.done:
            if self._in_string:
                at = self._string(text, at)
                continue
            if self._word or self._takes_word(text[at]):
                at = self._read_word(text, at)
                if at < len(text) and self._word and not self._end_word():
                    word, self._word = self._word, ""
                    return self._take(), word + text[at:]
                continue
            if not self._bracket(text[at]):
                break
            at += 1
        return self._take(), text[at:]

    def close(self) -> str:
        """What makes valid JSON of all that was given out. Empty if nothing was."""
        if self._in_string and not self._is_key:
            self._put_high()
            self._out.append('"')
        elif self._word:
            self._end_word()
        self._out += [CLOSERS[bracket] for bracket in reversed(self._open)]
        self.done = True
        return self._take()

    def held(self) -> str:
        """What was read and not given out."""
        return self._pending + self._escape + self._word

    def _take(self) -> str:
        out, self._out = "".join(self._out), []
        return out

    def _emit(self, text: str) -> None:
        self._out.append(self._pending + text)
        self._pending = ""

    # Brackets, commas, colons ----------------------------------------------------------------------------------------

    def _bracket(self, char: str) -> bool:
        """Take one character between values. False if it cannot stand here."""
        top = self._open[-1] if self._open else ""
        if char.isspace():
            if self._open and char in " \t\r\n":
                self._pending += char
        elif char == '"' and self._expects in ("value", "key"):
            self._in_string, self._is_key = True, self._expects == "key"
            if self._is_key:
                self._pending += '"'
                self._key = ""
            else:
                self._emit('"')
        elif char in CLOSERS and self._expects == "value":
            self._emit(char)
            self._open.append(char)
            self._expects = "key" if char == "{" else "value"
        elif top and char == CLOSERS[top] and self._may_close(top):
            self._pending = self._pending.replace(",", "")
            self._emit(char)
            self._open.pop()
            self._value_ended()
        elif char == ":" and self._expects == "colon":
            self._pending += char
            self._expects = "value"
        elif char == "," and self._expects == "comma":
            self._pending += char
            self._expects = "key" if top == "{" else "value"
        else:
            return False
        return True

    def _may_close(self, top: str) -> bool:
        return self._expects == "comma" or self._expects == ("key" if top == "{" else "value")

    def _value_ended(self) -> None:
        self._expects = "comma"
        self.done = not self._open

    # Words -----------------------------------------------------------------------------------------------------------

    def _word_pattern(self) -> re.Pattern[str]:
        if self._convert is None:
            return WORD
        return BARE_KEY if self._expects == "key" else BARE_VALUE

    def _takes_word(self, char: str) -> bool:
        wanted = self._expects == "value" or (self._expects == "key" and self._convert is not None)
        return wanted and not char.isspace() and self._word_pattern().match(char) is not None

    def _read_word(self, text: str, at: int) -> int:
        found = self._word_pattern().match(text, at)
        if found is None:
            return at
        self._word += found.group()
        return found.end()

    def _end_word(self) -> bool:
        word = self._word.strip()
        if self._expects == "key":
            self._key = word
            self._pending += f'"{quoted(word)}"'
            self._expects = "colon"
        else:
            key = self._key if len(self._open) == 1 else ""
            value = word_value(word) if self._convert is None else self._convert(key, word)
            if value is None:
                return False
            self._emit(value)
            self._value_ended()
        self._word = ""
        return True

    # Strings ---------------------------------------------------------------------------------------------------------

    def _string(self, text: str, at: int) -> int:
        """Read on in a string, from `at`; returns where it stopped."""
        if self._escape:
            return self._escaped(text, at)
        if text[at] == "\\":
            self._escape = "\\"
            return at + 1
        self._put_high()
        if found := PLAIN.match(text, at):
            self._put(found.group())
            return found.end()
        if text[at] == '"':
            self._in_string = False
            self._put('"', is_text=False)
            if self._is_key:
                self._expects = "colon"
            else:
                self._value_ended()
        else:
            self._put(quoted(text[at]))
        return at + 1

    def _put(self, text: str, *, is_text: bool = True) -> None:
        if not self._is_key:
            self._out.append(text)
            return
        self._pending += text
        if is_text:
            self._key += text

    def _put_high(self) -> None:
        if self._high:
            self._high = ""
            self._put(r"\ufffd")

    def _escaped(self, text: str, at: int) -> int:
        """Read on behind a backslash."""
        char, begun = text[at], self._escape
        if begun == "\\" and char == "u":
            self._escape += char
        elif begun == "\\":
            self._escape = ""
            self._put_high()
            if char in '"\\/bfnrt':
                self._put("\\" + char)
            elif char == "'":
                self._put(char)
            else:  # not an escape: a backslash, then whatever it is
                self._put("\\\\")
                return at
        elif char in "0123456789abcdefABCDEF":
            self._escape += char
            if len(self._escape) == 6:
                self._code_unit()
        else:
            self._escape = ""
            self._put_high()
            self._put("\\" + begun)
            return at
        return at + 1

    def _code_unit(self) -> None:
        unit, self._escape = self._escape, ""
        kind = int(unit[2:], 16) >> 10
        if kind == 0xDC00 >> 10 and self._high:
            self._put(self._high + unit)
            self._high = ""
            return
        self._put_high()
        if kind == 0xD800 >> 10:
            self._high = unit
        else:
            self._put(r"\ufffd" if kind == 0xDC00 >> 10 else unit)
