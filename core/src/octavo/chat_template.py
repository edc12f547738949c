"""Chat messages to prompt text through a model's Jinja template, in a sandbox.

What a template gets to see, so that one request works with every template:
- `content` given as a list of parts stays a list if the template iterates over content; otherwise the text parts are
  joined by a newline, and a part that is not text is refused. A template that iterates but never asks whether content
  `is string` gets every string as one text part.
- an assistant's null or missing `content` is "", unless the template itself compares content with none.
- the `arguments` of tool calls are objects; a template that can only join them as strings gets them as JSON text.
- `reasoning` and `reasoning_content` are the same field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import RequestError

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Part types that are text, and the key their text is under."""

CONTINUE_MARK = "<|octavo-continues-here|> "
"""Put behind the final message to find where it ends. Its last space tells whether the template strips content."""

Message = dict[str, Any]


class ChatTemplate:
    """One or more named templates of a model. `special_tokens`: bos_token, eos_token, ... as the template calls them.

    `templates` holds sources by name; "default" is used unless there are tools and a template named "tool_use".
    """

    def __init__(self, templates: str | Mapping[str, str], *, special_tokens: Mapping[str, str] | None = None) -> None:
        self.templates = {"default": templates} if isinstance(templates, str) else dict(templates)
        self.special_tokens = dict(special_tokens or {})

    def source(self, *, tools: bool = False) -> str:
        """The source that a request uses. Raises RequestError if several are named and none is the default."""
        if tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if "default" in self.templates:
            return self.templates["default"]
        if len(self.templates) == 1:
            return next(iter(self.templates.values()))
        names = ", ".join(sorted(self.templates))
        raise RequestError(f"the model has no default chat template; choose one of: {names}", field="chat_template")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. `template`: a name in `templates` or a template's source.

        continue_final_message: the text ends right behind the content of the last message (no generation prompt).
        Raises RequestError naming the field; what the template itself raises comes with field "messages".
        """
        if template is None:
            template = self.source(tools=bool(tools))
        compiled = compile_template(self.templates.get(template, template))
        if clash := RESERVED.intersection(template_kwargs or {}):
            raise RequestError(f"{', '.join(sorted(clash))} cannot be set here", field="chat_template_kwargs")
        prepared = [compiled.prepare(message, index) for index, message in enumerate(_checked(messages))]
        if continue_final_message:
            prepared[-1]["content"] = _marked(prepared[-1]["content"])
        variables = self.special_tokens | dict(template_kwargs or {})
        variables |= {
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = compiled.render(prepared, variables)
        return _cut_at_mark(text) if continue_final_message else text


class CompiledTemplate:
    """A template and what its source tells about the messages it wants."""

    def __init__(self, source: str) -> None:
        try:
            self._template = _environment.from_string(source)
            tree = _environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}", field="chat_template"
            ) from error
        self.takes_parts = _iterates_content(tree)
        self.takes_strings = not self.takes_parts or re.search(r"\bis\s+(not\s+)?string\b", source) is not None
        self.tests_none = re.search(r"\bcontent\b['\"\]\s]*(is\s+(not\s+)?|[!=]=\s*)none\b", source, re.I) is not None

    def prepare(self, message: Mapping[str, Any], index: int) -> Message:
        """A copy of the message in the form this template takes."""
        out = dict(message)
        where = f"messages[{index}]"
        out["content"] = self._content(out.get("content"), where, role=out["role"])
        if out.get("tool_calls"):
            out["tool_calls"] = [_tool_call(call, where) for call in out["tool_calls"]]
        elif "tool_calls" in out:
            del out["tool_calls"]
        reasoning = out.get("reasoning_content") or out.get("reasoning")
        if reasoning:
            out["reasoning"] = out["reasoning_content"] = reasoning
        return out

    def _content(self, content: Any, where: str, *, role: str) -> Any:
        if content is None:
            if role != "assistant":
                raise RequestError(f"{where}.content is missing", field="messages")
            return None if self.tests_none else ("" if self.takes_strings else [])
        if isinstance(content, str):
            return content if self.takes_strings else [{"type": "text", "text": content}]
        if not isinstance(content, Sequence) or isinstance(content, bytes):
            raise RequestError(f"{where}.content must be a string or a list of parts", field="messages")
        parts = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        if self.takes_parts:
            return parts
        for part in parts:
            if part["type"] != "text":
                raise RequestError(f"{where}.content: this model takes no {part['type']!r} parts", field="messages")
        return "\n".join(part["text"] for part in parts)

    def render(self, messages: list[Message], variables: Mapping[str, Any]) -> str:
        """Run the template; whatever it raises is the request's error."""
        try:
            return self._template.render(messages=messages, **variables)
        except TypeError as error:
            as_text = _with_json_arguments(messages)
            if as_text == messages:
                _refuse(error)
            messages = as_text
        except Exception as error:  # a template is a program of the model's author: it can raise anything
            _refuse(error)
        try:
            return self._template.render(messages=messages, **variables)
        except Exception as error:
            _refuse(error)


