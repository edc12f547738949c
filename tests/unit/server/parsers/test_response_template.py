"""Formats that a model describes itself, by Transformers' response templates."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.server.parsers.registry import Format, choose

TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<bot>",
    "fields": {
        "reasoning_content": {"open": "<hm>", "close": "</hm>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<do>",
            "close": "</do>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": ["<end>"], "content": "text"},
    },
}
PROMPT = "<user>What is <hm>?<bot>"
CALL = '<do>{"name": "weather", "arguments": {"city": "x}", "days": 3}}</do>'


@pytest.fixture
def format(parsing: SimpleNamespace) -> Format:
    return choose(parsing.REGISTERED, template="{{ messages }}", response_template=TEMPLATE)


def read(parsing: SimpleNamespace, format: Format, text: str, **how: Any) -> Any:
    how = {"prompt_tail": PROMPT} | how
    whole, each = parsing.run(format, [text], **how), parsing.run(format, list(text), **how)
    assert (whole.content, whole.reasoning, whole.calls) == (each.content, each.reasoning, each.calls)
    return whole


def test_it_is_used_where_nothing_else_is_known_of_the_model(parsing: SimpleNamespace, format: Format) -> None:
    assert (format.tool_name, format.reasoning_name) == ("hf", "hf")
    assert format.has_tools
    assert format.has_reasoning
    known = choose(parsing.REGISTERED, template="<tool_call>", response_template=TEMPLATE)
    assert known.tool_name == "hermes"
    named = choose(parsing.REGISTERED, template="<tool_call>", tool_call_parser="hf", response_template=TEMPLATE)
    assert named.tool_name == "hf"


def test_reasoning_content_and_calls_are_told_apart(parsing: SimpleNamespace, format: Format) -> None:
    answer = read(parsing, format, f"<hm>why</hm>Let me look.\n{CALL}\n{CALL}")
    assert (answer.reasoning, answer.content) == ("why", "Let me look.")
    assert answer.values == [("weather", {"city": "x}", "days": 3})] * 2


def test_the_prompt_may_have_opened_reasoning(parsing: SimpleNamespace, format: Format) -> None:
    answer = read(parsing, format, "why</hm>b", prompt_tail=PROMPT + "<hm>")
    assert (answer.reasoning, answer.content) == ("why", "b")
    cut = read(parsing, format, "why", prompt_tail=PROMPT + "<hm>")
    assert (cut.reasoning, cut.content) == ("why", "")
    off = read(parsing, format, "<hm>why</hm>b", reasoning=False)
    assert (off.reasoning, off.content) == ("", "whyb")


def test_what_the_template_cannot_read_is_content(parsing: SimpleNamespace, format: Format) -> None:
    answer = read(parsing, format, f"a:<do>no json</do>{CALL}")
    assert answer.content == "a:no json"
    assert [name for name, _ in answer.calls] == ["weather"]
    assert read(parsing, format, '<do>{"city": "x"}</do>').content == '{"city": "x"}'
    assert read(parsing, format, '<do>{"name": "weather", "argum').calls == []


def test_calls_without_tools_are_content(parsing: SimpleNamespace, format: Format) -> None:
    answer = read(parsing, format, '<do>{"name": "f"}</do>', tools=())
    assert (answer.content, answer.calls) == ('{"name": "f"}', [])


def test_special_tokens_are_left_out(parsing: SimpleNamespace, format: Format) -> None:
    answer = read(parsing, format, "a[eos]b[eo<hm>c[eos]</hm>", drop=frozenset({"[eos]"}))
    assert (answer.content, answer.reasoning) == ("ab[eo", "c")


def test_a_wrong_or_missing_template_is_reported(parsing: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match="response_template: response_template must define 'start_anchor'"):
        choose(parsing.REGISTERED, response_template={"fields": TEMPLATE["fields"]}, template="")
    with pytest.raises(ConfigError, match="'hf' needs a response_template"):
        choose(parsing.REGISTERED, tool_call_parser="hf", template="")
    assert choose(parsing.REGISTERED, tool_call_parser="hf").tool_name == "hf"  # the model is not known yet


def test_forced_calls_fall_back_to_json(parsing: SimpleNamespace, format: Format) -> None:
    assert format.structural_tag(parsing.TOOLS, choice="required") is None
    forced = replace(format, tools=parsing.make("json").tools)
    answer = parsing.run(forced, ['[{"name": "weather", "arguments": {}}]'])
    assert answer.calls == [("weather", "{}")]
