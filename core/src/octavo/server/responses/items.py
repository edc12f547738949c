"""Input items: given ids, so that they can be listed, and turned into the messages that chat templates take.

    message              -> content, of the role (a developer's is the system's)
    reasoning            -> `reasoning` of the assistant's message
    function_call        -> `tool_calls` of the assistant's message
    function_call_output -> a message of the role "tool"

Output items of earlier responses are input items too.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from octavo.errors import RequestError
from octavo.server.decode import decode_part
from octavo.server.message_builder import MessageBuilder
from octavo.server.responses.protocol import (
    ContentPart,
    FunctionCall,
    FunctionCallOutput,
    InputAudio,
    InputFile,
    InputImage,
    InputItem,
    ItemReference,
    Message,
    Reasoning,
    Refusal,
)

Item = dict[str, Any]

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
MEDIA = {InputImage: "images", InputFile: "files", InputAudio: "audio"}


def as_items(given: str | list[Any] | None) -> list[Item]:
    """The items of an input, each with a type and an id; a text is one message of a user.

    Only what is no object, or has a type that is no text, is refused here (RequestError).
    """
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items = []
    for index, value in enumerate(given):
        if not isinstance(value, dict):
            raise RequestError(f"input[{index}] must be an object", field=f"input[{index}]")
        kind = value.get("type")
        if not isinstance(kind, str | None):
            raise RequestError(f"input[{index}].type must be a string", field=f"input[{index}].type")
        item = value if kind is not None else value | {"type": "message"}
        if item["type"] == "message":
            item = item | {"content": as_parts(item.get("content"), item.get("role"))}
        if not item.get("id"):
            item = item | {"id": f"{PREFIXES.get(item['type'], 'item')}_{uuid.uuid4().hex}"}
        items.append(item)
    return items


def as_parts(content: Any, role: Any) -> Any:
    """A text as a list with one part, which is how messages are listed."""
    if not isinstance(content, str):
        return content
    kind = "output_text" if role == "assistant" else "input_text"
    return [{"type": kind, "text": content} | ({"annotations": []} if role == "assistant" else {})]


def add_items(turns: MessageBuilder, items: Sequence[Item], *, place: str = "input") -> None:
    """Add items to a conversation. Raises RequestError naming the item that is wrong."""
    for index, value in enumerate(items):
        where = f"{place}[{index}]"
        item: InputItem = decode_part(value, InputItem, where)
        match item:
            case Message(role, content):
                for text in texts(content, f"{where}.content"):
                    turns.add_text("system" if role == "developer" else role, text)
            case Reasoning(summary, content):
                said, key = (content, "content") if content else (summary or [], "summary")
                if thought := "\n".join(texts(said, f"{where}.{key}")):
                    turns.add_reasoning(thought)
            case FunctionCall(call_id, name, arguments):
                turns.add_call(call_id, name, arguments)
            case FunctionCallOutput(call_id, output):
                turns.add_result(call_id, "\n".join(texts(output, f"{where}.output")))
            case ItemReference():
                hint = "send the item itself, or previous_response_id"
                raise RequestError(f"{where}.type 'item_reference' is not supported: {hint}", field=f"{where}.type")


def texts(content: str | list[Any], place: str) -> list[str]:
    """The texts of a content. Raises RequestError for a part that is none."""
    if isinstance(content, str):
        return [content]
    found = []
    for number, value in enumerate(content):
        where = f"{place}[{number}]"
        part: ContentPart = decode_part(value, ContentPart, where)
        if isinstance(part, InputImage | InputFile | InputAudio):
            raise RequestError(f"{where}: this model takes no {MEDIA[type(part)]}, only text", field=f"{where}.type")
        found.append(part.refusal if isinstance(part, Refusal) else part.text)
    return found
