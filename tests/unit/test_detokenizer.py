"""Streams of tokens to text, and the same text however the stream is cut."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.detokenizer import ByteDetokenizer, WindowDetokenizer

BYTES = {i: bytes([i]) for i in range(256)}


def stream(data: bytes) -> list[str]:
    """The pieces of a stream that brings one byte a token."""
    detokenizer = ByteDetokenizer(BYTES)
    return [*(detokenizer.push([byte]) for byte in data), detokenizer.finish()]


@pytest.mark.parametrize("text", ["你好", "ď", "👍🏽", "🇨🇭", "a“b”c", unicodedata.normalize("NFD", "é")])
def test_no_chunk_holds_part_of_a_character(text: str) -> None:
    pieces = stream(text.encode())
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert [len(piece) <= 1 for piece in pieces] == [True] * len(pieces)


def test_each_ill_formed_part_is_one_replacement_character() -> None:
    assert "".join(stream(b"ok \xc3\x28 and \xff.")) == "ok \ufffd( and \ufffd."


def test_an_unfinished_character_at_the_end_is_one_replacement_character() -> None:
    pieces = stream(b"a\xf0\x9f\x91")
    assert pieces == ["a", "", "", "", "\ufffd"]


@given(st.lists(st.binary(max_size=6), max_size=30))
def test_any_bytes_give_the_same_text_streamed_and_at_once(chunks: list[bytes]) -> None:
    detokenizer = ByteDetokenizer(dict(enumerate(chunks)))
    streamed = "".join(detokenizer.push([i]) for i in range(len(chunks))) + detokenizer.finish()
    assert streamed == b"".join(chunks).decode("utf-8", errors="replace")


@given(st.text(max_size=20), st.text(max_size=20), st.data())
def test_a_prompt_is_never_repeated_and_its_unfinished_character_is_completed(
    prompt: str, answer: str, data: st.DataObject
) -> None:
    whole = (prompt + answer).encode()
    cut = data.draw(st.integers(0, len(whole)))
    detokenizer = ByteDetokenizer(BYTES, prompt_ids=list(whole[:cut]))
    text = detokenizer.push(list(whole[cut:])) + detokenizer.finish()
    shown = len(whole[:cut].decode("utf-8", errors="ignore"))
    assert text == (prompt + answer)[shown:]


def test_first_space_is_dropped_only_where_the_text_begins() -> None:
    table = {0: b"", 1: b" a", 2: b" b"}
    at_start = ByteDetokenizer(table, strip_first=True)
    assert at_start.push([0, 1, 2]) == "a b"
    assert at_start.push([1]) == " a"
    assert ByteDetokenizer(table, strip_first=True, prompt_ids=[0]).push([1]) == "a"
    assert ByteDetokenizer(table, strip_first=True, prompt_ids=[2, 0]).push([1]) == " a"


WORDS = {0: "un", 1: "##believ", 2: "##able", 3: "story", 4: "."}


def decode_words(ids: list[int]) -> str:
    """A WordPiece-like decoder: what a token adds depends on whether one stands before it."""
    text = ""
    for i in ids:
        word = WORDS[i]
        text += word[2:] if word.startswith("##") and text else ("" if not text or word == "." else " ") + word
    return text


@given(st.lists(st.sampled_from(sorted(WORDS)), max_size=60), st.integers(1, 5))
def test_window_gives_the_text_of_all_ids_for_a_decoder_with_context(ids: list[int], step: int) -> None:
    detokenizer = WindowDetokenizer(decode_words)
    pieces = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert "".join(pieces) + detokenizer.finish() == decode_words(ids)


def test_window_continues_a_prompt_without_repeating_it() -> None:
    detokenizer = WindowDetokenizer(decode_words, prompt_ids=[3, 4, 0])
    assert detokenizer.push([1, 2]) == "believable"
    assert detokenizer.push([3]) == " story"


def test_window_completes_the_character_that_a_prompt_left_unfinished() -> None:
    half, rest = "é".encode()
    detokenizer = WindowDetokenizer(lambda ids: bytes(ids).decode("utf-8", errors="replace"), prompt_ids=[97, half])
    assert detokenizer.push([rest, 98]) == "éb"


@settings(max_examples=50)
@given(st.text(min_size=1, max_size=40))
def test_window_holds_back_half_characters(text: str) -> None:
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    detokenizer = WindowDetokenizer(decode)
    pieces = [detokenizer.push([byte]) for byte in text.encode()]
    assert "".join(pieces) + detokenizer.finish() == text
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


def test_window_lets_go_of_bytes_that_never_become_a_character() -> None:
    detokenizer = WindowDetokenizer(lambda ids: bytes(ids).decode("utf-8", errors="replace"))
    assert detokenizer.push([0xFF] * 20) != ""
