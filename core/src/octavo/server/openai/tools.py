"""`tools` and `tool_choice` of a chat. Every wrong value is an error that names its place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.server.conversation import Tool
from octavo.server.decode import decode_part

MAX_TOOLS = 1024
NAME = re.compile(r"[\w.:/-]{1,256}")
"""What a function may be called: it stands in prompts and grammars as it is."""


class FunctionFields(msgspec.Struct, kw_only=True):
    """parameters: JSON schema of the arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(msgspec.Struct, kw_only=True):
    """A tool that the client runs."""

    type: str = "function"
    function: FunctionFields


class ChosenFunction(msgspec.Struct, kw_only=True):
    name: str


class NamedChoice(msgspec.Struct, kw_only=True):
    """tool_choice that names a function."""

    type: str = "function"
    function: ChosenFunction


@dataclass(frozen=True)
class ToolUse:
    """The tools, and who decides whether one is called: see `Conversation`."""

    tools: tuple[Tool, ...] = ()
    choice: str = "auto"
    name: str | None = None


def read_tool_use(tools: list[Any] | None, choice: Any) -> ToolUse:
    """From a body's fields. Raises RequestError."""
    read = tuple(_tool(value, f"tools[{index}]") for index, value in enumerate(tools or ()))
    names = [tool.name for tool in read]
    for index, name in enumerate(names):
        check_name(name, f"tools[{index}].function.name", taken=names[:index])
    if choice is None or choice in ("auto", "none"):
        return ToolUse(read, choice or "auto")
    if not read:
        raise RequestError("tool_choice needs tools", field="tool_choice")
    if choice == "required":
        return ToolUse(read, "required")
    if not isinstance(choice, dict):
        raise RequestError(
            "tool_choice must be auto, none, required, or an object that names a function", field="tool_choice"
        )
    chosen: NamedChoice = decode_part(choice, NamedChoice, "tool_choice")
    if chosen.type != "function":
        raise RequestError(f"tool_choice.type {chosen.type!r} is not supported", field="tool_choice.type")
    if chosen.function.name not in names:
        field = "tool_choice.function.name"
        raise RequestError(f"{field} {chosen.function.name!r} is none of the tools: {', '.join(names)}", field=field)
    return ToolUse(read, "named", chosen.function.name)


def _tool(value: Any, place: str) -> Tool:
    fields: ToolFields = decode_part(value, ToolFields, place)
    if fields.type != "function":
        message = f"{place}.type {fields.type!r} is not supported: only functions, which the client runs"
        raise RequestError(message, field=f"{place}.type")
    function = fields.function
    check_schema(function.parameters, f"{place}.function.parameters")
    return Tool(
        name=function.name, description=function.description, parameters=function.parameters, strict=function.strict
    )


def check_name(name: str, field: str, *, taken: Sequence[str]) -> None:
    """Raise RequestError for what a tool cannot be called. taken: the names of the tools before it."""
    if not NAME.fullmatch(name):
        raise RequestError(f"{field} must be 1 to 256 letters, digits or any of _ . : / -", field=field)
    if name in taken:
        raise RequestError(f"{field} {name!r} is the name of an earlier tool too", field=field)
    if len(taken) >= MAX_TOOLS:
        raise RequestError(f"tools holds more than {MAX_TOOLS} tools", field="tools")


def check_schema(schema: dict[str, Any] | None, field: str) -> None:
    """Raise RequestError for what cannot be a schema of arguments. Its keywords are the grammar's business."""
    if schema is None:
        return
    if schema.get("type", "object") != "object":
        raise RequestError(f"{field}.type must be object, as arguments are named", field=f"{field}.type")
    for key, kind, word in (("properties", dict, "an object"), ("required", list, "a list of names")):
        if not isinstance(schema.get(key, kind()), kind):
            raise RequestError(f"{field}.{key} must be {word}", field=f"{field}.{key}")
    for name, property in schema.get("properties", {}).items():
        if not isinstance(property, dict | bool):
            raise RequestError(f"{field}.properties.{name} must be a schema", field=f"{field}.properties.{name}")
    if any(not isinstance(name, str) for name in schema.get("required", ())):
        raise RequestError(f"{field}.required must be a list of names", field=f"{field}.required")
