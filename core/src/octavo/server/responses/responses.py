"""POST /v1/responses, and the routes of a response that is stored or still runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.sampling.params import integer
from octavo.server.conversation import AnswerDelta, answer, render
from octavo.server.decode import decode_body
from octavo.server.endpoint import Call, Stream, encode_json
from octavo.server.errors import ApiError, aborted
from octavo.server.openai.answers import TokenLogprob
from octavo.server.openai.logprobs import TokenNames, chat_logprobs
from octavo.server.responses.answers import (
    Deleted,
    End,
    Event,
    InputItems,
    InputTokens,
    OutputMessage,
    Response,
)
from octavo.server.responses.background import Run
from octavo.server.responses.events import (
    Events,
    Logprobs,
    ResponseWriter,
    make_events,
    response_error,
    saved,
    with_failure,
)
from octavo.server.responses.items import Item, as_items
from octavo.server.responses.protocol import ResponsesBody
from octavo.server.responses.read import LOGPROBS, check_body, new_response, read_params, to_conversation
from octavo.server.responses.store import Record
from octavo.server.responses.truncate import truncated
from octavo.server.service import Service

MAX_LISTED = 100
MAX_DIGITS = 18

_decode_response = msgspec.json.Decoder(Response).decode
_decode_event = msgspec.json.Decoder(Event).decode
_decode_items = msgspec.json.Decoder(list[dict[str, Any]]).decode


async def create_response(service: Service, call: Call[ResponsesBody]) -> Response | Stream[Event]:
    """Answer an input. Raises RequestError for a wrong body, ApiError for an unknown model or a full queue."""
    body = decode_body(call.body, ResponsesBody)
    model = service.model_name(body.model)
    check_body(body)
    params = read_params(body, service)
    items = as_items(body.input)
    earlier = await read_earlier(service, call.owner, body.previous_response_id)
    conversation = replace(
        to_conversation(body, service, items, earlier, request_id=call.request_id),
        params=params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
    service.admit()
    if body.truncation == "auto":
        conversation = await truncated(service, conversation)
    response = new_response(body, params, model=model)
    writer = ResponseWriter(response, logprobs=logprobs_writer(service, body))
    events = make_events(answer(service, conversation), writer)
    keeper = Keeper(service, call.owner, encode_json(items))
    if body.background:
        return await start_in_background(service, Run(call.owner, writer), events, keeper, stream=bool(body.stream))
    if response.store:
        events = saved(events, keeper.save)
    if body.stream:
        return Stream(with_failure(events, writer), named=True)
    return await last_response(events)


async def get_response(service: Service, call: Call[None]) -> Response | Stream[Event]:
    """A stored response, or one that runs; with `stream`, the events of one that was made in the background."""
    id = call.path["id"]
    start = read_number(call, "starting_after", default=-1, low=-1) + 1
    stream = read_flag(call, "stream")
    if (run := find_run(service, call.owner, id)) is not None:
        return Stream(run.follow(start), named=True) if stream else run.response
    record = await find_record(service, call.owner, id)
    if not stream:
        return read_response(record)
    if record.events is None:
        raise RequestError("only responses made with background=true can be streamed again", field="stream")
    return Stream(replay(record.events.split(b"\n")[start:]), named=True)


async def delete_response(service: Service, call: Call[None]) -> Deleted:
    """Forget a response; one that runs is cancelled first. Responses that went on from it stay."""
    id = call.path["id"]
    if (run := find_run(service, call.owner, id)) is not None:
        await run.stop()
    if not await service.response_store.delete(call.owner, id):
        raise no_response(id)
    return Deleted(id)


async def cancel_response(service: Service, call: Call[None]) -> Response:
    """Stop a response that runs in the background. One that is over is given as it is."""
    id = call.path["id"]
    if (run := find_run(service, call.owner, id)) is not None:
        return await run.stop()
    response = read_response(await find_record(service, call.owner, id))
    if not response.background:
        raise RequestError("only responses made with background=true can be cancelled", field="id")
    return response


async def list_input_items(service: Service, call: Call[None]) -> InputItems:
    """The items of a response's own input. Query: limit (20, up to 100), order (desc, asc), after (an item's id)."""
    limit = read_number(call, "limit", default=20, low=1, high=MAX_LISTED)
    order = call.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(f"order must be asc or desc, not {order!r}", field="order")
    record = await find_record(service, call.owner, call.path["id"])
    items = _decode_items(record.input)[:: 1 if order == "asc" else -1]
    if (after := call.query.get("after")) is not None:
        places = [index for index, item in enumerate(items) if item["id"] == after]
        if not places:
            raise RequestError(f"after: there is no item {after!r}", field="after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    return InputItems(
        page, page[0]["id"] if page else None, page[-1]["id"] if page else None, has_more=len(items) > limit
    )


async def count_input_tokens(service: Service, call: Call[ResponsesBody]) -> InputTokens:
    """How many tokens the prompt of such a response has. Raises as `create_response`."""
    body = decode_body(call.body, ResponsesBody)
    service.model_name(body.model)
    earlier = await read_earlier(service, call.owner, body.previous_response_id)
    conversation = to_conversation(body, service, as_items(body.input), earlier, request_id=call.request_id)
    if body.truncation == "auto":
        conversation = await truncated(service, conversation)
    return InputTokens(len(await render(service, conversation)))


class Keeper:
    """Puts one response into the store."""

    def __init__(self, service: Service, owner: str, input: bytes) -> None:
        self._store = service.response_store
        self._owner = owner
        self._input = input

    async def save(self, response: Response, events: Sequence[Event] = (), *, finished: bool = True) -> None:
        """Write the response as it is now. Raises ApiError if that fails."""
        await self._store.put(
            Record(
                id=response.id,
                owner=self._owner,
                previous=response.previous_response_id,
                finished=finished,
                response=encode_json(response),
                input=self._input,
                events=b"\n".join(map(encode_json, events)) if events else None,
            )
        )


async def start_in_background(
    service: Service, run: Run, events: Events, keeper: Keeper, *, stream: bool
) -> Response | Stream[Event]:
    """Let a response come without its client."""
    # Stored at once: if this fails, nothing was promised; if the server dies, it is known later that there was a run.
    await keeper.save(run.response, finished=False)
    response = run.response
    run.start(events, keeper.save, runs=service.background)
    return Stream(run.follow(), named=True) if stream else response


async def last_response(events: Events) -> Response:
    """The response that the events end with."""
    response = None
    async for event in events:
        if isinstance(event, End):
            response = event.response
    assert response is not None, "an answer always ends"
    return response


def read_number(call: Call[None], name: str, *, default: int, low: int, high: int | None = None) -> int:
    """An integer of the query. Raises RequestError."""
    text = call.query.get(name)
    if text is None:
        return default
    digits = text.removeprefix("-")
    if not (text.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS):
        raise RequestError(f"{name} must be an integer, not {text[:80]!r}", field=name)
    integer(int(text), name, low=low, high=high)
    return int(text)


def read_flag(call: Call[None], name: str) -> bool:
    """A truth value of the query; left out, it is false. Raises RequestError."""
    text = call.query.get(name, "false").lower()
    if text not in ("true", "1", "false", "0"):
        raise RequestError(f"{name} must be true or false, not {text!r}", field=name)
    return text in ("true", "1")


async def replay(lines: Sequence[bytes]) -> Events:
    """Events that were stored."""
    for line in lines:
        yield _decode_event(line)


async def read_earlier(service: Service, owner: str, id: str | None) -> list[Item]:
    """Input and output of a response and of all that it went on from. Raises ApiError (404) if one of them is gone."""
    if id is None:
        return []
    if find_run(service, owner, id) is not None:
        message = f"previous_response_id: the response {id!r} is not finished"
        raise RequestError(message, field="previous_response_id")
    records = await service.response_store.conversation(owner, id)
    if not records:
        raise no_response(id, field="previous_response_id")
    if records[0].previous is not None:
        raise no_response(records[0].previous, field="previous_response_id", hint=f", which {id!r} went on from")
    items: list[Item] = []
    for record in records:
        response = read_response(record)
        if response.status not in ("completed", "incomplete"):
            message = f"previous_response_id: the response {response.id!r} is {response.status}"
            raise RequestError(message, field="previous_response_id")
        items += _decode_items(record.input)
        items += [msgspec.to_builtins(item) for item in response.output if not is_empty(item)]
    return items


def is_empty(item: object) -> bool:
    """Whether an output item says nothing, so that templates need not show it."""
    return isinstance(item, OutputMessage) and not any(part.text for part in item.content)


def find_run(service: Service, owner: str, id: str) -> Run | None:
    """The owner's response that runs in the background."""
    run: Run | None = service.background.get(id)
    return run if run is not None and run.owner == owner else None


