"""What cannot be a call is text; what was announced as one ends as one. Nothing is lost."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

NO_CALLS = {
    "hermes": [
        "<tool_call>hello</tool_call>",
        '<tool_call>{"city": "x"}</tool_call> y',
        '<tool_call>{"name": 3}',
        "<tool_call",
    ],
    "llama3_json": [
        '{"name": "Bob", "age": 3}',
        '{"name": "x"}',
        "{broken",
        '{"parameters": {}}',
        '{"a": {"name": "f"}}',
    ],
    "mistral": ["[TOOL_CALLS] [3]", "[TOOL_CALLS]a b", "[TOOL_CALLS"],
    "pythonic": ["[f(1)]", "[f]", "[x for x in y]", "[]", "[f(a b=1)]", "[1(a=2)]"],
    "qwen3_coder": ["<tool_call>\nhi</tool_call>", "<function=", "<function=a b>", "<function=>x"],
    "glm45": ["<tool_call>\n<arg_key>", "<tool_call>two words\n"],
    "xlam": ['```json\n{"a": 1}\n```', '```json\n[{"name": "x"}]\n```', "```python\nprint()\n```", "[1, 2]", "``"],
    "gemma4": ["<|tool_call>hello<tool_call|>", "<|tool_call>call:f(x)"],
    "deepseek_v3": ["<｜tool▁call▁begin｜>other", "<｜tool▁calls▁begin｜>text"],
    "internlm": ["<|action_start|><|interpreter|>\nprint()<|action_end|>"],
    "phi4_mini_json": ["functools is a module", "functools[0]"],
}


@pytest.mark.parametrize(("tool", "text"), [(tool, text) for tool, texts in NO_CALLS.items() for text in texts])
def test_what_is_no_call_is_content_as_it_stands(tool: str, text: str, parsing: SimpleNamespace) -> None:
    answer = parsing.parse(text, tool)
    assert (answer.content, answer.calls) == (text, [])


def test_a_call_behind_what_is_no_call_is_found(parsing: SimpleNamespace) -> None:
    answer = parsing.parse('<tool_call>oh <tool_call>{"name": "f", "arguments": {}}</tool_call>', "hermes")
    assert (answer.content, answer.calls) == ("<tool_call>oh ", [("f", "{}")])


def test_text_that_breaks_an_announced_call_follows_it_as_content(parsing: SimpleNamespace) -> None:
    answer = parsing.parse('<tool_call>{"name": "f", "arguments": {"a": 1, "b": oops}}</tool_call>', "hermes")
    assert answer.values == [("f", {"a": 1})]
    assert answer.content == ', "b": oops}}</tool_call>'
    answer = parsing.parse("[TOOL_CALLS]f[ARGS]no json", "mistral")
    assert (answer.calls, answer.content) == ([("f", "{}")], "no json")
    answer = parsing.parse("[f(a=1, 2)] x", "pythonic")
    assert (answer.values, answer.content) == ([("f", {"a": 1})], "2)] x")


def test_missing_ends_are_tolerated(parsing: SimpleNamespace) -> None:
    for tool, text in (
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b"}}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b"</tool_call>'),
        ("qwen3_coder", "<function=f>\n<parameter=a>\nb\n</parameter>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nb\n</function>\n</tool_call>"),
        ("openai", '<|channel|>commentary to=functions.f<|message|>{"a": "b"'),
        ("deepseek_v3", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "b"}'),
        ("gemma4", '<|tool_call>call:f{a:<|"|>b'),
        ("mistral_list", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "b"}'),
    ):
        answer = parsing.parse(text, tool)
        assert (answer.values, answer.content) == ([("f", {"a": "b"})], ""), text


def test_arguments_before_the_name_and_as_a_string_are_read(parsing: SimpleNamespace) -> None:
    for body in (
        '{"arguments": {"a": "b"}, "name": "f"}',
        '{"name": "f", "arguments": "{\\"a\\": \\"b\\"}"}',
        '{"arguments": "{\\"a\\": \\"b\\"}", "name": "f"}',
        '{"id": [1, {"x": 2}], "name": "f", "parameters": {"a": "b"}, "type": "function"}',
    ):
        assert parsing.parse(f"<tool_call>{body}</tool_call>", "hermes").values == [("f", {"a": "b"})]


def test_of_several_arguments_the_first_count(parsing: SimpleNamespace) -> None:
    body = '{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}, "arguments": "x", "name": "g"}'
    assert parsing.parse(f"<tool_call>{body}</tool_call>", "hermes").values == [("f", {"a": 1})]
    assert parsing.parse(body.replace('"name": "f", ', ""), "llama3_json").values == [("g", {"a": 1})]


def test_an_id_between_name_and_arguments_is_passed_over(parsing: SimpleNamespace) -> None:
    answer = parsing.parse('[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', "mistral")
    assert (answer.values, answer.content) == ([("f", {"a": 1})], "")


def test_missing_or_null_arguments_are_empty(parsing: SimpleNamespace) -> None:
    for body in ('{"name": "f"}', '{"name": "f", "arguments": null}', '{"arguments": null, "name": "f"}'):
        assert parsing.parse(f"<tool_call>{body}</tool_call>", "hermes").calls == [("f", "{}")]


def test_an_end_mark_in_a_string_ends_nothing(parsing: SimpleNamespace) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"html": "</tool_call>{<tool_call>"}}</tool_call>'
    assert parsing.parse(text, "hermes").values == [("f", {"html": "</tool_call>{<tool_call>"})]


def test_white_space_around_calls_is_dropped_but_not_that_of_text(parsing: SimpleNamespace) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert parsing.parse(f"\n\n{call}\n\n{call}\n", "hermes").content == ""
    assert parsing.parse(f"  a \n{call}\n b ", "hermes").content == "  a \nb "
    assert parsing.parse("  \n a", "hermes").content == "  \n a"
    assert parsing.parse('\n{"x": 1}', "llama3_json").content == '\n{"x": 1}'


def test_white_space_behind_a_call_that_is_cut_off_is_no_content(parsing: SimpleNamespace) -> None:
    begin, middle, end = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    answer = parsing.parse(f"{begin}f{middle}{{}}{end}\n", "deepseek_v31")
    assert (answer.content, answer.calls) == ("", [("f", "{}")])


def test_keys_with_space_around_them_are_still_typed(parsing: SimpleNamespace) -> None:
    text = "<tool_call>weather\n<arg_key> days </arg_key>\n<arg_value>3</arg_value>\n<arg_key>city\n</arg_key>"
    answer = parsing.parse(f"{text}<arg_value>42</arg_value></tool_call>", "glm45")
    assert answer.values == [("weather", {"days": 3, "city": "42"})]


def test_special_tokens_are_left_out_of_text_only(parsing: SimpleNamespace) -> None:
    drop = frozenset({"<|eot|>", "<|tool_call|>", "<s>"})
    answer = parsing.parse("<s>a<|eot|> b", "hermes", "qwen3", drop=drop)
    assert answer.content == "a b"
    answer = parsing.parse("<think>a<|eot|></think>b<|eot|>", "hermes", "qwen3", drop=drop)
    assert (answer.reasoning, answer.content) == ("a", "b")
    text = '<|tool_call|> [{"name": "f", "arguments": {"a": "<|eot|>"}}]<|eot|>'
    answer = parsing.parse(text, "granite", drop=drop)
    assert (answer.values, answer.content) == ([("f", {"a": "<|eot|>"})], "")
    assert parsing.parse("<|tool_call|> no", "granite", drop=drop).content == " no"
    assert parsing.parse("a<|eot|>b", "granite").content == "a<|eot|>b"


def test_only_the_beginning_of_a_mark_is_held_back(parsing: SimpleNamespace) -> None:
    from octavo.server.parsers.registry import make_parser

    parser = make_parser(parsing.make("hermes", "qwen3"), tools=parsing.TOOLS)
    assert [event.text for event in parser.feed("Hello there")] == ["Hello there"]
    assert [event.text for event in parser.feed(" a < b")] == [" a < b"]
    assert parser.feed("<tool_") == []
    assert [event.text for event in parser.feed("box")] == ["<tool_box"]
    assert parser.feed("<tool_ca") == []
    assert [event.text for event in parser.finish()] == ["<tool_ca"]


def test_ids_are_of_the_models_kind(parsing: SimpleNamespace) -> None:
    ids = parsing.parse("[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}", "mistral").ids
    assert all(re.fullmatch("[A-Za-z0-9]{9}", call_id) for call_id in ids)
    begin, middle, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    text = f"{begin}functions.f:3{middle}{{}}{end}{begin}g{middle}{{}}{end}"
    answer = parsing.parse(text, "kimi_k2")
    assert answer.ids == ["functions.f:3", "functions.g:1"]
    assert [name for name, _ in answer.calls] == ["f", "g"]
    assert all(re.fullmatch("call_[0-9a-f]{24}", call_id) for call_id in parsing.parse("[f()]", "pythonic").ids)
