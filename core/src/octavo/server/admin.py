"""Routes with which an operator steers the engine: sleep, pause, abort, caches, reload. There only with --enable-admin.

Where keys are asked for, they take an admin's key: one of --api-key, or one of the keys file with `admin: true`.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, get_args

import msgspec

from octavo import __version__
from octavo.engine.client import Mode
from octavo.errors import ConfigError, EngineAsleepError, RequestError
from octavo.server.decode import decode_body
from octavo.server.endpoint import Call, Handler
from octavo.server.errors import admin_only
from octavo.server.exchange import current
from octavo.server.service import Service

Answer = TypeVar("Answer")

TAGS = ("weights", "kv_cache")


class Sleeping(msgspec.Struct):
    is_sleeping: bool


class Paused(msgspec.Struct):
    is_paused: bool


class Status(msgspec.Struct, omit_defaults=True):
    status: str
    level: int | None = None
    tags: list[str] | None = None


class AbortBody(msgspec.Struct):
    """request_ids: as in `X-Request-Id`; null or left out: all requests."""

    request_ids: list[str] | None = None


class Aborted(msgspec.Struct):
    num_aborted: int


class ServerInfo(msgspec.Struct):
    """config: the engine's, by dotted name. server: options of the server, without keys. stats: gauges and counters."""

    version: str
    model: dict[str, Any]
    config: dict[str, Any]
    server: dict[str, Any]
    stats: dict[str, Any]


def guarded(
    handler: Callable[[Service, Call[Any]], Awaitable[Answer]],
) -> Callable[[Service, Call[Any]], Awaitable[Answer]]:
    """A handler that refuses keys that are no admin's with 403."""

    @functools.wraps(handler)
    async def guard(service: Service, call: Call[Any]) -> Answer:
        exchange = current.get()
        if service.keys and (exchange is None or exchange.key is None or not exchange.key.rules.admin):
            raise admin_only()
        return await handler(service, call)

    return guard


async def sleep(service: Service, call: Call[None]) -> Status:
    """Give the engine's memory back. `level` 1 keeps the weights at hand in host memory, 2 does not; `mode` says
    whether running requests are aborted ("abort") or finish first ("wait"). Requests get 503 until /wake_up."""
    level = choice(call, "level", ("1", "2"))
    mode: Any = choice(call, "mode", ("abort", "wait"))
    await service.client.control("sleep", level=int(level), mode=mode)
    return Status("sleeping", level=int(level))


async def wake_up(service: Service, call: Call[None]) -> Status:
    """Load the model again and serve. `tags` are accepted, but weights and KV memory always come together."""
    tags = call.query.getlist("tags") if hasattr(call.query, "getlist") else []
    for tag in tags:
        if tag not in TAGS:
            raise RequestError(f"tags must be of {', '.join(TAGS)}, not {tag!r}", field="tags")
    await service.client.control("wake_up")
    return Status("awake", tags=list(tags) or None)


async def is_sleeping(service: Service, call: Call[None]) -> Sleeping:
    """Whether the engine sleeps."""
    return Sleeping(service.client.stats().sleep_level > 0)


async def pause(service: Service, call: Call[None]) -> Status:
    """Stop scheduling. `mode`: running requests are aborted ("abort"), finish first ("wait"), or freeze where they are
    ("keep"). New ones are held until /resume. The prefix cache is emptied unless `clear_cache` is false."""
    mode: Any = choice(call, "mode", get_args(Mode))
    clear = choice(call, "clear_cache", ("true", "false"))
    await service.client.control("pause", mode=mode)
    if clear == "true" and mode != "keep":
        await service.client.reset_prefix_cache()
    return Status("paused")


async def resume(service: Service, call: Call[None]) -> Status:
    """Go on after /pause. Raises EngineAsleepError where that is not what it takes."""
    if service.client.stats().sleep_level:
        raise EngineAsleepError("the engine is asleep, not paused: wake it up (POST /wake_up)")
    await service.client.control("resume")
    return Status("resumed")


async def is_paused(service: Service, call: Call[None]) -> Paused:
    """Whether the engine is paused."""
    return Paused(service.client.stats().paused)


async def reset_prefix_cache(service: Service, call: Call[None]) -> Status:
    """Forget cached prompt blocks that no running request uses."""
    await service.client.reset_prefix_cache()
    return Status("reset")


async def abort_requests(service: Service, call: Call[AbortBody]) -> Aborted:
    """End requests of this API process: those of `request_ids`, or all. They finish with reason "abort"."""
    body = decode_body(call.body, AbortBody) if call.body.strip() else AbortBody()
    wanted = None if body.request_ids is None else set(body.request_ids)
    # The engine's client knows a request by its id and a serial number, see `Service.generate`.
    chosen = service.client.abort_where(lambda known: wanted is None or known.rpartition("-")[0] in wanted)
    return Aborted(chosen)


async def server_info(service: Service, call: Call[None]) -> ServerInfo:
    """Version, model, configuration and gauges. Keys are left out."""
    return ServerInfo(
        version=__version__,
        model=msgspec.to_builtins(service.info),
        config=service.config,
        server=service.options.shown(),
        stats=msgspec.to_builtins(service.client.stats()),
    )


async def reload(service: Service, call: Call[None]) -> Status:
    """Read keys, certificates and the chat template's file again, as SIGHUP does. 400 says what is wrong with them."""
    try:
        service.reload()
    except ConfigError as error:
        raise RequestError(str(error)) from error
    return Status("reloaded")


def choice(call: Call[Any], name: str, allowed: tuple[str, ...]) -> str:
    """A query parameter; left out, the first of what is allowed. Raises RequestError naming it."""
    value = call.query.get(name, allowed[0])
    if value not in allowed:
        raise RequestError(f"{name} must be {' or '.join(allowed)}, not {value!r}", field=name)
    return value


ROUTES: dict[tuple[str, str], Handler] = {
    ("POST", "/sleep"): guarded(sleep),
    ("POST", "/wake_up"): guarded(wake_up),
    ("GET", "/is_sleeping"): guarded(is_sleeping),
    ("POST", "/pause"): guarded(pause),
    ("POST", "/resume"): guarded(resume),
    ("GET", "/is_paused"): guarded(is_paused),
    ("POST", "/reset_prefix_cache"): guarded(reset_prefix_cache),
    ("POST", "/abort_requests"): guarded(abort_requests),
    ("GET", "/server_info"): guarded(server_info),
    ("POST", "/reload"): guarded(reload),
}
