"""Readers of whole calls: a JSON object that names its function, and a call in Python's syntax."""

from __future__ import annotations

import json
from typing import Protocol

from octavo.server.parsers.arguments import parsed
from octavo.server.parsers.json_text import JsonScanner, as_json

ARGUMENT_KEYS = ("arguments", "parameters")
ENVELOPE_KEYS = ("name", "type", "id", *ARGUMENT_KEYS)


class CallReader(Protocol):
    """Reads one call. `name`: None until it is certain that this is a call. `done`: it has ended."""

    name: str | None
    done: bool

    def feed(self, text: str) -> tuple[str, str]:
        """(more of the arguments as JSON, what was not read): the latter is empty unless done or no call."""
        ...

    def close(self) -> str:
        """What completes the arguments that were given out."""
        ...

    def held(self) -> str:
        """What was read and not given out."""
        ...


class EnvelopeReader:
    """`{"name": "f", "arguments": {...}}`, keys in any order; `parameters` is another word for arguments.

    strict: nothing but the text itself says that it is a call. Then other keys make it none, and it is certain only
    when the arguments begin. Otherwise the name is enough, and other keys are passed over.
    Arguments that are a string of JSON are taken out of it. Of several names or arguments the first count.
    """

    def __init__(self, *, strict: bool) -> None:
        self.name: str | None = None
        self.done = False
        self._strict = strict
        self._expects = "open"  # open, key, colon, value, comma
        self._scanner: JsonScanner | None = None
        self._read = ""  # of the key or value at hand
        self._key = ""
        self._name: str | None = None
        self._early = ""  # arguments that came before the name
        self._has_arguments = False
        self._is_arguments = False  # the value at hand
        self._whole = False  # the value is given out when it is complete

    def feed(self, text: str) -> tuple[str, str]:
        out = ""
        while text and not self.done:
            if self._scanner is not None:
                piece, text = self._scanner.feed(text)
                out += self._scanned(piece)
                if not self._scanner.done:
                    break
                out += self._end_part()
                continue
            stripped = text.lstrip()
            if not stripped or not self._step(stripped[0]):
                text = stripped
                break
            text = stripped if self._scanner is not None else stripped[1:]
        return out, text

    def _step(self, char: str) -> bool:
        """Take one character between keys and values; a key or value is left to a scanner."""
        match self._expects, char:
            case "open", "{":
                self._expects = "key"
            case "key", '"':
                self._start_part()
            case "colon", ":":
                self._expects = "value"
            case "value", _:
                self._whole = char != "{"
                self._is_arguments = self._key in ARGUMENT_KEYS and not self._has_arguments
                if self._is_arguments:
                    self._has_arguments = True
                    self._announce()
                self._start_part()
            case "comma", ",":
                self._expects = "key"
            case (("comma" | "key"), "}"):
                if self._name is None or (self._strict and not self._has_arguments):
                    return False
                self._announce()
                self.done = True
            case _:
                return False
        return True

    def _start_part(self) -> None:
        self._scanner, self._read = JsonScanner(), ""

    def _scanned(self, piece: str) -> str:
        if self._expects != "value" or not self._is_arguments or self._whole or self.name is None:
            self._read += piece
            return ""
        return piece

    def _end_part(self) -> str:
        """A key or value is complete. One that makes the whole no call leaves nothing to expect."""
        read, self._scanner, self._read = self._read, None, ""
        if self._expects == "key":
            self._key = json.loads(read)
            self._expects = "colon" if not self._strict or self._key in ENVELOPE_KEYS else "nothing"
            return ""
        self._expects = "comma"
        if self._key == "name":
            name = json.loads(read)
            if not isinstance(name, str) or not name:
                self._expects = "nothing"
                return ""
            self._name = name
            if not self._strict or self._has_arguments:
                self._announce()
                early, self._early = self._early, ""
                return early
        elif self._is_arguments:
            read = "" if read == "null" else unquoted(read) if read.startswith('"') else read
            if self.name is not None:
                return read
            self._early = read
        return ""

    def _announce(self) -> None:
        if self.name is None:
            self.name = self._name

    def close(self) -> str:
        self.done = True
        if self._scanner is None or self._expects != "value" or not self._is_arguments:
            return self._early
        rest = self._scanner.close()
        return unquoted(self._read + rest, cut_off=True) if self._whole else rest

    def held(self) -> str:
        return self._read + (self._scanner.held() if self._scanner is not None else "")


