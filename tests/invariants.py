"""What holds after every case of tests/cases: see `Invariants`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def strict(text: str | bytes) -> Any:
    """Parse JSON; NaN and Infinity, which are none, fail the test."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


async def strict_body(response: httpx.Response) -> None:
    """A hook of HTTP clients: every body and every event of a stream is strict JSON."""
    kind = response.headers.get("content-type", "")
    if kind.startswith("application/json"):
        strict(await response.aread())
    elif kind.startswith("text/event-stream"):
        await response.aread()
        for line in response.text.split("\n"):
            if line.startswith("data: ") and line != "data: [DONE]":
                strict(line.removeprefix("data: "))


class Invariants:
    """What holds whatever has happened before. Asserted of a server by `await invariants.server(http)`, where `http`
    has the hook `strict_body`, or by `invariants.url(url)`; of an LLM by `invariants(llm)`.

    1. the pieces of a stream join to the plain answer;
    2. a wrong request is refused by the name of its field, and the next one is answered;
    3. nothing runs or waits, and no KV block is held;
    4. every body is strict JSON.
    """

    def __init__(self) -> None:
        self.asserted = False

    async def server(self, http: httpx.AsyncClient) -> None:
        self.asserted = True

        async def post(**changes: Any) -> httpx.Response:
            body = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "return_token_ids": True}
            return await http.post("/v1/completions", json=body | changes)

        async def plain() -> tuple[str, list[int]]:
            response = await post()
            assert response.status_code == 200, response.text
            (choice,) = response.json()["choices"]
            return choice["text"], choice["token_ids"]

        whole = await plain()
        events = (await post(stream=True)).text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        pieces = [choice for event in events[:-2] for choice in strict(event.removeprefix("data: "))["choices"]]
        ids = [token for piece in pieces for token in piece["token_ids"]]
        assert ("".join(piece["text"] for piece in pieces), ids) == whole
        wrong = await post(top_p=-1)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "top_p")
        assert await plain() == whole
        for _ in range(500):
            lines = (await http.get("/metrics")).text.splitlines()
            values = [line.rpartition(" ") for line in lines if line.startswith(tuple(f"octavo:{g}{{" for g in GAUGES))]
            assert len(values) >= len(GAUGES), "no gauges"
            busy = [line for line, _, value in values if float(value)]
            if not busy:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"not at rest: {busy}")

    def url(self, url: str, *, key: str = "") -> None:
        """Assert them of a server of another process."""

        async def ask() -> None:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            hooks: dict[str, Any] = {"response": [strict_body]}
            async with httpx.AsyncClient(base_url=url, headers=headers, event_hooks=hooks, timeout=120) as http:
                await self.server(http)

        asyncio.run(ask())

    def __call__(self, llm: Any) -> None:
        from octavo.errors import RequestError
        from octavo.sampling.params import SamplingParams

        self.asserted = True
        params = SamplingParams(max_tokens=6, temperature=0, logprobs=1)

        def plain() -> tuple[str, list[int]]:
            (answer,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs
            entries = [entry.logprob for place in answer.logprobs for entry in place.values()]
            json.dumps([answer.cumulative_logprob, entries], allow_nan=False)
            return answer.text, answer.token_ids

        whole = plain()
        pieces = [answer for delta in llm.stream([5, 6, 7], params) for answer in delta.outputs]
        ids = [token for piece in pieces for token in piece.token_ids]
        assert ("".join(piece.text for piece in pieces), ids) == whole
        with pytest.raises(RequestError) as wrong:
            llm.generate([[5, 10**9]], params)
        assert wrong.value.field == "prompt"
        assert plain() == whole
        assert (llm.stats.running, llm.stats.waiting, llm.stats.kv_usage) == (0, 0, 0)
