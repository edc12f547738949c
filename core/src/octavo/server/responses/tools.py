"""The tools of a Responses body, and which of them the model may or must call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.errors import RequestError
from octavo.server.conversation import Tool
from octavo.server.decode import decode_part
from octavo.server.openai.tools import check_name, check_schema
from octavo.server.responses.protocol import AllowedTools, FunctionTool, NamedFunction, ResponsesBody


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """What a `Conversation` wants to know. echo: tool_choice as the response tells it."""

    tools: tuple[Tool, ...]
    choice: str
    name: str | None
    echo: str | dict[str, Any]


def read_tool_use(body: ResponsesBody) -> ToolUse:
    """Tools and choice. Raises RequestError for a tool that the server itself would have to run, and a wrong choice."""
    tools: tuple[Tool, ...] = ()
    for index, value in enumerate(body.tools or ()):
        tool = read_tool(value, f"tools[{index}]")
        check_name(tool.name, f"tools[{index}].name", taken=[other.name for other in tools])
        tools = (*tools, tool)
    names = {tool.name for tool in tools}
    choice: str = "auto"
    name: str | None = None
    echo: str | dict[str, Any] = "auto"
    match body.tool_choice:
        case None:
            pass
        case "auto" | "none" | "required" as word:
            choice = echo = word
        case NamedFunction(wanted):
            choice, name, echo = "named", wanted, {"type": "function", "name": wanted}
            if name not in names:
                raise RequestError(f"tool_choice.name {name!r} is none of the tools", field="tool_choice.name")
        case AllowedTools(mode, allowed):
            choice, echo = mode, {"type": "allowed_tools", "mode": mode, "tools": allowed}
            tools = tuple(tool for tool in tools if tool.name in read_allowed(allowed, names))
        case other:
            raise RequestError(f"tool_choice {other!r} must be auto, none or required", field="tool_choice")
    if choice in ("required", "named") and not tools:
        raise RequestError("tool_choice needs tools", field="tool_choice")
    return ToolUse(tools=tools, choice=choice, name=name, echo=echo)


def read_tool(value: Any, place: str) -> Tool:
    """One tool of the type "function"."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        message = f"{place}.type {kind!r} is not supported: only tools that the client runs (function)"
        raise RequestError(message, field=f"{place}.type")
    if isinstance(value, dict) and kind is None:
        raise RequestError(f"{place}.type is required", field=f"{place}.type")
    tool: FunctionTool = decode_part(value, FunctionTool, place)
    check_schema(tool.parameters, f"{place}.parameters")
    return Tool(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)


def read_allowed(allowed: list[dict[str, Any]], names: set[str]) -> set[str]:
    """The names of allowed tools, each of which has to be a tool."""
    chosen = set()
    for index, value in enumerate(allowed):
        name = value.get("name")
        if name not in names:
            field = f"tool_choice.tools[{index}].name"
            raise RequestError(f"{field} {name!r} is none of the tools", field=field)
        chosen.add(name)
    return chosen