def unquoted(text: str, *, cut_off: bool = False) -> str:
    """The JSON object inside a JSON string; the string itself, if it holds none (nothing, if it was `cut_off`)."""
    if not text:
        return ""
    inner = JsonScanner()
    value = json.loads(text)
    out, rest = inner.feed(value) if isinstance(value, str) else ("", "")
    if out[:1] == "{" and (cut_off or (inner.done and not rest.strip())):
        return out if inner.done else out + inner.close()
    return "" if cut_off else text


CLOSERS = {")": "(", "]": "[", "}": "{"}


class PythonicReader:
    """`f(a=1, b='x')`: arguments by name, with Python's literals (or JSON's). Given out one argument at a time.

    A value that is no literal, such as a name, is passed on as the text it is.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self._name = ""
        self._expects = "name"  # name, key, value
        self._key = ""
        self._value = ""
        self._open: list[str] = []
        self._quote = ""
        self._escaped = False
        self._written = False

    def feed(self, text: str) -> tuple[str, str]:
        out = ""
        for at, char in enumerate(text):
            piece = self._step(char)
            if piece is None:
                return out, text[at:]
            out += piece
            if self.done:
                return out, text[at + 1 :]
        return out, ""

    def _step(self, char: str) -> str | None:
        """Take one character; None if it cannot stand here."""
        if self._expects == "value":
            return self._in_value(char)
        part = self._name if self._expects == "name" else self._key
        if self._expects == "name" and char == "(" and part:
            self._expects = "key"
        elif self._expects == "key" and char == ")" and not part.strip():
            return self._finish()
        elif self._expects == "key" and char == "=" and part.strip():
            self.name = self._name
            self._key, self._value, self._expects = part.strip(), "", "value"
        elif self._expects == "key" and char == "," and not part.strip() and self._written:
            pass
        elif self._expects == "name" and (char.isspace() or _continues_name(part, char)):
            if char.isspace() and part:
                return None
            self._name += char.strip()
        elif self._expects == "key" and (char.isspace() or char.isalnum() or char in "_-"):
            if part.strip() and part[-1].isspace() and not char.isspace():
                return None
            self._key += char if part or not char.isspace() else ""
        else:
            return None
        return ""

    def _in_value(self, char: str) -> str | None:
        if self._escaped:
            self._escaped = False
        elif self._quote:
            if char == "\\":
                self._escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "'\"":
            self._quote = char
        elif char in "([{":
            self._open.append(char)
        elif char in ")]}" and self._open:
            if self._open[-1] != CLOSERS[char]:
                return None
            self._open.pop()
        elif char in ",)" and not self._open:
            out = self._end_value()
            return out + (self._finish() if char == ")" else "")
        elif char in ")]}":
            return None
        self._value += char
        return ""

    def _end_value(self) -> str:
        out = f"{', ' if self._written else '{'}{as_json(self._key)}: {as_json(parsed(self._value.strip()))}"
        self._written, self._expects, self._key, self._value = True, "key", "", ""
        return out

    def _finish(self) -> str:
        self.name, self.done = self._name, True
        return "}" if self._written else "{}"

    def close(self) -> str:
        open_still = self._written and not self.done
        self.done = True
        return "}" if open_still else ""

    def held(self) -> str:
        return f"{self._key}={self._value}" if self._expects == "value" else self._key


def _continues_name(name: str, char: str) -> bool:
    return char == "_" or (char.isalpha() if not name else char.isalnum() or char in ".-")
