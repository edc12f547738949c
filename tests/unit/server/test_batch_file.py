"""Lines of batch files: what is answered, what is refused and how, what an output file keeps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError, EngineDeadError
from octavo.server.batch.lines import BatchResult
from octavo.server.batch.results import open_results
from octavo.server.batch.run import URLS, BatchRun
from octavo.server.batch.source import count_lines, numbered

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"


def line(custom_id: str = "a", **more: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": COMPLETIONS,
        "body": {"prompt": [40], "max_tokens": 2},
    } | more


def as_bytes(item: Any) -> bytes:
    return item if isinstance(item, bytes) else json.dumps(item).encode()


async def items(given: list[Any]) -> AsyncIterator[tuple[int, bytes]]:
    for number, item in enumerate(given, start=1):
        yield number, as_bytes(item)


class Run:
    """A run over a service of this process; `run.results` reads the output file."""

    def __init__(self, service, path: Path) -> None:
        self.path = path
        self.file = open_results(str(path))
        self.told: list[BatchResult] = []
        self.batch = BatchRun(service, self.file, on_done=self.told.append)

    async def over(self, *given: Any, concurrency: int = 4) -> list[dict[str, Any]]:
        try:
            await self.batch.run(items(list(given)), concurrency=concurrency)
        finally:
            self.file.close()
        return self.results

    @property
    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


async def test_lines_get_the_answers_that_http_gives(serve, tmp_path):
    server = await serve("pages")
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    run = Run(server.service, tmp_path / "out.jsonl")
    results = await run.over(line("one"), line("two", url="/v1/chat/completions", body=chat))
    by_id = {result["custom_id"]: result for result in results}
    for name, path, body in (("one", COMPLETIONS, line()["body"]), ("two", "/v1/chat/completions", chat)):
        result = by_id[name]
        assert set(result) == {"id", "custom_id", "response", "error"}
        assert (result["error"], result["response"]["status_code"]) == (None, 200)
        answer = await server.ask(path, body)
        for own in ("id", "created", "usage"):  # the second one finds its prompt in the cache, and says so
            assert answer.pop(own)
            assert result["response"]["body"].pop(own)
        assert result["response"]["body"] == answer
    assert (run.batch.num_answered, run.batch.num_refused) == (2, 0)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (b"not JSON", None),
        (b'{"custom_id": "a", "url"', None),
        (b"[]", None),
        (b'{"custom_id": "\xff"}', None),
        (b"[" * 100_000, None),
        ({"url": COMPLETIONS, "body": {}}, "custom_id"),
        (line(""), "custom_id"),
        (line(7), "custom_id"),
        (line(method="GET"), "method"),
        (line(url="/v1/embeddings"), "url"),
        (line(url="/metrics"), "url"),
        (line(url=None), "url"),
        (line(body=[1]), "body"),
        (line(body=None), "body"),
        ({"custom_id": "a", "url": COMPLETIONS}, "body"),
        (line(body={"prompt": "x", "stream": True}), "body.stream"),
        (line(url="/v1/completions", body={"prompt": "x", "background": True}), "body.background"),
    ],
)
async def test_a_line_that_is_no_request_is_told_by_number_and_field(serve, tmp_path, given, field):
    server = await serve()
    results = await Run(server.service, tmp_path / "out.jsonl").over(line("good"), given)
    (wrong,) = [result for result in results if result["error"]]
    assert wrong["response"] is None
    assert (wrong["error"]["line"], wrong["error"]["param"]) == (2, field)
    assert wrong["error"]["message"].startswith("line 2: ")
    named = given.get("custom_id") if isinstance(given, dict) else None
    assert wrong["custom_id"] == (named if isinstance(named, str) else None)
    assert len(results) == 2


async def test_what_the_handler_refuses_has_its_status_and_body(serve, tmp_path):
    server = await serve()
    results = await Run(server.service, tmp_path / "out.jsonl").over(
        line("range", body={"prompt": [40], "top_p": 7}),
        line("model", body={"prompt": [40], "model": "gpt-9"}),
        line("type", body={"prompt": [40], "stream": "maybe"}),
    )
    refused = {r["custom_id"]: (r["response"]["status_code"], r["response"]["body"]["error"]["param"]) for r in results}
    assert refused == {"range": (400, "top_p"), "model": (404, "model"), "type": (400, "stream")}


async def test_a_custom_id_names_one_line_only(serve, tmp_path):
    server = await serve()
    path = tmp_path / "out.jsonl"
    for attempt in range(2):
        run = Run(server.service, path)
        results = await run.over(line("a"), line("a"), line("b"))
        assert len(results) == 3
        (error,) = [result["error"] for result in results if result["error"]]
        assert (error["line"], error["param"]) == (2, "custom_id")
        assert run.batch.num_skipped == 3 * attempt


async def test_what_is_done_is_not_asked_again_and_what_was_mended_is(serve, tmp_path):
    server = await serve()
    path = tmp_path / "out.jsonl"
    await Run(server.service, path).over(line("a"), b"broken", line("refused", body={"prompt": [40], "top_p": 7}))
    before = path.read_bytes()
    num_steps = len(server.executor.batches)
    await Run(server.service, path).over(line("a"), b"broken", line("refused"))
    assert path.read_bytes() == before
    assert len(server.executor.batches) == num_steps
    results = await Run(server.service, path).over(line("a"), line("mended"), line("refused"))
    assert [result["custom_id"] for result in results[3:]] == ["mended"]


@pytest.mark.parametrize("cut", [1, 10, 60])
async def test_a_torn_last_line_is_mended(serve, tmp_path, cut):
    server = await serve()
    path = tmp_path / "out.jsonl"
    await Run(server.service, path).over(line("a"), line("b"), concurrency=1)
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:-cut])
    run = Run(server.service, path)
    assert run.file.done_ids == ({"a", "b"} if cut == 1 else {"a"})
    results = await run.over(line("a"), line("b"), line("c"))
    assert sorted(result["custom_id"] for result in results) == ["a", "b", "c"]


def test_a_file_that_holds_something_else_is_left_alone(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"not": "an answer"}\nrest')
    with pytest.raises(ConfigError, match="line 1"):
        open_results(str(path))
    assert path.read_bytes() == b'{"not": "an answer"}\nrest'


def test_two_runs_do_not_write_one_file(tmp_path):
    path = str(tmp_path / "out.jsonl")
    first = open_results(path)
    with pytest.raises(ConfigError, match="another run"):
        open_results(path)
    first.close()
    open_results(path).close()


async def test_no_more_than_the_asked_number_runs_at_a_time(serve, tmp_path):
    server = await serve([40] * 30, delay=0.001)
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, server.service.num_live)
            await asyncio.sleep(0)

    watcher = asyncio.create_task(watch())
    given = [line(str(i), body={"prompt": [40], "max_tokens": 20}) for i in range(20)]
    results = await Run(server.service, tmp_path / "out.jsonl").over(*given, concurrency=3)
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    assert len(results) == 20
    assert most == 3


async def test_a_dead_engine_ends_the_run_and_leaves_its_lines_for_the_next(serve, tmp_path):
    path = tmp_path / "out.jsonl"
    given = [line(str(i)) for i in range(20)]
    broken = await serve([40] * 5, fail_at_step=8)
    with pytest.raises(EngineDeadError):
        await Run(broken.service, path).over(*given, concurrency=2)
    done = len(path.read_text().splitlines())
    assert 0 < done < 20
    healthy = await serve([40] * 5)
    run = Run(healthy.service, path)
    results = await run.over(*given)
    assert run.batch.num_skipped == done
    assert sorted(int(result["custom_id"]) for result in results) == list(range(20))
    assert all(result["response"]["status_code"] == 200 for result in results)


async def test_blank_lines_and_a_byte_order_mark_are_no_lines(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{}\n\n  \r\n[]")
    with path.open("rb") as file:
        assert count_lines(file) == 2
        assert [item async for item in numbered(file)] == [(1, b"{}\n"), (4, b"[]")]


def test_the_routes_that_answer_a_body_may_be_asked():
    assert {COMPLETIONS, "/v1/chat/completions"} <= set(URLS)
    assert all(path.startswith("/v1/") for path in URLS)
