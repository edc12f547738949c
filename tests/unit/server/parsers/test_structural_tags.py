"""Grammars that force calls in a format, compiled by the library that enforces them."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

xgrammar = pytest.importorskip("xgrammar")

EOS = 256
PARIS = ("weather", {"city": "Paris \\u00e9 b", "days": 3, "metric": True, "tags": ["a", "b"]})
CALLS = [PARIS, ("weather", {"city": "Rome"}), ("list_tables", {})]


@pytest.fixture(scope="module")
def compiler() -> Any:
    """A tokenizer of single bytes."""
    tokens = [bytes([byte]) for byte in range(EOS)]
    info = xgrammar.TokenizerInfo([*tokens, b"</s>"], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[EOS])
    return xgrammar.GrammarCompiler(info)


class Grammar:
    """What a structural tag allows as a whole answer."""

    def __init__(self, compiler: Any, tag: dict[str, Any] | None) -> None:
        assert tag is not None
        assert tag["type"] == "structural_tag"
        self._compiled = compiler.compile_structural_tag(json.dumps(tag))

    def allows(self, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(self._compiled)
        return matcher.accept_string(text) and matcher.accept_token(EOS)


@pytest.fixture
def tools(parsing: SimpleNamespace) -> list[Any]:
    """A strict tool and one that is not."""
    return [replace(parsing.WEATHER, strict=True), parsing.TOOLS[1]]


def test_required_allows_calls_and_nothing_else(
    written: Any, parsing: SimpleNamespace, compiler: Any, tools: list[Any]
) -> None:
    grammar = Grammar(compiler, parsing.make(written.name).structural_tag(tools, choice="required"))
    assert grammar.allows(written.forced(CALLS[:1]))
    assert grammar.allows(written.forced(CALLS))
    for wrong in ("", "Hello.", written.forced([("unknown", {})]), written.forced([("weather", {"days": 3})])):
        assert not grammar.allows(wrong), wrong
    assert not grammar.allows(written.forced([("weather", {"city": "Rome", "days": "three"})]))
    assert not grammar.allows(written.forced(CALLS)[:-1])


def test_what_a_grammar_forces_is_what_the_parser_reads(written: Any, parsing: SimpleNamespace) -> None:
    answer = parsing.parse(written.forced(CALLS), written.name)
    assert (answer.values, answer.content) == (CALLS, "")


def test_without_parallel_calls_one_is_allowed(
    written: Any, parsing: SimpleNamespace, compiler: Any, tools: list[Any]
) -> None:
    grammar = Grammar(compiler, parsing.make(written.name).structural_tag(tools, choice="required", parallel=False))
    assert grammar.allows(written.forced(CALLS[:1]))
    assert not grammar.allows(written.forced(CALLS))


def test_a_named_tool_is_the_only_one_allowed(
    written: Any, parsing: SimpleNamespace, compiler: Any, tools: list[Any]
) -> None:
    grammar = Grammar(compiler, parsing.make(written.name).structural_tag(tools, choice="named", name="list_tables"))
    assert grammar.allows(written.forced(CALLS[2:]))
    assert not grammar.allows(written.forced(CALLS[:1]))
    assert not grammar.allows(written.forced(CALLS[2:] * 2))


def test_auto_allows_text_and_holds_calls_of_strict_tools_to_their_schema(
    written: Any, parsing: SimpleNamespace, compiler: Any, tools: list[Any]
) -> None:
    grammar = Grammar(compiler, parsing.make(written.name).structural_tag(tools, choice="auto"))
    before = "" if written.only_calls or written.name in ("xlam", "llama4_json") else "Let me look. "
    assert grammar.allows("Hello.")
    assert grammar.allows(before + written.forced(CALLS))
    assert not grammar.allows(before + written.forced([("weather", {"days": 3})]))
    assert not grammar.allows(before + written.forced([("unknown", {})]))


def test_auto_forces_nothing_without_strict_tools(written: Any, parsing: SimpleNamespace) -> None:
    format = parsing.make(written.name)
    assert format.structural_tag(parsing.TOOLS, choice="auto") is None
    assert format.structural_tag((), choice="required") is None


def test_descriptions_and_odd_keywords_do_not_break_the_grammar(
    written: Any, parsing: SimpleNamespace, compiler: Any
) -> None:
    text = 'a "quoted"\nline ] } \\ <|end|> </tool_call>'
    tool = parsing.Tool(
        "find",
        {
            "type": "object",
            "description": text,
            "properties": {
                "query": {"type": "string", "description": text},
                "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": text},
                "where": {"$ref": "#/$defs/Where"},
            },
            "required": ["query"],
            "$defs": {"Where": {"type": "object", "properties": {"x": {"type": "string", "description": text}}}},
        },
        True,
    )
    grammar = Grammar(compiler, parsing.make(written.name).structural_tag([tool], choice="required"))
    assert grammar.allows(written.forced([("find", {"query": "a", "limit": 2})]))
    assert not grammar.allows(written.forced([("find", {"query": "a", "limit": "x"})]))


def test_tools_without_a_schema_take_any_arguments(written: Any, parsing: SimpleNamespace, compiler: Any) -> None:
    tools = [parsing.Tool("f", None, True), parsing.Tool("g", {"type": "object"})]
    grammar = Grammar(compiler, parsing.make(written.name).structural_tag(tools, choice="required"))
    calls = [("f", {"a": "b c", "n": 3, "l": ["x", "y"]}), ("g", {}), ("f", {"o": {"p": "q"}, "t": True})]
    assert grammar.allows(written.forced(calls))
    assert not grammar.allows(written.forced([("h", {})]))


def test_a_schema_that_is_no_schema_reaches_the_compiler_as_it_is(written: Any, parsing: SimpleNamespace) -> None:
    for wrong in (
        {"properties": None},
        {"required": True},
        {"properties": {"a": "x"}, "required": 3},
        {"properties": 3},
    ):
        tag = parsing.make(written.name).structural_tag([parsing.Tool("f", wrong)], choice="required")
        assert tag is not None
        json.dumps(tag)


def test_harmony_may_think_before_a_forced_call(parsing: SimpleNamespace, compiler: Any, tools: list[Any]) -> None:
    grammar = Grammar(compiler, parsing.make("openai").structural_tag(tools, choice="required"))
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "x"}<|call|>'
    assert grammar.allows(f"<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant{call}")
    assert grammar.allows(call)


def test_arguments_that_are_all_optional_may_be_left_out(parsing: SimpleNamespace, compiler: Any) -> None:
    tool = parsing.Tool("f", {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}})
    grammar = Grammar(compiler, parsing.make("pythonic").structural_tag([tool], choice="required"))
    assert all(grammar.allows(f"[f({given})]") for given in ("", "a=1", "b=2", "a=1, b=2"))
    assert not any(grammar.allows(f"[f({given})]") for given in ("a=1, ", ", a=1", "a=1 b=2", "c=1"))