async def find_record(service: Service, owner: str, id: str) -> Record:
    """The owner's stored response. Raises ApiError (404)."""
    record = await service.response_store.get(owner, id)
    if record is None:
        raise no_response(id)
    return record


def read_response(record: Record) -> Response:
    """A response from the store. One that was not finished and runs no more failed with the server that ran it."""
    response = _decode_response(record.response)
    if record.finished:
        return response
    return msgspec.structs.replace(response, status="failed", error=response_error(aborted()))


def no_response(id: str, *, field: str = "id", hint: str = "") -> ApiError:
    message = f"there is no stored response {id!r}{hint}"
    return ApiError(404, message, param=field, code="response_not_found")


def logprobs_writer(service: Service, body: ResponsesBody) -> Logprobs | None:
    """What turns the tokens of a delta into logprobs, if they are wanted."""
    if LOGPROBS not in (body.include or ()):
        return None
    num_top = body.top_logprobs or 0
    names = TokenNames(service.client.tokenizer, as_ids=False)

    def write(new: AnswerDelta) -> list[TokenLogprob]:
        # The token that ends an answer has no text, and so no place in one.
        end = len(new.token_ids) - (new.finish_reason == "stop")
        return chat_logprobs(new.token_ids[:end], (new.logprobs or ())[:end], names, num_top=num_top).content

    return write
