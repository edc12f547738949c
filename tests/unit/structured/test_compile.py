"""Which library takes a spec, and what is said where none does."""

from __future__ import annotations

import json

import numpy as np
import pytest

from octavo.errors import RequestError
from octavo.structured.answer import ShapedAnswer, State
from octavo.structured.compile import Library, check, compile_spec
from octavo.structured.matcher import Compiled, MatchError, one_line
from octavo.structured.spec import StructuredOutputs
from octavo.structured.vocabulary import Vocabulary


def backend(libraries: dict[str, Library], **given: object) -> str:
    return compile_spec(StructuredOutputs(**given), libraries).backend  # type: ignore[arg-type]


def accepts(compiled: Compiled, vocabulary: Vocabulary, text: str) -> bool:
    """Whether the grammar takes exactly this text, byte by byte."""
    by_bytes = {data: token for token, data in enumerate(vocabulary.texts) if data}
    tokens = [by_bytes[bytes([byte])] for byte in text.encode()]
    answer = ShapedAnswer(compiled.matcher(), num_tokens=vocabulary.end, ends=[2])
    try:
        answer.accept(tokens)
    except MatchError:
        return False
    words = np.empty((1, vocabulary.num_words), np.int32)
    (state,) = answer.masks(words, may_end=True)
    return state is State.DONE or bool(words[0, 0] >> 2 & 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}, "xgrammar"),
        ({"json": {"type": "integer", "multipleOf": 3}}, "guidance"),
        ({"json": {"type": "string", "pattern": "a*", "minLength": 3}}, "guidance"),
        ({"json": {"type": "string", "format": "ipv4"}}, "guidance"),
        ({"json": {"allOf": [{"type": "integer"}, {"minimum": 3}]}}, "guidance"),
        ({"json": {"type": "integer"}, "whitespace_pattern": " ?"}, "guidance"),
        ({"json_object": True}, "xgrammar"),
        ({"regex": "^a+$"}, "xgrammar"),
        ({"regex": r"\p{L}+"}, "guidance"),
        ({"regex": "(?i)abc"}, "guidance"),
        ({"regex": "[a-z&&[^b]]"}, "guidance"),
        ({"choice": ["a", 'b"\n\\']}, "guidance"),
        ({"choice": ["a"], "backend": "xgrammar"}, "xgrammar"),
        ({"grammar": 'root ::= "a" | "b" root'}, "xgrammar"),
        ({"grammar": 'start: "a" | /[0-9]+/'}, "guidance"),
        ({"grammar": 'start: "a"', "backend": "xgrammar"}, "xgrammar"),
        ({"grammar": 'root ::= "a"', "backend": "guidance"}, "guidance"),
        ({"json": {"type": "integer"}, "backend": "guidance"}, "guidance"),
    ],
)
def test_each_spec_goes_to_a_library_that_keeps_to_it(
    given: dict, expected: str, libraries: dict[str, Library]
) -> None:
    assert backend(libraries, **given) == expected


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "json", "uniqueItems"),
        ({"json": {"type": "array", "contains": {"const": 1}}}, "json", "contains"),
        ({"json": {"type": "string", "pattern": "a(?=b)"}}, "json", "look-ahead"),
        ({"json": {"type": "integer", "not": {"const": 3}}, "backend": "xgrammar"}, "json", "not"),
        ({"json": {"type": "string", "pattern": "a", "minLength": 3}, "backend": "xgrammar"}, "json", "minLength"),
        ({"regex": "(?!a)b"}, "regex", "look-ahead"),
        ({"regex": r"(a)\1"}, "regex", "backreferences"),
        ({"regex": "a{3,1}"}, "regex", "repetition"),
        ({"grammar": "start: nothing"}, "grammar", "nothing"),
        ({"json": {"type": "integer"}, "whitespace_pattern": " ", "backend": "xgrammar"}, "whitespace_pattern", "guid"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "nope"}}}, "structural_tag", "nope"),
        ({"structural_tag": {"type": "structural_tag"}, "backend": "guidance"}, "structural_tag", "xgrammar"),
    ],
)
def test_what_no_library_can_do_is_refused_by_name(
    given: dict, field: str, says: str, libraries: dict[str, Library]
) -> None:
    with pytest.raises(RequestError, match=says) as error:
        backend(libraries, **given)
    assert error.value.field == f"structured_outputs.{field}"


