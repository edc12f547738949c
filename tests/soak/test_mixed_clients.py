"""Clients of all kinds at once, good and hostile, and an engine that is killed under them: every request that was
accepted ends in an answer or an error, and nothing stays behind.

OCTAVO_SOAK_SECONDS sets how long (60 by default); `make test-slow` runs it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

NUM_CLIENTS = 150
SECONDS = float(os.environ.get("OCTAVO_SOAK_SECONDS", "60"))
SETTLE_S = 30.0
MAX_BODY = 2**18
MAX_GROWTH = 32 * 2**20
SPARE_FILES = 12
"""File descriptors that a restarted engine may add."""
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize")
NOT_JSON = (
    b"",
    b"{",
    b"[1, 2",
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": NaN}',
    b"\x00" * 40,
    b'{"prompt": "\\ud800"}',
    b"[" * 5000,
)
NOT_HTTP = (
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: nine\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x-long: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET /\xff\xfe HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS greeting
)


class Crowd:
    """Clients that do something else each time until the time is over. `ended` counts what came of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.host, self.port = urlsplit(url).hostname, urlsplit(url).port
        self.ended: Counter[str] = Counter()
        self.problems: list[str] = []
        limits = httpx.Limits(max_connections=NUM_CLIENTS, max_keepalive_connections=NUM_CLIENTS)
        self.http = httpx.AsyncClient(base_url=url, limits=limits, timeout=120)
        self.acts = (
            self.ask,
            self.stream,
            self.stream,
            self.leave,
            self.leave_at_once,
            self.read_slowly,
            self.send_too_much,
            self.send_nonsense,
            self.send_no_http,
            self.stop_in_the_body,
            self.look,
        )

    async def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(self.client(random.Random(f"{seed}"), until) for seed in range(NUM_CLIENTS)))

    async def client(self, chance: random.Random, until: float) -> None:
        while time.monotonic() < until:
            act = chance.choice(self.acts)
            try:
                self.ended[f"{act.__name__}: {await asyncio.wait_for(act(chance), 100)}"] += 1
            except Exception as error:
                self.problems.append(f"{act.__name__}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.1)

    def body(self, chance: random.Random, **more: Any) -> dict[str, Any]:
        tokens = chance.choices(range(40, 500), k=chance.randrange(1, 60))
        extra = chance.choice(({}, {"n": 2}, {"logprobs": 2}, {"min_tokens": 1}, {"seed": 3}, {"priority": 1}))
        return {"prompt": tokens, "max_tokens": chance.randrange(1, 60), "ignore_eos": True} | extra | more

    async def ask(self, chance: random.Random) -> str:
        body = self.body(chance)
        response = await self.http.post("/v1/completions", json=body)
        answer = response.json()
        if response.status_code == 200:
            assert answer["usage"]["completion_tokens"] == body["max_tokens"] * body.get("n", 1), answer["usage"]
            return "answered"
        return self.refused(response.status_code, answer)

    def refused(self, status: int, body: Any) -> str:
        """An error that may come while an engine is dead or young."""
        code = body["error"]["code"]
        assert (status, code) in ((503, "engine_dead"), (503, "shutting_down")), (status, body)
        return str(code)

    async def stream(self, chance: random.Random) -> str:
        async with self.http.stream("POST", "/v1/completions", json=self.body(chance, stream=True)) as response:
            if response.status_code != 200:
                return self.refused(response.status_code, json.loads(await response.aread()))
            last = ""
            async for line in response.aiter_lines():
                last = line or last
        if last == "data: [DONE]":
            return "answered"
        return self.refused(503, json.loads(last.removeprefix("data: ")))

    async def leave(self, chance: random.Random) -> str:
        async with self.http.stream("POST", "/v1/completions", json=self.body(chance, stream=True)) as response:
            async for _ in response.aiter_lines():
                if chance.random() < 0.2:
                    return "left"
        return "too late"

    async def leave_at_once(self, chance: random.Random) -> str:
        data = json.dumps(self.body(chance, max_tokens=500)).encode()
        _, writer = await self.connect(self.head(len(data)) + data)
        await asyncio.sleep(chance.random() / 20)
        writer.transport.abort()
        return "left"

    async def read_slowly(self, chance: random.Random) -> str:
        data = json.dumps(self.body(chance, stream=True)).encode()
        reader, writer = await self.connect(self.head(len(data)) + data)
        got = b""
        while not got.endswith((b"data: [DONE]\n\n", b"0\r\n\r\n", b"}}")):
            part = await reader.read(chance.choice((7, 100, 500)))
            if not part:
                break
            got += part
            await asyncio.sleep(0.002)
        writer.close()
        assert b"data: [DONE]" in got or b"engine_dead" in got, got[-300:]
        return "answered" if b"data: [DONE]" in got else "engine_dead"

    async def send_too_much(self, chance: random.Random) -> str:
        announced = chance.random() < 0.5
        reader, writer = await self.connect(self.head(MAX_BODY * 2 if announced else None))
        try:
            for _ in range(8):
                part = b" " * (MAX_BODY // 4)
                writer.write(part if announced else b"%x\r\n%s\r\n" % (len(part), part))
                await writer.drain()
        except ConnectionError:
            pass  # it need not read what it does not want
        status = await self.status(reader, writer)
        assert status in ("413", "closed"), status
        return status

    async def send_nonsense(self, chance: random.Random) -> str:
        response = await self.http.post(chance.choice(PATHS), content=chance.choice(NOT_JSON))
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"]
        return "refused"

    async def send_no_http(self, chance: random.Random) -> str:
        reader, writer = await self.connect(chance.choice(NOT_HTTP))
        writer.write_eof()
        status = await self.status(reader, writer)
        assert status in ("200", "400", "404", "413", "431", "503", "closed"), status
        return status

    async def stop_in_the_body(self, chance: random.Random) -> str:
        data = json.dumps(self.body(chance)).encode()
        _, writer = await self.connect(self.head(len(data)) + data[: len(data) // 2])
        await asyncio.sleep(chance.random() / 10)
        writer.close()
        return "left"

    async def look(self, chance: random.Random) -> str:
        response = await self.http.get(chance.choice(("/health", "/metrics", "/v1/models", "/openapi.json", "/none")))
        assert response.status_code in (200, 404, 503), response.text
        return str(response.status_code)

    def head(self, length: int | None) -> bytes:
        size = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
        return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n%s\r\n\r\n" % size

    async def connect(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=2**20)
        writer.write(data)
        await writer.drain()
        return reader, writer

    async def status(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """The status of a response, or "closed"."""
        try:
            line = await asyncio.wait_for(reader.readline(), 30)
        except ConnectionError:
            line = b""
        writer.close()
        return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held(server: Any) -> dict[str, int]:
    """What the server process holds now. The scripted server tells its tasks at SIGUSR1."""
    os.kill(server.pid, signal.SIGUSR1)
    return {
        "tasks": json.loads(server.process.stdout.readline())["tasks"],
        "files": len(list(Path(f"/proc/{server.pid}/fd").iterdir())),
        "threads": len(list(Path(f"/proc/{server.pid}/task").iterdir())),
        "bytes": resident_bytes(server.pid),
    }


def child_pids(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


async def settle(url: str, read_metric: Any) -> None:
    """Wait until nothing runs any more."""
    deadline = time.monotonic() + SETTLE_S
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while any(read_metric(url, name) for name in gauges):
        assert time.monotonic() < deadline, {name: read_metric(url, name) for name in gauges}
        await asyncio.sleep(0.2)


async def kill_engine(server: Any, after: float) -> None:
    """Kill the newest engine process of the server."""
    await asyncio.sleep(after)
    for pid in child_pids(server.pid):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"spawn_main" in command:
            os.kill(pid, signal.SIGKILL)


async def visit(server: Any, read_metric: Any, seconds: float) -> tuple[Crowd, dict[str, int]]:
    """A crowd that loses an engine; and what the server holds when all are gone and nothing runs."""
    crowd = Crowd(server.url)
    async with crowd.http:
        await asyncio.gather(crowd.run(seconds), kill_engine(server, seconds / 2))
        await settle(server.url, read_metric)
    await asyncio.sleep(1)  # connections that we have closed are closed over there
    return crowd, held(server)


async def soak(server: Any, read_metric: Any) -> Crowd:
    # The first crowd fills pools and arenas; what it leaves is the measure for the second.
    crowd, before = await visit(server, read_metric, SECONDS / 2)
    assert crowd.problems == []
    crowd, after = await visit(server, read_metric, SECONDS / 2)
    assert crowd.problems == []
    assert after["tasks"] <= before["tasks"]
    assert after["files"] <= before["files"] + SPARE_FILES, (before, after)
    assert after["threads"] <= before["threads"] + 2
    assert after["bytes"] <= before["bytes"] + MAX_GROWTH, (before, after)
    return crowd


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 4 + 240)
def test_clients_of_all_kinds_and_a_killed_engine_leave_nothing_behind(scripted_server, read_metric):
    server = scripted_server(
        delay=0.002, max_num_seqs=64, num_blocks=700, restart_engine=True, max_body_bytes=MAX_BODY, ui=False
    )
    crowd = asyncio.run(soak(server, read_metric))
    kinds = {name.partition(":")[0] for name in crowd.ended}
    assert kinds == {act.__name__ for act in crowd.acts}
    assert crowd.ended["ask: answered"] > 0
    assert crowd.ended["stream: engine_dead"] + crowd.ended["ask: engine_dead"] > 0, "an engine died under somebody"
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": [40], "max_tokens": 1}).status_code == 200
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait(30) == 0
