"""`truncation: "auto"`: the oldest turns are left out until the prompt fits into the context."""

from __future__ import annotations

from dataclasses import replace

from octavo.errors import RequestTooLargeError
from octavo.server.conversation import Conversation, render
from octavo.server.service import Service


async def truncated(service: Service, conversation: Conversation) -> Conversation:
    """The conversation with as many of its last turns as there is room for, the answer's own room left free.

    A turn begins with a user's message, so that calls keep their results. Leading system messages stay. If not even
    the last turn fits, it is left alone, and refused when it is sent to the engine.
    """
    messages = conversation.messages
    room = service.info.max_model_len - (conversation.params.max_tokens or 1)
    num_system = next(index for index, message in enumerate(messages) if message["role"] != "system")
    starts = [index for index in range(num_system + 1, len(messages)) if messages[index]["role"] == "user"]

    def cut(start: int) -> Conversation:
        return replace(conversation, messages=messages[:num_system] + messages[start:])

    async def fits(candidate: Conversation) -> bool:
        try:
            return len(await render(service, candidate)) <= room
        except RequestTooLargeError:
            return False

    if not starts or await fits(conversation):
        return conversation
    low, high = 0, len(starts) - 1
    while low < high:  # the first start that fits is in starts[low : high + 1], if there is one
        middle = (low + high) // 2
        if await fits(cut(starts[middle])):
            high = middle
        else:
            low = middle + 1
    return cut(starts[low])
