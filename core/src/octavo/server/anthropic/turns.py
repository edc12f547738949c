"""From the turns of a Messages body to the messages that chat templates take.

system                       -> a system message
text                         -> content
thinking                     -> `reasoning` of the assistant's message
tool_use                     -> `tool_calls` of the assistant's message
tool_result in a user's turn -> a message of the role "tool", in its place among the turn's texts
"""

from __future__ import annotations

import json
from typing import Any

from octavo.errors import RequestError
from octavo.server.anthropic.protocol import (
    AssistantBlock,
    CountTokensBody,
    DocumentBlock,
    ImageBlock,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UserBlock,
)
from octavo.server.decode import decode_part
from octavo.server.message_builder import Message, MessageBuilder

BILLING_HEADER = "x-anthropic-billing-header:"
"""Claude Code puts this before its system prompt, with a text that changes with every request and is meant for
Anthropic's accounts: shown to the model, it would make the prefix cache useless."""


def to_messages(body: CountTokensBody) -> list[Message]:
    """The conversation. Raises RequestError naming the block that is wrong."""
    turns = MessageBuilder()
    for text in texts(body.system, "system"):
        if not text.startswith(BILLING_HEADER):
            turns.add_text("system", text)
    for index, value in enumerate(body.messages):
        place = f"messages[{index}]"
        turn: Turn = decode_part(value, Turn, place)
        if turn.role == "system" or isinstance(turn.content, str):
            for text in texts(turn.content, f"{place}.content"):
                turns.add_text(turn.role, text)
        else:
            add_blocks(turns, turn, f"{place}.content")
    check_end(turns.messages, len(body.messages))
    return turns.messages


def add_blocks(turns: MessageBuilder, turn: Turn, place: str) -> None:
    """Add the blocks of a user's or an assistant's turn."""
    kinds: Any = UserBlock if turn.role == "user" else AssistantBlock
    for number, value in enumerate(turn.content):
        where = f"{place}[{number}]"
        block: UserBlock | AssistantBlock = decode_part(value, kinds, where)
        match block:
            case TextBlock(text):
                turns.add_text(turn.role, text)
            case ThinkingBlock(thinking):
                turns.add_reasoning(thinking)
            case ToolUseBlock(id, name, arguments):
                turns.add_call(id, name, json.dumps(arguments, ensure_ascii=False))
            case ToolResultBlock(id):
                turns.add_result(id, result_text(block, where))
            case ImageBlock() | DocumentBlock():
                refuse_media(block, where)


def check_end(messages: list[Message], num_turns: int) -> None:
    """Raise RequestError unless there is something to answer, or text of an assistant to go on from."""
    if not any(message["role"] != "system" for message in messages):
        raise RequestError("messages must not be empty", field="messages")
    last = messages[-1]
    if last["role"] != "assistant":
        return
    place = f"messages[{num_turns - 1}].content"
    if last.get("tool_calls"):
        raise RequestError(f"{place} ends with a tool_use, but no tool_result follows", field=place)
    if not last["content"]:
        raise RequestError(f"{place} has no text to go on from", field=place)


def texts(content: str | list[Any] | None, place: str) -> list[str]:
    """The texts of a content that can hold nothing else."""
    if not isinstance(content, list):
        return [] if content is None else [content]
    blocks: list[TextBlock] = [
        decode_part(value, TextBlock, f"{place}[{number}]") for number, value in enumerate(content)
    ]
    return [block.text for block in blocks]


def result_text(result: ToolResultBlock, place: str) -> str:
    """What the model sees of a result. An error says so: templates have no mark for one."""
    parts = [result.content] if isinstance(result.content, str) else []
    if isinstance(result.content, list):
        for number, value in enumerate(result.content):
            where = f"{place}.content[{number}]"
            block: ResultBlock = decode_part(value, ResultBlock, where)
            match block:
                case TextBlock(text) | ToolReferenceBlock(text):
                    parts.append(text)
                case ImageBlock() | DocumentBlock():
                    refuse_media(block, where)
    text = "\n".join(parts)
    return f"Error: {text}" if result.is_error and not text.lower().startswith("error") else text


def refuse_media(block: ImageBlock | DocumentBlock, place: str) -> None:
    """Raise RequestError: there is no model for it."""
    kind = "images" if isinstance(block, ImageBlock) else "documents"
    raise RequestError(f"{place}: this model takes no {kind}, only text", field=f"{place}.type")