@lru_cache(maxsize=64)
def compile_template(source: str) -> CompiledTemplate:
    """Parse a template once. Raises RequestError (field "chat_template") with the line of a syntax error."""
    return CompiledTemplate(source)


def _refuse(error: Exception) -> NoReturn:
    text = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
    raise RequestError(f"the chat template refused the messages: {text}", field="messages") from error


def _checked(messages: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError("messages must be a non-empty list", field="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}] must be an object with a role", field="messages")
    return messages


def _part(part: Any, where: str) -> Message:
    """A content part in the form templates know: texts of every API as {"type": "text", "text": ...}."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise RequestError(f"{where} must be a string or an object with a type", field="messages")
    key = TEXT_PARTS.get(part["type"])
    if key is None:
        return dict(part)
    if not isinstance(part.get(key), str):
        raise RequestError(f"{where}.{key} must be a string", field="messages")
    return {"type": "text", "text": part[key]}


def _tool_call(call: Any, where: str) -> Message:
    """A copy of a tool call with its arguments as an object, if they are JSON of one."""
    if not isinstance(call, Mapping):
        raise RequestError(f"{where}.tool_calls must hold objects", field="messages")
    out = dict(call)
    function = out.get("function")
    if isinstance(function, Mapping) and isinstance(arguments := function.get("arguments"), str):
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            return out
        if isinstance(parsed, dict):
            out["function"] = dict(function) | {"arguments": parsed}
    return out


def _with_json_arguments(messages: list[Message]) -> list[Message]:
    def as_text(call: Message) -> Message:
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), dict):
            return call
        return call | {"function": dict(function) | {"arguments": to_json(function["arguments"])}}

    return [
        message | {"tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _marked(content: Any) -> Any:
    """The content with CONTINUE_MARK behind its last text."""
    if isinstance(content, str):
        return content + CONTINUE_MARK
    if content and content[-1].get("type") == "text":
        return [*content[:-1], content[-1] | {"text": content[-1]["text"] + CONTINUE_MARK}]
    raise RequestError("the last message has no text to continue", field="continue_final_message")


def _cut_at_mark(text: str) -> str:
    at = text.rfind(CONTINUE_MARK.rstrip())
    if at < 0:
        raise RequestError(
            "the chat template does not show the last message, so it cannot be continued",
            field="continue_final_message",
        )
    return text[:at] if text.startswith(CONTINUE_MARK, at) else text[:at].rstrip()


def _iterates_content(tree: nodes.Template) -> bool:
    """Whether some `for` runs over a message's content, directly or through a variable set to it."""

    def is_content(node: nodes.Node) -> bool:
        while isinstance(node, nodes.Filter) and node.node is not None:
            node = node.node
        match node:
            case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
                return True
            case nodes.Name(name=name):
                return name in names
        return False

    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            names.add(assign.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant wrote, for training. Here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  jinja's own attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on: no HTML escapes, which Jinja's own filter would add."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    globals_: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(globals_)
    return environment


_environment = _make_environment()
