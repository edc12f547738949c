"""Runs parsers whole and character by character, and writes calls as every model would."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.server.parsers import names
from octavo.server.parsers.events import Content, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from octavo.server.parsers.registry import Format, choose, make_parser

Call = tuple[str, dict[str, Any]]
REGISTERED = SimpleNamespace(tool_parsers=names.TOOLS, reasoning_parsers=names.REASONING)


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


WEATHER = Tool(
    "weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "place": {"type": "object"},
        },
        "required": ["city"],
    },
)
LIST_TABLES = Tool("list_tables", {"type": "object", "properties": {}})
TOOLS = (WEATHER, LIST_TABLES)


@dataclass
class Answer:
    """What a client sees in the end. calls: [(name, arguments as JSON text)]."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    @property
    def values(self) -> list[Call]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def join(batches: Sequence[Sequence[Any]]) -> Answer:
    """Join the events of all steps; fails if a call's events come out of order."""
    answer, is_open = Answer(), False
    for event in (event for batch in batches for event in batch):
        match event:
            case Content(text):
                assert text
                assert not is_open, "content in the middle of a call"
                answer.content += text
            case Reasoning(text):
                assert text
                assert not is_open, "reasoning in the middle of a call"
                answer.reasoning += text
            case ToolCallStart(index, call_id, name):
                assert not is_open
                assert index == len(answer.calls)
                is_open = True
                answer.calls.append((name, ""))
                answer.ids.append(call_id)
            case ToolCallArguments(index, text):
                assert text
                assert is_open
                assert index == len(answer.calls) - 1
                answer.calls[index] = (answer.calls[index][0], answer.calls[index][1] + text)
            case ToolCallEnd(index):
                assert is_open
                assert index == len(answer.calls) - 1
                is_open = False
    assert not is_open, "a call without an end"
    for _, arguments in answer.calls:
        json.loads(arguments)
    return answer


def make(tool: str = "none", reasoning: str = "none") -> Format:
    return choose(REGISTERED, tool_call_parser=tool, reasoning_parser=reasoning)


def run(format: Format, pieces: Sequence[str], **how: Any) -> Answer:
    how.setdefault("tools", TOOLS)
    parser = make_parser(format, **how)
    return join([*[parser.feed(piece) for piece in pieces], parser.finish()])


def parse(text: str, tool: str = "none", reasoning: str = "none", **how: Any) -> Answer:
    """The answer that the text is, fed whole; fails unless single characters give the same."""
    format = make(tool, reasoning)
    whole, each = run(format, [text], **how), run(format, list(text), **how)
    assert (whole.content, whole.reasoning, whole.calls) == (each.content, each.reasoning, each.calls)
    return whole


@pytest.fixture
def parsing() -> SimpleNamespace:
    """The helpers above, for tests (which cannot import from here)."""
    return SimpleNamespace(
        parse=parse, run=run, make=make, join=join, Tool=Tool, TOOLS=TOOLS, WEATHER=WEATHER, REGISTERED=REGISTERED
    )


# How each model writes calls ----------------------------------------------------------------------------------------


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def envelopes(calls: Sequence[Call], key: str = "arguments") -> list[str]:
    return [f'{{"name": "{name}", "{key}": {to_json(arguments)}}}' for name, arguments in calls]


def each(pattern: str, calls: Sequence[Call], between: str = "", key: str = "arguments") -> str:
    return between.join(pattern.replace("{}", text) for text in envelopes(calls, key))


def listed(pattern: str, calls: Sequence[Call]) -> str:
    return pattern.replace("{}", f"[{', '.join(envelopes(calls))}]")


def arguments_in(pattern: str, calls: Sequence[Call], between: str = "") -> str:
    texts = [
        pattern.replace("NAME", name).replace("INDEX", str(index)).replace("{}", to_json(arguments))
        for index, (name, arguments) in enumerate(calls)
    ]
    return between.join(texts)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value)


def tagged(call: str, argument: str, calls: Sequence[Call], between: str = "\n") -> str:
    """`call` with NAME and {} for its arguments; `argument` with KEY, VALUE and TEXT for whether it is text."""
    texts = []
    for name, arguments in calls:
        parts = [
            argument.replace("KEY", key).replace("TEXT", to_json(isinstance(value, str))).replace("VALUE", plain(value))
            for key, value in arguments.items()
        ]
        texts.append(call.replace("NAME", name).replace("{}", "".join(parts)))
    return between.join(texts)


