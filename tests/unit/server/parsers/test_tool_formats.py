"""Every tool format: the same calls, written as its models write them."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

AWKWARD = 'He said "no" {or [yes]}, a\\b c\'d — 你好 😀\nnext } ] line'
CALLS = [
    ("weather", {"city": "Paris", "days": 3, "metric": True}),
    ("weather", {"city": "São Paulo", "tags": ["a", "b"], "place": {"lat": -23.5, "name": "x"}}),
]


def test_one_call(written: Any, parsing: SimpleNamespace) -> None:
    answer = parsing.parse(written.write(CALLS[:1]), written.name)
    assert answer.values == CALLS[:1]
    assert answer.content == answer.reasoning == ""
    assert all(answer.ids)


def test_two_calls_in_one_answer(written: Any, parsing: SimpleNamespace) -> None:
    answer = parsing.parse(written.write(CALLS), written.name)
    assert answer.values == CALLS
    assert answer.content == ""
    assert len(set(answer.ids)) == 2


def test_text_before_calls_is_content(written: Any, parsing: SimpleNamespace) -> None:
    before = "<|channel|>final<|message|>Let me look.<|end|><|start|>assistant" if written.name == "openai" else ""
    answer = parsing.parse((before or "Let me look.") + written.write(CALLS), written.name)
    if written.only_calls:
        assert answer.content == "Let me look." + written.write(CALLS)
    else:
        assert answer.content == "Let me look."
        assert answer.values == CALLS


def test_an_answer_without_calls_is_content_unchanged(written: Any, parsing: SimpleNamespace) -> None:
    for text in ("Hello {there}, [a] <b> `c` 3 < 4\n\n```python\nx = [1]\n```\n", "", " \n", '{"a": 1}', "[1, 2]"):
        answer = parsing.parse(text, written.name)
        assert (answer.content, answer.calls) == (text, [])


def test_strings_with_quotes_braces_and_unicode_arrive_unchanged(written: Any, parsing: SimpleNamespace) -> None:
    calls = [("weather", {"city": AWKWARD}), ("weather", {"city": "}]</x>", "days": 0})]
    assert parsing.parse(written.write(calls), written.name).values == calls


def test_a_call_without_arguments_has_empty_ones(written: Any, parsing: SimpleNamespace) -> None:
    answer = parsing.parse(written.write([("list_tables", {}), ("list_tables", {})]), written.name)
    assert answer.calls == [("list_tables", "{}")] * 2


def test_a_tool_that_nobody_declared_is_still_a_call(written: Any, parsing: SimpleNamespace) -> None:
    calls = [("no.such-tool_1", {"x": "y"})]
    assert parsing.parse(written.write(calls), written.name).values == calls


def test_calls_are_content_where_the_request_has_no_tools(written: Any, parsing: SimpleNamespace) -> None:
    if written.name == "openai":
        answer = parsing.parse(written.write(CALLS[:1]), written.name, tools=())
        assert (json.loads(answer.content), answer.calls) == (CALLS[0][1], [])
        return
    text = "Text " + written.write(CALLS)
    answer = parsing.parse(text, written.name, tools=())
    assert (answer.content, answer.calls) == (text, [])


def test_text_cut_anywhere_gives_whole_calls_first_and_valid_arguments(written: Any, parsing: SimpleNamespace) -> None:
    text = written.write([CALLS[1], CALLS[0]])
    for end in range(0, len(text), 3):
        answer = parsing.parse(text[:end], written.name)  # which checks that the arguments are JSON
        assert len(answer.calls) <= 2
        for (name, arguments), (expected, full) in zip(answer.values, [CALLS[1], CALLS[0]], strict=False):
            assert name == expected
            assert set(arguments) <= set(full)
        if len(answer.calls) == 2:
            assert answer.values[0] == CALLS[1]


def test_any_split_gives_the_same_calls(written: Any, parsing: SimpleNamespace) -> None:
    format = parsing.make(written.name)
    text = written.write([*CALLS, ("weather", {"city": AWKWARD}), ("list_tables", {})])
    whole = parsing.run(format, [text])
    assert len(whole.calls) == 4
    for seed in range(60):
        split = random.Random(seed)
        pieces, at = [], 0
        while at < len(text):
            size = split.randint(1, 9)
            pieces.append(text[at : at + size])
            at += size
        answer = parsing.run(format, pieces)
        assert (answer.content, answer.calls) == (whole.content, whole.calls)


NOISE = """
<tool_call> </tool_call> {"name":"f","arguments":{ } ] " \\ [TOOL_CALLS] f(a=' <think> </think> <function=f> <escape>
<parameter=k> </parameter> <arg_key> </arg_key> <arg_value> <|channel|>final <|message|> <|start|> call:f{k: [ { a=1, )
ab 12 <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <|tool_call> ```json ``` , :
"""


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.sampled_from([*NOISE.split(), " ", "\n"]), max_size=12), data=st.data())
def test_no_text_breaks_a_parser_or_depends_on_its_split(
    written: Any, parsing: SimpleNamespace, texts: list[str], data: st.DataObject
) -> None:
    prefix = data.draw(st.integers(0, 60))
    text = "".join(texts) + written.write(CALLS)[:prefix] + "".join(reversed(texts))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=5).map(sorted))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    answer = parsing.parse(text, written.name, "qwen3")
    split = parsing.run(parsing.make(written.name, "qwen3"), pieces)
    assert (answer.content, answer.reasoning, answer.calls) == (split.content, split.reasoning, split.calls)


@pytest.mark.parametrize("tool", ["hermes", "qwen3_coder", "deepseek_v31", "gemma4", "mistral", "glm45", "openai"])
def test_arguments_stream_while_they_are_written(tool: str, parsing: SimpleNamespace) -> None:
    writers = {
        "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "',
        "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\n",
        "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "',
        "gemma4": '<|tool_call>call:weather{city:<|"|>',
        "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "',
        "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>",
        "openai": '<|channel|>commentary to=functions.weather<|message|>{"city": "',
    }
    from octavo.server.parsers.registry import make_parser

    parser = make_parser(parsing.make(tool), tools=parsing.TOOLS)
    parser.feed(writers[tool])
    parser.feed("A")
    for word in ("Rio ", "de ", "Janeiro"):
        assert [event.text for event in parser.feed(word)] == [word]
