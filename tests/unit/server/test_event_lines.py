"""Events are one line each, whatever the model says."""

from __future__ import annotations

import json
import sys

import msgspec

from octavo.server.sse import event


class Chunk(msgspec.Struct):
    text: str


def test_no_character_of_a_text_breaks_its_line_for_any_client() -> None:
    characters = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c <= 0xDFFF]
    breaking = "".join(c for c in characters if len(f"a{c}b".splitlines()) > 1)
    text = f"before{breaking}after 你好 🇨🇭 \\u2028"
    assert {"\n", "\x85", "\u2028", "\u2029"} <= set(breaking)
    lines = event(Chunk(text)).decode().splitlines()
    assert lines[1:] == [""]
    assert json.loads(lines[0].removeprefix("data: ")) == {"text": text}
