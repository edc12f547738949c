"""Formats by flag, by the chat template and by special tokens; formats of one's own."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.extensions import Extensions, load_extensions
from octavo.server.parsers.grammar import Move, State, ToolFormat
from octavo.server.parsers.registry import choose

GUIDE = (Path(__file__).parents[4] / "docs" / "tool-calling.md").read_text()
TITLES = ("## Formats of tool calls", "## Formats of reasoning")

TEMPLATES = {
    "qwen 2.5": (
        """{%- if tools %}{{- 'For each function call, return a json object with function name and arguments
        within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args>}\\n' }}
        {%- endif %}{%- for message in messages %}{{- '<|im_start|>' + message.role }}{%- endfor %}""",
        "hermes",
        None,
    ),
    "qwen 3": (
        """{%- if tools %}{{- '<tool_call>\\n{"name": ' }}{%- endif %}{%- set content = content.split('</think>')[-1] %}
        {%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}""",
        "hermes",
        "qwen3",
    ),
    "qwen 3 coder": (
        """{{- '<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n' }}""",
        "qwen3_coder",
        None,
    ),
    "llama 3.1": (
        """{{- "<|start_header_id|>system<|end_header_id|>" }}{{- "Respond in the format {"name": function name,
        "parameters": dictionary of argument name and its value}." }}{{- "<|python_tag|>" + tool_call.name }}""",
        "llama3_json",
        None,
    ),
    "llama 3.2": (
        """{{- '<|start_header_id|>user<|end_header_id|>' }}{{- '{"name": function name, "parameters": dict }' }}""",
        "llama3_json",
        None,
    ),
    "llama 4": ("""<|header_start|>{{ '<|python_start|>' }}""", "llama4_pythonic", None),
    "mistral 7b 0.3": (
        """{{- "[AVAILABLE_TOOLS] [" }}{{- "[TOOL_CALLS] [" }}{{- '{"name": ' }}[INST]""",
        "mistral_list",
        None,
    ),
    "magistral": ("""[SYSTEM_PROMPT][THINK]{{ '[TOOL_CALLS]' + name + '[ARGS]' }}""", "mistral", "mistral"),
    "deepseek v3": (
        """{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n' + '```json'}}""",
        "deepseek_v3",
        None,
    ),
    "deepseek v3.1": (
        """{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' }}{{'</think>'}}""",
        "deepseek_v31",
        "qwen3",
    ),
    "deepseek v3.2": ("""<｜DSML｜function_calls>\\n<｜DSML｜invoke name=""", "deepseek_v32", None),
    "gpt-oss": ("""{{- "<|start|>assistant<|channel|>analysis<|message|>" }}""", "openai", "openai_gptoss"),
    "granite 3.3": (
        """<|start_of_role|>assistant<|tool_call|>Here is my thought process: Here is my response:""",
        "granite",
        "granite",
    ),
    "granite 4": ("""<|start_of_role|>{{ '<tool_call>\\n{"name": ' }}""", "hermes", None),
    "glm 4.5": ("""{{- '<tool_call>' + name }}<arg_key>{{ k }}</arg_key></think>""", "glm45", "qwen3"),
    "kimi k2": ("""<|tool_calls_section_begin|><|tool_call_begin|>""", "kimi_k2", None),
    "minimax m2": ("""{{ '<minimax:tool_call>' }}{{ '<think>' }}{{ '</think>' }}""", "minimax_m2", "minimax_m2"),
    "seed oss": ("""<seed:tool_call>\\n<function=f>\\n<parameter=a> <seed:think>""", "seed_oss", "seed_oss"),
    "gemma 4": ("""{{ '<|tool_call>call:' }}{{ '<|channel>thought' }}""", "gemma4", "gemma4"),
    "functiongemma": ("""<start_function_call>call:{{ name }}{<escape>""", "functiongemma", None),
    "lfm 2": ("""<|tool_call_start|>[""", "lfm2", None),
    "olmo 3": ("""<function_calls>{{ calls }}</function_calls>""", "olmo3", None),
    "hunyuan": ("""<think>\\n</think>\\n<answer>\\n""", "json", "hunyuan_a13b"),
    "smollm 2": ("""{% for message in messages %}{{'<|im_start|>' + message['role']}}{% endfor %}""", "json", None),
}


@pytest.mark.parametrize("model", TEMPLATES)
def test_the_chat_template_shows_the_formats(model: str, parsing: SimpleNamespace) -> None:
    template, tool, reasoning = TEMPLATES[model]
    format = choose(parsing.REGISTERED, template=template)
    assert (format.tool_name, format.reasoning_name) == (tool, reasoning)


def test_flags_win_over_the_template(parsing: SimpleNamespace) -> None:
    template = TEMPLATES["qwen 3"][0]
    format = choose(parsing.REGISTERED, template=template, tool_call_parser="pythonic", reasoning_parser="none")
    assert (format.tool_name, format.reasoning_name) == ("pythonic", None)
    assert (format.has_tools, format.has_reasoning) == (True, False)
    format = choose(parsing.REGISTERED, template=template, tool_call_parser="none")
    assert (format.tool_name, format.reasoning_name) == (None, "qwen3")
    assert format.structural_tag(parsing.TOOLS, choice="required") is None


