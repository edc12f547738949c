"""What bytes a token stands for: byte-level BPE and sentencepiece vocabularies, read from a `tokenizers` decoder.

Both kinds of vocabulary write bytes as characters. Byte-level BPE has one character for each of the 256 bytes
(GPT-2); sentencepiece writes a space as U+2581 and a byte that no piece covers as a token `<0x41>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The byte of each character of the GPT-2 byte alphabet: printable Latin-1 stands for itself, the other 68
    bytes are U+0100 onwards in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


ALPHABET = byte_alphabet()


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """How a vocabulary spells bytes. strip_first: a space that is not part of the text when it comes first, because
    the tokenizer puts one before every text."""

    byte_level: bool = False
    byte_fallback: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    strip_first: bool = False

    def piece_bytes(self, piece: str) -> bytes:
        """The bytes of a piece of the vocabulary, e.g. "Ġthe" -> b" the", "<0xE4>" -> one byte."""
        if self.byte_level:
            try:
                return bytes([ALPHABET[c] for c in piece])
            except KeyError:
                return piece.encode()
        if self.byte_fallback and (match := BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        for old, new in self.replace:
            piece = piece.replace(old, new)
        return piece.encode()


def spelling_of(tokenizer: tokenizers.Tokenizer) -> Spelling | None:
    """The spelling that the tokenizer's decoder undoes, or None for a decoder that is not a map of single tokens to
    bytes (WordPiece, CTC, custom): its text needs the neighbours of a token."""
    if tokenizer.decoder is None:
        return None
    byte_level = byte_fallback = strip_first = False
    replace: list[tuple[str, str]] = []
    for step in _steps(json.loads(tokenizer.decoder.__getstate__())):
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replace.append((old, new))
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if start <= 1:
                strip_first = start == 1
            case {"type": "Metaspace", "replacement": old}:
                replace.append((old, " "))
                strip_first = step.get("prepend_scheme") != "never"
            case _:
                return None
    if byte_level and (replace or byte_fallback or strip_first):
        return None
    return Spelling(byte_level=byte_level, byte_fallback=byte_fallback, replace=tuple(replace), strip_first=strip_first)


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder


class TokenBytes(dict[int, bytes]):
    """Token id -> its bytes, filled when first asked for. Ids that the vocabulary lacks are empty.

    Added tokens stand for their own text; the special ones are empty if `skip_special`.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, spelling: Spelling, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._spelling = spelling
        for token_id, added in tokenizer.get_added_tokens_decoder().items():
            if added.special:
                self[token_id] = b"" if skip_special else added.content.encode()
            elif spelling.byte_level:
                self[token_id] = added.content.encode()

    def __missing__(self, token_id: int) -> bytes:
        piece = self._tokenizer.id_to_token(int(token_id)) if 0 <= token_id < 2**32 else None
        if piece is None:
            return b""
        data = self[int(token_id)] = self._spelling.piece_bytes(piece)
        return data
