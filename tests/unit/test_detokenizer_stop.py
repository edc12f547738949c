"""Stop strings, and a comparison with a matcher that reads character by character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.detokenizer import StopMatcher


def feed(matcher: StopMatcher, pieces: Sequence[str]) -> list[str]:
    return [*(matcher.push(piece) for piece in pieces), matcher.finish()]


def brute_force(stops: Sequence[str], text: str, *, include: bool) -> tuple[str, str | None]:
    """The stop string that is complete after the fewest characters, the longest of those, cut there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def test_nothing_of_a_stop_string_is_sent_before_it_is_complete() -> None:
    matcher = StopMatcher(["DEFGHIJ"], include=False)
    assert feed(matcher, ["DEF", "G", "HI", "J"]) == [""] * 5
    assert matcher.matched == "DEFGHIJ"


def test_a_stop_string_that_ends_inside_a_piece_is_seen() -> None:
    matcher = StopMatcher(["Pari"], include=False)
    assert feed(matcher, [" Paris", " is"]) == [" ", "", ""]
    assert matcher.matched == "Pari"


def test_included_stop_string_ends_the_text() -> None:
    matcher = StopMatcher(["Pari"], include=True)
    assert feed(matcher, [" Paris"]) == [" Pari", ""]


def test_only_a_real_beginning_of_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["b,c", "x" * 30], include=False)
    pieces = ["alpha", "b", ",", "d", " long text", " without delay", " b,"]
    assert feed(matcher, pieces) == ["alpha", "", "", "b,d", " long text", " without delay", " ", "b,"]
    assert matcher.matched is None


def test_a_failed_beginning_may_hide_another() -> None:
    matcher = StopMatcher(["aab"], include=False)
    assert "".join(feed(matcher, list("aaab!"))) == "a"
    assert matcher.matched == "aab"


@pytest.mark.parametrize("pieces", [["abcd"], ["abc", "d"], ["a", "b", "c", "d"]])
def test_the_first_stop_string_to_be_complete_wins_however_the_text_is_cut(pieces: list[str]) -> None:
    matcher = StopMatcher(["abcd", "bc"], include=False)
    assert "".join(feed(matcher, pieces)) == "a"
    assert matcher.matched == "bc"


def test_of_two_complete_at_once_the_longer_wins() -> None:
    matcher = StopMatcher(["cd", "bcd"], include=False)
    assert "".join(feed(matcher, ["abcd"])) == "a"
    assert matcher.matched == "bcd"


@given(
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=6), max_size=12),
    st.booleans(),
)
def test_any_cut_of_the_text_gives_what_brute_force_gives(stops: list[str], pieces: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include=include)
    text = "".join(feed(matcher, pieces))
    assert (text, matcher.matched) == brute_force(stops, "".join(pieces), include=include)


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=10),
)
def test_what_is_held_back_always_begins_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops, include=False)
    seen = sent = ""
    for piece in pieces:
        seen += piece
        sent += matcher.push(piece)
        if matcher.matched is not None:
            break
        held = seen[len(sent) :]
        assert seen.startswith(sent)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