def test_tokens_tell_where_the_template_is_silent(parsing: SimpleNamespace) -> None:
    format = choose(parsing.REGISTERED, template="{{ messages }}", has_token={"[TOOL_CALLS]"}.__contains__)
    assert format.tool_name == "mistral"


def test_an_unknown_name_is_refused_with_those_that_are_known(parsing: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match=r"tool_call_parser 'hermse': known are auto, none, deepseek_v3, .*hermes"):
        choose(parsing.REGISTERED, tool_call_parser="hermse")
    with pytest.raises(ConfigError, match="reasoning_parser 'x': known are auto, none, deepseek_r1"):
        choose(parsing.REGISTERED, reasoning_parser="x")


def test_harmony_is_one_format_for_both(parsing: SimpleNamespace) -> None:
    for format in (
        parsing.make("openai"),
        parsing.make("none", "openai_gptoss"),
        parsing.make("hermes", "openai_gptoss"),
    ):
        assert format.tool_name == "openai"
        assert format.has_reasoning
        assert format.stop_tokens == ("<|call|>",)


def test_reasoning_end_marks_are_told(parsing: SimpleNamespace) -> None:
    assert parsing.make("hermes", "qwen3").reasoning_end == ("</think>",)
    assert parsing.make("hermes", "gemma4").reasoning_end == ("<channel|>",)
    assert parsing.make("hermes").reasoning_end == ()


def test_every_registered_format_loads(parsing: SimpleNamespace) -> None:
    for name in parsing.REGISTERED.tool_parsers:
        assert parsing.make(name).has_tools
    for name in parsing.REGISTERED.reasoning_parsers:
        assert parsing.make("none", name).has_reasoning


def test_the_built_in_formats_come_through_the_hook(parsing: SimpleNamespace) -> None:
    registered = load_extensions()
    assert registered.tool_parsers == dict(parsing.REGISTERED.tool_parsers)
    assert registered.reasoning_parsers == dict(parsing.REGISTERED.reasoning_parsers)


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch) -> Extensions:
    """The format that the guide shows, registered as it does, and two that are wrong."""
    module: Any = types.ModuleType("acme_formats")
    code = re.search(r"```python\n(# acme_formats.py\n.*?)```", GUIDE, re.S)
    assert code is not None
    exec(compile(code[1], "acme_formats", "exec"), module.__dict__)
    module.NOTHING = 3
    monkeypatch.setitem(sys.modules, "acme_formats", module)
    registered = Extensions()
    module.register_extensions(registry=registered)
    registered.tool_parser("wrong", "acme_formats:NOTHING")
    registered.tool_parser("absent", "acme_formats:ABSENT")
    return registered


def test_a_format_of_ones_own_is_a_few_lines_of_data(acme: Extensions, parsing: SimpleNamespace) -> None:
    format = choose(acme, tool_call_parser="acme", reasoning_parser="acme")
    answer = parsing.run(format, list('((hm)) Yes. @call f with {"a": ";"}; @call g;'))
    assert (answer.reasoning, answer.content) == ("hm", "Yes. ")
    assert answer.values == [("f", {"a": ";"}), ("g", {})]


def test_the_guide_names_every_format(parsing: SimpleNamespace) -> None:
    tools, reasoning = (GUIDE.partition(title)[2].partition("\n## ")[0] for title in TITLES)
    for text, table in ((tools, parsing.REGISTERED.tool_parsers), (reasoning, parsing.REGISTERED.reasoning_parsers)):
        rows = [row.split(" | ")[0] for row in text.splitlines() if row.startswith("| `")]
        assert sorted(re.findall("`([^`]+)`", " ".join(rows))) == sorted(table)


def test_a_format_that_leads_nowhere_is_refused_at_once(acme: Extensions) -> None:
    module = sys.modules["acme_formats"]
    states = {"name": State(kind="name", marks={";": Move(to="nowhere")})}
    module.BROKEN = ToolFormat(opens={"@": Move(to="name")}, states=states)  # type: ignore[attr-defined]
    acme.tool_parser("broken", "acme_formats:BROKEN")
    with pytest.raises(ConfigError, match="state 'name' leads to 'nowhere', which is no state"):
        choose(acme, tool_call_parser="broken")
    with pytest.raises(ConfigError, match=r"kind is one of .*, not 'nmae'"):
        State(kind="nmae")


def test_a_registered_target_that_is_no_format_is_reported(acme: Extensions) -> None:
    with pytest.raises(ConfigError, match="'acme_formats:NOTHING' is no ToolFormat"):
        choose(acme, tool_call_parser="wrong")
    with pytest.raises(ConfigError, match="'acme_formats:ABSENT' cannot be imported"):
        choose(acme, tool_call_parser="absent")
