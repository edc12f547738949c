"""JSON that streams, and arguments typed by a schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.server.parsers.arguments import ArgumentWriter, Parameters, typed
from octavo.server.parsers.json_text import JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def scan(text: str, size: int = 1) -> tuple[str, str]:
    """(what comes out, what is left), fed in pieces; at every moment what came out can be closed."""
    scanner, out, rest = JsonScanner(), "", ""
    for at in range(0, len(text), size):
        piece, rest = scanner.feed(rest + text[at : at + size])
        out += piece
    return out + scanner.close(), rest


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(), VALUES, max_size=4), st.booleans(), st.sampled_from([None, 2]), st.integers(1, 9))
def test_json_passes_unchanged_and_its_end_is_found(value: Any, ascii: bool, indent: int | None, size: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    out, rest = scan(text + "}tail", size)
    assert json.loads(out) == value
    assert rest == "}tail"


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(), VALUES, min_size=1, max_size=4), st.data())
def test_json_cut_anywhere_is_closed(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value)
    out, rest = scan(text[: data.draw(st.integers(1, len(text)))], 3)
    assert rest == ""
    assert isinstance(json.loads(out), dict)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a": 1,}', {"a": 1}),
        ('{"a": [1, 2, ]}', {"a": [1, 2]}),
        ('{"a": True, "b": None, "c": NaN}', {"a": True, "b": None, "c": None}),
        ('{"a": "two\nlines\tand a tab"}', {"a": "two\nlines\tand a tab"}),
        (r'{"a": "\d \' \u12"}', {"a": r"\d ' \u12"}),
        (r'{"a": "\ud83d\ude00 \ud83d x \ude00"}', {"a": "😀 \ufffd x \ufffd"}),
    ],
)
def test_usual_slips_are_mended(written: str, read: Any) -> None:
    out, rest = scan(written)
    assert (json.loads(out), rest) == (read, "")


@pytest.mark.parametrize(("written", "left"), [('{"a": oops}', "oops}"), ("{'a': 1}", "'a': 1}"), ('{"a" 1}', "1}")])
def test_what_is_no_json_is_left(written: str, left: str) -> None:
    out, rest = scan(written)
    assert (json.loads(out), rest) == ({}, left)


SCHEMA = {
    "properties": {
        "text": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "object": {"$ref": "#/$defs/Thing"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "level": {"enum": ["1", "2"]},
        "free": {},
        "loop": {"$ref": "#/$defs/Loop"},
        "odd": {"type": 3, "anyOf": "x", "$ref": "http://elsewhere"},
        "nullable": {"type": "integer", "nullable": True},
    },
    "$defs": {"Thing": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}},
}


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "42", "42"),
        ("text", " null ", " null "),
        ("maybe", "null", None),
        ("maybe", "nullify", "nullify"),
        ("count", "42", 42),
        ("count", "42.0", 42),
        ("count", "4x", "4x"),
        ("ratio", "1e3", 1000.0),
        ("ratio", "7", 7),
        ("ratio", "1e999", "1e999"),
        ("flag", "True", True),
        ("flag", "false", False),
        ("flag", "maybe", "maybe"),
        ("list", '["a", 1]', ["a", 1]),
        ("list", "['a', 1]", ["a", 1]),
        ("list", "[" * 100_000, "[" * 100_000),
        ("object", '{"a": {}}', {"a": {}}),
        ("either", "5", 5),
        ("either", "five", "five"),
        ("level", "1", "1"),
        ("free", "5", 5),
        ("free", "five", "five"),
        ("free", "null", None),
        ("free", '"five"', '"five"'),
        ("loop", "5", 5),
        ("odd", "5", 5),
        ("nullable", "null", None),
        ("nullable", "3", 3),
        ("unknown", '{"a": 1}', {"a": 1}),
        ("count", "9" * 5000, "9" * 5000),
    ],
)
def test_values_get_the_type_that_the_schema_says(key: str, written: str, value: Any) -> None:
    for size in (1, 7, len(written)):
        writer = ArgumentWriter(Parameters(SCHEMA), trim=False)
        writer.start(key)
        out = "".join(writer.text(written[at : at + size]) for at in range(0, len(written), size))
        out += writer.end() + writer.close()
        assert json.loads(out) == {key: value}
        assert type(json.loads(out)[key]) is type(value)


def test_a_string_streams_and_anything_else_waits() -> None:
    writer = ArgumentWriter(Parameters(SCHEMA), trim=True)
    writer.start("text")
    assert [writer.text(piece) for piece in ("\n", 'a "', "b\n")] == ["", '{"text": "a \\"', "b\\n"]
    assert writer.end() == '"'
    writer.start("count")
    assert [writer.text("1"), writer.text("2")] == ["", ""]
    assert writer.end() + writer.close() == ', "count": 12}'


def test_a_value_that_is_cut_off_is_kept_only_if_it_parses() -> None:
    for key, text, left in (("text", "ab", {"text": "ab"}), ("list", "[1, ", {}), ("count", "12", {"count": 12})):
        writer = ArgumentWriter(Parameters(SCHEMA), trim=False)
        writer.start(key)
        assert json.loads(writer.text(text) + writer.close()) == left


def test_a_schema_that_is_no_schema_types_nothing() -> None:
    for schema in (None, {}, {"properties": 3}, {"properties": {"a": "x"}}, {"properties": {"a": True}}):
        assert Parameters(schema).types("a") == frozenset()  # type: ignore[arg-type]
    assert typed("x", frozenset()) == "x"


@pytest.mark.parametrize("schema", [{"enum": ["Oslo", " Rome"]}, {"const": "Oslo"}, {"$ref": "#/$defs/City"}])
def test_white_space_around_a_string_of_a_list_is_the_formats(schema: dict[str, Any]) -> None:
    root = {"properties": {"city": schema, "note": {"type": "string"}}, "$defs": {"City": {"enum": ["Oslo"]}}}

    def written(key: str, *pieces: str) -> str:
        writer = ArgumentWriter(Parameters(root), trim=True)
        writer.start(key)
        return "".join(map(writer.text, pieces)) + writer.end() + writer.close()

    assert written("city", "\nOs", "lo", "\n\n\t ") == '{"city": "Oslo"}'
    assert written("city", "Bergen ") == '{"city": "Bergen "}', "what is not listed is left as it is"
    assert written("note", "Oslo  ") == '{"note": "Oslo  "}'
    if "enum" in schema:
        assert written("city", " Rome") == '{"city": " Rome"}'
