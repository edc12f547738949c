"""Load on a running server: requests arrive as a crowd or as a Poisson process, and every token's arrival is noted.

work ─> request bodies ─(arrival times, max_concurrency)─> sse_client ─> Answers ─> summary
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from octavo.bench.sse_client import Answer, Client
from octavo.bench.workload import Work
from octavo.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from octavo.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDPOINTS = (COMPLETIONS, CHAT)
SPARE_FILES = 64
"""Files that the process has open besides its connections."""
ASK_TIMEOUT_S = 10.0


def request_bodies(
    work: Sequence[Work],
    *,
    endpoint: str,
    model: str,
    tokenizer: Tokenizer | None = None,
    ignore_eos: bool = False,
    temperature: float = 0.0,
) -> list[bytes]:
    """The JSON bodies, made before the clock starts. Raises ConfigError when text is needed and there is none."""
    if endpoint not in ENDPOINTS:
        raise ConfigError(f"endpoint is {endpoint!r}, must be one of {', '.join(ENDPOINTS)}")
    common: dict[str, Any] = {
        "model": model,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignore_eos:  # not a field of OpenAI's own API, so it is sent only where it was asked for
        common["ignore_eos"] = True
    bodies = []
    for one in work:
        if endpoint == COMPLETIONS:
            prompt = one.prompt if one.text is None else one.text
            specific: dict[str, Any] = {"prompt": prompt, "max_tokens": one.num_output}
        else:
            if one.text is None and tokenizer is None:
                raise ConfigError(f"{CHAT} takes text, but the prompts are token ids: give a tokenizer")
            text = one.text if one.text is not None else tokenizer.decode(one.prompt)  # type: ignore[union-attr]
            specific = {"messages": [{"role": "user", "content": text}], "max_completion_tokens": one.num_output}
        bodies.append(msgspec.json.encode(common | specific))
    return bodies


def arrival_times(num_requests: int, *, request_rate: float, seed: int = 0) -> list[float]:
    """Seconds after the start at which requests arrive: a Poisson process of `request_rate` a second; inf is at once.

    Raises ConfigError for a rate that is not above 0.
    """
    if not request_rate > 0:
        raise ConfigError(f"request_rate is {request_rate}, must be above 0, or inf to send all at once")
    if math.isinf(request_rate):
        return [0.0] * num_requests
    gaps = np.random.default_rng(seed).exponential(1 / request_rate, num_requests)
    gaps[:1] = 0.0
    times: list[float] = np.cumsum(gaps).tolist()
    return times


async def replay(
    client: Client,
    bodies: Sequence[bytes],
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_answer: Callable[[], None] = lambda: None,
) -> tuple[list[Answer], float]:
    """Send each body at its time; returns (answers in order, seconds from the start to the last answer's end).

    max_concurrency: a request beyond it waits here; its own clock starts when it is sent.
    """
    allow_open_files(min(len(bodies), max_concurrency or len(bodies)) + SPARE_FILES)
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    started = time.perf_counter()

    async def one(body: bytes, arrival: float) -> Answer:
        # uvloop's timers count whole milliseconds, and ring up to one and a half early.
        while (wait := started + arrival - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        async with gate:
            answer = await client.post(body)
        on_answer()
        return answer

    answers = await asyncio.gather(*(one(*pair) for pair in zip(bodies, arrivals, strict=True)))
    return list(answers), time.perf_counter() - started


async def warm_up(client: Client, bodies: Sequence[bytes]) -> None:
    """Answer some requests before the measurement. Raises EngineError with the server's words if one fails."""
    for answer in await asyncio.gather(*(client.post(body) for body in bodies)):
        if answer.error:
            raise EngineError(f"the server does not answer a first request: {answer.error}")


def allow_open_files(number: int) -> None:
    """Raise this process's limit of open files if it is lower. Raises ConfigError where that is not allowed."""
    try:
        import resource
    except ModuleNotFoundError:  # no such limit on this system
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= number:
        return
    if hard != resource.RLIM_INFINITY and hard < number:
        raise ConfigError(f"{number} open files are needed and {hard} allowed: lower max_concurrency below {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


def first_model(base_url: str, *, api_key: str = "") -> str:
    """The name of the first model that a server lists. Raises ConfigError when it cannot be asked."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(f"{base_url}/v1/models", headers=headers)
        with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S) as response:
            name = json.load(response)["data"][0]["id"]
    except urllib.error.HTTPError as error:
        with error:
            raise ConfigError(f"{base_url}/v1/models answers {error.code} {error.reason}: give --model") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"base_url: {base_url}/v1/models cannot be read ({error}): is the server running?") from error
    except (LookupError, TypeError) as error:
        raise ConfigError(f"{base_url}/v1/models lists no model: give --model") from error
    return str(name)