def unquoted(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return "{" + ",".join(f"{key}:{unquoted(inner, quote)}" for key, inner in value.items()) + "}"
        case list():
            return "[" + ",".join(unquoted(inner, quote) for inner in value) + "]"
    return to_json(value)


def braces(pattern: str, quote: str, calls: Sequence[Call]) -> str:
    return "".join(pattern.replace("NAME", name).replace("{}", unquoted(given, quote)) for name, given in calls)


def python(calls: Sequence[Call], between: str = ", ", value: Callable[[Any], str] = repr) -> str:
    return between.join(f"{name}({', '.join(f'{k}={value(v)}' for k, v in given.items())})" for name, given in calls)


def python_or_json(value: Any) -> str:
    return str(value) if isinstance(value, bool) else to_json(value)


FUNCTION = "<tool_call>\n<function=NAME>\n{}</function>\n</tool_call>"
PARAMETER = "<parameter=KEY>\nVALUE\n</parameter>\n"
INVOKE = '<｜DSML｜invoke name="NAME">\n{}</｜DSML｜invoke>\n'
DSML = '<｜DSML｜parameter name="KEY" string="TEXT">VALUE</｜DSML｜parameter>\n'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{}<|tool_call_end|>"
HARMONY = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>"
HARMONY_NEXT = "<|start|>assistant"
FUNCTION_GEMMA = "<start_function_call>call:NAME{}<end_function_call>"

WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "hermes": lambda calls: each("<tool_call>\n{}\n</tool_call>", calls, "\n"),
    "granite4": lambda calls: each("<tool_call>{}</tool_call>", calls),
    "llama3_json": lambda calls: each("{}", calls, "; ", "parameters"),
    "llama4_json": lambda calls: "<|python_tag|>" + each("{}", calls, "; ", "parameters"),
    "mistral": lambda calls: arguments_in("[TOOL_CALLS]NAME[ARGS]{}", calls),
    "mistral_list": lambda calls: listed("[TOOL_CALLS] {}", calls),
    "granite": lambda calls: listed("<|tool_call|> {}", calls),
    "granite-20b-fc": lambda calls: each("<function_call> {}", calls, " "),
    "phi4_mini_json": lambda calls: listed("functools{}", calls),
    "jamba": lambda calls: listed("<tool_calls>{}</tool_calls>", calls),
    "internlm": lambda calls: each("<|action_start|><|plugin|>\n{}<|action_end|>", calls, "\n", "parameters"),
    "xlam": lambda calls: listed("```json\n{}\n```", calls),
    "json": lambda calls: listed("{}", calls),
    "deepseek_v3": lambda calls: f"<｜tool▁calls▁begin｜>{arguments_in(V3, calls, chr(10))}<｜tool▁calls▁end｜>",
    "deepseek_v31": lambda calls: f"<｜tool▁calls▁begin｜>{arguments_in(V31, calls)}<｜tool▁calls▁end｜>",
    "deepseek_v32": lambda calls: (
        f"<｜DSML｜function_calls>\n{tagged(INVOKE, DSML, calls, '')}</｜DSML｜function_calls>"
    ),
    "deepseek_v4": lambda calls: f"<｜DSML｜tool_calls>\n{tagged(INVOKE, DSML, calls, '')}</｜DSML｜tool_calls>",
    "kimi_k2": lambda calls: f"<|tool_calls_section_begin|>{arguments_in(KIMI, calls)}<|tool_calls_section_end|>",
    "openai": lambda calls: arguments_in(HARMONY, calls, HARMONY_NEXT),
    "qwen3_coder": lambda calls: tagged(FUNCTION, PARAMETER, calls),
    "seed_oss": lambda calls: tagged(FUNCTION, PARAMETER, calls).replace("tool_call>", "seed:tool_call>"),
    "glm45": lambda calls: tagged(
        "<tool_call>NAME\n{}</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n", calls
    ),
    "glm47": lambda calls: tagged(
        "<tool_call>NAME{}</tool_call>", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>", calls, ""
    ),
    "minimax_m2": lambda calls: "<minimax:tool_call>\n{}</minimax:tool_call>".replace(
        "{}", tagged('<invoke name="NAME">\n{}</invoke>\n', '<parameter name="KEY">VALUE</parameter>\n', calls, "")
    ),
    "gemma4": lambda calls: braces("<|tool_call>call:NAME{}<tool_call|>", '<|"|>', calls),
    "functiongemma": lambda calls: braces(FUNCTION_GEMMA, "<escape>", calls),
    "pythonic": lambda calls: f"[{python(calls)}]",
    "llama4_pythonic": lambda calls: f"<|python_start|>[{python(calls)}]<|python_end|>",
    "lfm2": lambda calls: f"<|tool_call_start|>[{python(calls)}]<|tool_call_end|>",
    "olmo3": lambda calls: f"<function_calls>\n{python(calls, chr(10))}\n</function_calls>",
}
HELD_TO: dict[str, Callable[[Sequence[Call]], str]] = {
    "granite4": WRITERS["hermes"],
    "granite": lambda calls: listed("<|tool_call|>{}", calls),
    "llama4_json": WRITERS["llama3_json"],
    "xlam": WRITERS["json"],
    "glm47": WRITERS["glm45"],
    "pythonic": lambda calls: f"[{python(calls, value=python_or_json)}]",
    "llama4_pythonic": lambda calls: f"<|python_start|>[{python(calls, value=python_or_json)}]<|python_end|>",
    "lfm2": lambda calls: f"<|tool_call_start|>[{python(calls, value=python_or_json)}]<|tool_call_end|>",
    "olmo3": lambda calls: f"<function_calls>\n{python(calls, chr(10), python_or_json)}\n</function_calls>",
}
"""What grammars force, where the format may be written in several ways."""

WHOLE_ANSWER = {"llama3_json", "json", "pythonic"}
"""Formats whose calls are only calls if nothing stands before them."""


@dataclass(frozen=True)
class Written:
    """A format by name, and how it writes calls."""

    name: str
    write: Callable[[Sequence[Call]], str]

    def forced(self, calls: Sequence[Call]) -> str:
        """The calls in the one way that a grammar allows."""
        return HELD_TO.get(self.name, self.write)(calls)

    @property
    def only_calls(self) -> bool:
        return self.name in WHOLE_ANSWER


@pytest.fixture(params=sorted(WRITERS))
def written(request: pytest.FixtureRequest) -> Written:
    return Written(request.param, WRITERS[request.param])