def test_a_grammar_or_pattern_that_does_not_parse_is_refused(libraries: dict[str, Library]) -> None:
    for given in ({"grammar": "Root ::= [^"}, {"regex": "("}, {"regex": "[^"}, {"json": {"pattern": "\\q["}}):
        with pytest.raises(RequestError):
            backend(libraries, **given)


def test_descriptions_hold_any_text_and_not_is_named(libraries: dict[str, Library], draw) -> None:
    described = {"type": "object", "description": 'a "b"\n]', "properties": {"x": {"const": 1, "title": '"]}\\'}}}
    assert draw(compile_spec(StructuredOutputs(json=described), libraries), 1) is not None
    with pytest.raises(RequestError, match="not"):
        backend(libraries, json={"type": "object", "properties": {"x": {"not": {}}}})


@pytest.mark.parametrize("name", ["auto", "xgrammar", "guidance"])
def test_one_of_the_choices_is_the_whole_answer(
    name: str, libraries: dict[str, Library], vocabulary: Vocabulary
) -> None:
    texts = ("a", "ab", "b/c.d*", 'say "x"\n\\', "你好 😀", " ")
    compiled = compile_spec(StructuredOutputs(choice=texts, backend=name), libraries)  # type: ignore[arg-type]
    for text in texts:
        assert accepts(compiled, vocabulary, text)
    for other in ("", "aa", "b", "b/c", "b/cxdd", "你", "  ", "abc"):
        assert not accepts(compiled, vocabulary, other)


def test_schemas_within_tags_are_checked_too(libraries: dict[str, Library]) -> None:
    def tag(schema: dict) -> StructuredOutputs:
        content = {"type": "json_schema", "json_schema": schema}
        form = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
        return StructuredOutputs(structural_tag={"type": "structural_tag", "format": form})

    assert compile_spec(tag({"type": "integer"}), libraries).backend == "xgrammar"
    with pytest.raises(RequestError, match="properties/foo"):
        check(tag({"properties": {"foo": "bar"}}))
    with pytest.raises(RequestError, match="uniqueItems"):
        compile_spec(tag({"type": "array", "uniqueItems": True}), libraries)


@pytest.mark.parametrize("name", ["xgrammar", "guidance"])
def test_whitespace_is_bounded_and_can_be_left_out(
    name: str, libraries: dict[str, Library], vocabulary: Vocabulary
) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"]}
    free = compile_spec(StructuredOutputs(json=schema, backend=name), libraries)  # type: ignore[arg-type]
    assert accepts(free, vocabulary, '{"a":1,"b":2}')
    assert accepts(free, vocabulary, '{\n  "a": 1,\n  "b": 2\n}')
    assert not accepts(free, vocabulary, '{"a":' + " " * 200 + '1,"b":2}')
    one_line = StructuredOutputs(json=schema, backend=name, disable_any_whitespace=True)  # type: ignore[arg-type]
    compact = compile_spec(one_line, libraries)
    assert accepts(compact, vocabulary, json.dumps({"a": 1, "b": 2}))
    assert not accepts(compact, vocabulary, '{ "a": 1, "b": 2}')


@pytest.mark.parametrize("name", ["xgrammar", "guidance"])
def test_both_libraries_read_additional_properties_alike(
    name: str, libraries: dict[str, Library], vocabulary: Vocabulary
) -> None:
    def takes(schema: dict, text: str, **flags: bool) -> bool:
        spec = StructuredOutputs(json=schema, backend=name, **flags)  # type: ignore[arg-type]
        return accepts(compile_spec(spec, libraries), vocabulary, text)

    listed = {"type": "object", "properties": {"a": {"const": 1}}}
    assert takes(listed, '{"a":1}')
    assert not takes(listed, '{"a":1,"b":2}')
    assert takes({**listed, "additionalProperties": True}, '{"a":1,"b":2}')
    assert takes({"type": "object"}, '{"b":2}')
    assert not takes({"type": "object"}, '{"b":2}', disable_additional_properties=True)


def test_a_schema_cannot_loosen_its_own_reading(libraries: dict[str, Library]) -> None:
    lenient = {"type": "integer", "not": {"const": 3}, "x-guidance": {"lenient": True}}
    with pytest.raises(RequestError, match="not"):
        backend(libraries, json=lenient)


def test_what_a_library_says_is_one_line_without_its_state() -> None:
    assert one_line("NoExtensionBias\n<state>\nTokens: 0 tokens\n</state>") == "NoExtensionBias"
    assert one_line("a\n  b") == "a b"
