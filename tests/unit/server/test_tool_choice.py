"""What an answer is held to by its tools, its response format and its reasoning, as a grammar sees it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from octavo.errors import RequestError
from octavo.extensions import load_extensions
from octavo.sampling.params import SamplingParams
from octavo.server.conversation import Conversation, Tool
from octavo.server.parsers.registry import choose
from octavo.server.tool_choice import enforce
from octavo.structured.spec import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool(name="weather", parameters=SCHEMA)
TABLES = Tool(name="tables")
PAGES = {"type": "object", "properties": {"pages": {"type": "integer"}}, "required": ["pages"]}
PLAIN = SimpleNamespace(in_reasoning=False, expects_reasoning=False)
MAYBE = SimpleNamespace(in_reasoning=False, expects_reasoning=True)
OPEN = SimpleNamespace(in_reasoning=True, expects_reasoning=True)
MARKS = {"</think>": [7]}
ONE_TOKEN = SimpleNamespace(encode=lambda text, add_special_tokens: MARKS.get(text, [1, 2]))
TWO_TOKENS = SimpleNamespace(encode=lambda text, add_special_tokens: [1, 2])


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def held(
    asked=None, *, choice="auto", name=None, tools=(WEATHER, TABLES), parallel=True, start=PLAIN, level="auto",
    tokenizer=ONE_TOKEN, parser="hermes",
) -> SamplingParams:  # fmt: skip
    format = choose(load_extensions(), tool_call_parser=parser, reasoning_parser="qwen3")
    params = SamplingParams(structured_outputs=asked)
    conversation = Conversation(
        messages=[],
        params=params,
        tools=tools,
        tool_choice=choice,
        tool_name=name,
        parallel_tool_calls=parallel,
        request_id="x",
    )
    return enforce(params, format, conversation, start=start, level=level, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def takes():
    """`takes(params, text)`: whether the form allows the text as a whole answer, as xgrammar reads it."""
    xgrammar = pytest.importorskip("xgrammar")
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(info)

    def check(params: SamplingParams, text: str) -> bool:
        assert params.structured_outputs is not None
        tag = json.loads(params.structured_outputs.structural_tag)
        matcher = xgrammar.GrammarMatcher(compiler.compile_grammar(xgrammar.Grammar.from_structural_tag(tag)))
        return matcher.accept_string(text) and matcher.accept_token(256)

    return check


def test_what_nobody_asks_for_is_free():
    assert held().structured_outputs is None
    assert held(tools=()).structured_outputs is None
    assert held(choice="none").structured_outputs is None


def test_required_allows_calls_and_nothing_else(takes):
    params = held(choice="required")
    one, other = call("weather", '{"city": "Oslo"}'), call("tables", "{}")
    assert takes(params, one)
    assert takes(params, f"{one}\n{other}")
    for text in ("free text", "", call("weather", '{"town": 5}'), call("unknown", "{}"), one + "and text"):
        assert not takes(params, text), text
    assert not takes(held(choice="required", parallel=False), f"{one}\n{other}")


def test_a_named_choice_allows_one_call_of_that_tool(takes):
    params = held(choice="named", name="tables")
    assert takes(params, call("tables", "{}"))
    assert not takes(params, call("weather", '{"city": "Oslo"}'))
    assert not takes(params, call("tables", "{}") + "\n" + call("tables", "{}"))


@pytest.mark.parametrize(
    ("level", "strict", "unknown_name", "wrong_arguments"),
    [("auto", True, False, False), ("function", None, False, True), ("parameter", None, False, False)],
)
def test_a_strict_tool_holds_calls_in_free_text(takes, level, strict, unknown_name, wrong_arguments):
    params = held(tools=(Tool(name="weather", parameters=SCHEMA, strict=strict),), level=level)
    assert takes(params, "It is cold. " + call("weather", '{"city": "Oslo"}'))
    assert takes(params, "no call at all")
    assert takes(params, call("unknown", "{}")) is unknown_name
    assert takes(params, call("weather", '{"town": 5}')) is wrong_arguments


def test_a_response_format_beside_tools_leaves_the_choice_to_the_model(takes):
    params = held(StructuredOutputs(json=PAGES))
    assert takes(params, '{"pages": 16}')
    assert takes(params, call("weather", '{"city": "Oslo"}'))
    for text in ("free text", '{"pages": "many"}', call("weather", "{}")):
        assert not takes(params, text), text


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (StructuredOutputs(json=PAGES), '{"pages": 16}', '{"pages": "x"}'),
        (StructuredOutputs(json_object=True), '{"a": [1]}', "[1]"),
        (StructuredOutputs(regex="[0-9]+"), "16", "x"),
        (StructuredOutputs(choice=("yes", "no")), "no", "maybe"),
        (StructuredOutputs(choice=("yes",)), "yes", "no"),
        (StructuredOutputs(grammar='root ::= "a" | "b"'), "b", "c"),
        (
            StructuredOutputs(
                structural_tag={"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
            ),
            "x",
            "y",
        ),
        (
            StructuredOutputs(
                structural_tag={"structures": [{"begin": "<f>", "schema": PAGES, "end": "</f>"}], "triggers": ["<f>"]}
            ),
            'text <f>{"pages": 1}</f>',
            "text <f>oops",
        ),
    ],
)
def test_the_form_begins_behind_reasoning_that_the_answer_may_have(takes, asked, good, bad):
    params = held(asked, tools=(), start=MAYBE)
    for before in ("", "<think>hm {</think>", "<think>hm</think>\n\n"):
        assert takes(params, before + good)
        assert not takes(params, before + bad)
    assert not takes(params, "free text</think>" + bad)
    if not good.startswith("text"):
        assert not takes(params, " " + good), "white space is taken behind reasoning only"


def test_open_reasoning_goes_on_until_its_mark(takes):
    params = held(choice="required", start=OPEN, tokenizer=TWO_TOKENS)
    assert takes(params, "hm</think>\n\n" + call("tables", "{}"))
    assert not takes(params, call("tables", "{}"))
    assert params.structured_after == ()


def test_open_reasoning_costs_no_grammar_where_its_mark_is_one_token():
    params = held(choice="required", start=OPEN)
    assert params.structured_after == (7,)
    assert params.structured_outputs == held(choice="required").structured_outputs


def test_options_that_cannot_be_kept_beside_reasoning_or_tools_are_refused():
    asked = StructuredOutputs(json=PAGES, disable_any_whitespace=True)
    for how in ({"tools": (), "start": MAYBE}, {}):
        with pytest.raises(RequestError, match="no options") as caught:
            held(asked, **how)
        assert caught.value.field == "structured_outputs"


def test_no_parser_can_hold_no_model_to_calls():
    for choice in ("required", "named"):
        with pytest.raises(RequestError, match="--tool-call-parser") as caught:
            held(choice=choice, name="tables", parser="none")
        assert caught.value.field == "tool_choice"
    assert held(parser="none").structured_outputs is None
