"""A whole server in this process: real app, real client, real engine loop, and an executor that says what we script.

Every test of a server ends with nothing left running and no KV block lost, and every body was strict JSON. After a case
(`test_case_...`) the rest of the invariants of `tests/conftest.py` is asserted too, and what it asked for is asked for
again in the other way: streamed if it was plain, plain if it was streamed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from invariants import Invariants, strict, strict_body

from octavo.config import CacheConfig, SchedulerConfig, make_config
from octavo.engine.client import EngineClient
from octavo.engine.info import ModelInfo
from octavo.engine.loop import EngineLoop
from octavo.engine.transport import ThreadTransport
from octavo.plugin.data import ScheduleLimits
from octavo.plugin.step import KVGroup
from octavo.server.app import create_app
from octavo.server.options import ServerOptions
from octavo.server.service import Service
from octavo.testing.scripted import ScriptedExecutor
from octavo.tokenizer import Tokenizer, load_tokenizer, load_tokenizer_for

VOCAB = 384
EOS = 2
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    from octavo.testing.tiny import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, vocab_size=VOCAB)
    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def bos_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    from octavo.testing.tiny import make_tokenizer

    folder = tmp_path_factory.mktemp("bos-tokenizer")
    make_tokenizer(folder, vocab_size=VOCAB, bos=True)
    return load_tokenizer(folder)


def read_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The typed events of a response, whose framing is checked."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, end = response.text.split("\n\n")
    assert end == ""
    events = []
    for block in filter(None, blocks):
        name, data = block.split("\n")
        events.append(strict(data.removeprefix("data: ")))
        assert name == "event: " + events[-1]["type"]
    return events


def join_deltas(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream: texts are joined, calls too, by their index. Without ids."""
    calls: dict[int, dict[str, str]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        assert ("id" in call) == (call["index"] not in calls), "an id comes once, first"
        joined = calls.setdefault(call["index"], {"name": "", "arguments": ""})
        for name, text in call["function"].items():
            joined[name] += text
    texts = {
        name: "".join(delta.get(name) or "" for delta in deltas)
        for name in ("content", "reasoning", "reasoning_content")
    }
    return texts | {"tool_calls": [calls[index] for index in sorted(calls)]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message as `join_deltas` gives it: ids of calls are drawn for each request."""
    texts = {name: message.get(name) or "" for name in ("content", "reasoning", "reasoning_content")}
    return texts | {"tool_calls": [call["function"] for call in message.get("tool_calls", ())]}


class Server:
    """A running server and the ways tests talk to it."""

    def __init__(self, service: Service, executor: ScriptedExecutor | None, loop: EngineLoop) -> None:
        self.service = service
        self.executor = executor
        self.engine = loop
        self.app = create_app(service)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app),
            base_url="http://octavo",
            event_hooks={"response": [strict_body]},
        )
        self.answered: dict[str, tuple[str, dict[str, Any]]] = {}
        """Requests that were answered in one way only, plain or streamed, by their JSON."""

    async def send(self, path: str, body: Any = None, *, raw: str | bytes | None = None, **how: Any) -> httpx.Response:
        if raw is None and body is not None:
            return await self.http.post(path, json=body, **how)
        return await self.http.post(path, content=raw, **how)

    async def get(self, path: str, **how: Any) -> httpx.Response:
        return await self.http.get(path, **how)

    async def ask(self, path: str, body: dict[str, Any], **how: Any) -> dict[str, Any]:
        """A plain answer, 200 expected."""
        response = await self.send(path, body, **how)
        assert response.status_code == 200, response.text
        if not how:
            self.answered[path + json.dumps(body)] = path, body
        answer: dict[str, Any] = strict(response.content)
        return answer

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream that ends well: framed as events, with [DONE] last."""
        response = await self.send(path, body | {"stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        self.answered[path + json.dumps(body)] = path, body
        events = response.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(event.startswith("data: ") for event in events[:-1])
        return [strict(event.removeprefix("data: ")) for event in events[:-2]]

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The typed events of a stream: each is named by its type, and nothing stands behind the last."""
        return read_events(await self.send(path, body | {"stream": True}))

    async def replay(self, path: str, **how: Any) -> list[dict[str, Any]]:
        """The typed events that a GET gives."""
        return read_events(await self.get(path, **how))

    async def both(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The plain answer, after checking that a stream of the same request joins to it."""
        plain = await self.ask(path, body)
        chunks = await self.stream(path, body)
        del self.answered[path + json.dumps(body)]
        for choice in plain["choices"]:
            pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            reasons = [piece["finish_reason"] for piece in pieces if piece["finish_reason"] is not None]
            assert reasons == [choice["finish_reason"]]
            assert pieces[-1]["finish_reason"] is not None
            assert pieces[-1].get("stop_reason") == choice["stop_reason"]
            if path == CHAT:
                assert join_deltas([piece["delta"] for piece in pieces]) == without_ids(choice["message"])
                assert [piece["delta"].get("role") for piece in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
                contents = [entry for piece in pieces for entry in (piece["logprobs"] or {"content": []})["content"]]
                assert contents == (choice["logprobs"] or {"content": []})["content"]
            else:
                assert "".join(piece["text"] for piece in pieces) == choice["text"]
                for name in choice["logprobs"] or ():
                    joined = [item for piece in pieces for item in piece["logprobs"][name]]
                    assert joined == choice["logprobs"][name]
            if "token_ids" in choice:
                assert [t for piece in pieces for t in piece.get("token_ids", [])] == choice["token_ids"]
        return plain

    async def refused(
        self, path: str, body: Any = None, *, field: str | None, raw: str | None = None, status: int = 400
    ) -> str:
        """The message of an error in the one shape; the next plain request must succeed."""
        how = {"headers": {"content-type": "application/json"}} if raw is not None else {}
        response = await self.send(path, body, raw=raw, **how)
        assert response.status_code == status, response.text
        error = strict(response.content)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == field, error
        await self.ask(COMPLETIONS, {"prompt": "next", "max_tokens": 1, "temperature": 0})
        message: str = error["message"]
        return message

    async def joined(self) -> None:
        """What was answered in one way is answered alike in the other."""
        # Sums of a real model depend, in the last digits, on what the prefix cache held.
        inexact = {"logprobs", "top_logprobs", "prompt_logprobs"} if self.executor is None else set()
        for path, body in list(self.answered.values()):
            if path in (COMPLETIONS, CHAT):
                await self.both(path, {k: v for k, v in body.items() if k not in inexact | {"stream_options"}})

    async def settled(self) -> None:
        """Wait until the engine is idle and check that it has kept nothing."""
        for _ in range(200):
            if not self.engine.has_work and self.service.num_live == 0 and self.service.client.num_live == 0:
                break
            await asyncio.sleep(0.01)
        stats = self.engine.stats
        assert (stats.running, stats.waiting, self.service.num_live, self.service.client.num_live) == (0, 0, 0, 0)
        assert stats.kv_usage == 0.0

    async def close(self) -> None:
        await self.http.aclose()
        await self.service.client.shutdown()
        await self.service.close()


Script = Callable[[tuple[int, ...]], Sequence[int]] | Sequence[int]
Serve = Callable[..., Awaitable[Server]]


@pytest.fixture
async def servers(request: pytest.FixtureRequest, invariants: Invariants) -> AsyncIterator[list[Server]]:
    """The servers of a test."""
    made: list[Server] = []
    yield made
    try:
        for server in made:
            if not server.service.client.is_alive:
                invariants.asserted = True  # of what is dead only that it is: by the test itself
                continue
            await server.settled()
            if request.node.name.startswith("test_case_"):
                await server.joined()
                await invariants.server(server.http)
                await server.settled()
    finally:
        for server in made:
            await server.close()


@pytest.fixture
def serve(servers: list[Server], tokenizer: Tokenizer) -> Serve:
    """Make servers: `await serve(script, ...)`. script: token ids, or text that is tokenized and ends with EOS."""

    async def make(
        script: Script | str = "a story of pages",
        *,
        options: ServerOptions | None = None,
        tokenizer: Tokenizer | None = tokenizer,
        vocab_size: int = VOCAB,
        width: int = 1,
        delay: float = 0.0,
        fail_at_step: int | None = None,
        max_model_len: int = 256,
        num_blocks: int = 64,
        max_num_seqs: int = 16,
        default_sampling: dict[str, float | int] | None = None,
    ) -> Server:
        if isinstance(script, str):
            assert tokenizer is not None
            script = [*tokenizer.encode(script), EOS]
        executor = ScriptedExecutor(
            script,
            kv_groups=(KVGroup(block_size=16, num_blocks=num_blocks),),
            vocab_size=vocab_size,
            eos=EOS,
            width=width,
            delay=delay,
            fail_at_step=fail_at_step,
        )
        loop = EngineLoop(
            executor,
            cache=CacheConfig(),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
            limits=ScheduleLimits(),
            max_model_len=max_model_len,
            run_ahead=0,
        )
        info = ModelInfo(
            model="tiny",
            served_names=("tiny", "tiny-alias"),
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=(EOS,),
            default_sampling=default_sampling or {},
            platform="scripted",
            dtype="float32",
            num_kv_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
        )
        client = EngineClient(ThreadTransport(loop), tokenizer, info)
        servers.append(Server(Service(client, options or ServerOptions()), executor, loop))
        return servers[-1]

    return make


@pytest.fixture
def serve_model(servers: list[Server]) -> Serve:
    """Make servers of real models: `await serve_model(folder, options=..., **engine_arguments)`."""

    async def make(model: Path, *, options: ServerOptions | None = None, **engine: Any) -> Server:
        from octavo.launch import build_engine

        settings = {"platform": "cpu", "dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 8, "max_model_len": 128}
        config = make_config(model=str(model), **settings | engine)
        tokenizer = load_tokenizer_for(config.model)
        loop, info = build_engine(config)
        service = Service(EngineClient(ThreadTransport(loop), tokenizer, info), options or ServerOptions())
        servers.append(Server(service, None, loop))
        return servers[-1]

    return make


@pytest.fixture
def say(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Token ids that an executor says for a text, with EOS at the end."""
    return lambda text: [*tokenizer.encode(text), EOS]


@pytest.fixture
def bytes_as_ids(tokenizer: Tokenizer) -> Callable[[bytes], list[int]]:
    """One token per byte: how a model says characters that its vocabulary has not."""
    by_byte = {tokenizer.token_bytes(i): i for i in range(VOCAB) if len(tokenizer.token_bytes(i)) == 1}
    return lambda data: [by_byte[bytes([byte])] for byte in data]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
