"""A crowd of streaming clients, some of whom leave: no errors, nothing lost, memory flat.

OCTAVO_SOAK_SECONDS sets how long (60 by default); `make test-slow` runs it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

NUM_CLIENTS = 200
SECONDS = float(os.environ.get("OCTAVO_SOAK_SECONDS", "60"))
SETTLE_S = 20.0
MAX_GROWTH = 24 * 2**20
"""Allocators keep some of what a crowd used; a leak per request or token would be far above this."""


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def child_pids(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Crowd:
    """Clients that ask, read, and sometimes hang up in the middle, until the time is over."""

    def __init__(self, url: str, *, key: str, vocab: range, max_tokens: int) -> None:
        self.url = url
        self.vocab = vocab
        self.max_tokens = max_tokens
        self.num_finished = self.num_left = 0
        self.errors: list[str] = []
        limits = httpx.Limits(max_connections=NUM_CLIENTS, max_keepalive_connections=NUM_CLIENTS)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(120), headers=headers)

    async def run(self, seconds: float) -> None:
        """Send the crowd for some time and wait until the last has gone."""
        until = time.monotonic() + seconds
        await asyncio.gather(*(self.client(random.Random(seed), until) for seed in range(NUM_CLIENTS)))

    async def client(self, chance: random.Random, until: float) -> None:
        while time.monotonic() < until:
            try:
                await self.ask(chance)
            except (httpx.HTTPError, AssertionError, ValueError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                return

    async def ask(self, chance: random.Random) -> None:
        num_tokens = chance.randrange(1, self.max_tokens)
        leave_after = chance.randrange(1, num_tokens + 1) if chance.random() < 0.3 else None
        body: dict[str, Any] = {
            "prompt": chance.choices(self.vocab, k=chance.randrange(1, 60)),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        num_got = 0
        async with self.http.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    assert num_got == num_tokens, f"{num_got} tokens of {num_tokens}"
                    self.num_finished += 1
                    return
                if line:
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    num_got += sum(len(choice["token_ids"]) for choice in chunk["choices"])
                if leave_after is not None and num_got >= leave_after:
                    self.num_left += 1
                    return
        raise AssertionError("the stream ended without [DONE]")


async def soak(url: str, pids: list[int], read_metric, *, key: str, vocab: range, max_tokens: int) -> None:
    crowd = Crowd(url, key=key, vocab=vocab, max_tokens=max_tokens)
    async with crowd.http:
        # The first part fills pools, caches of compiled products (one a shape) and allocator arenas, which takes
        # most of a minute; what it leaves is the measure for the rest.
        await crowd.run(SECONDS * 2 / 3)
        before = [resident_bytes(pid) for pid in pids]
        num_warm = crowd.num_finished
        await crowd.run(SECONDS / 3)
        after = [resident_bytes(pid) for pid in pids]
    assert crowd.errors == []
    assert crowd.num_left > 0
    assert crowd.num_finished > num_warm > NUM_CLIENTS / 4

    deadline = time.monotonic() + SETTLE_S
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while any(read_metric(url, name, key) for name in gauges):
        assert time.monotonic() < deadline, {name: read_metric(url, name, key) for name in gauges}
        await asyncio.sleep(0.2)
    growth = [new - old for new, old in zip(after, before, strict=True)]
    assert max(growth) < MAX_GROWTH, f"resident memory grew by {growth} bytes"
    assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 3 + 240)
def test_a_crowd_on_a_scripted_engine_leaves_nothing_behind(scripted_server, read_metric):
    server = scripted_server(delay=0.002, max_num_seqs=128, num_blocks=700)
    pids = [server.pid, server.engine_pid]
    asyncio.run(soak(server.url, pids, read_metric, key="", vocab=range(40, 500), max_tokens=60))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 3 + 240)
def test_a_crowd_on_a_real_model_leaves_nothing_behind(tiny_server, read_metric):
    pids = [tiny_server.pid, *child_pids(tiny_server.pid)]
    assert len(pids) > 1, "the engine is a process of its own"
    asyncio.run(soak(tiny_server.url, pids, read_metric, key="sesame", vocab=range(40, 380), max_tokens=24))
