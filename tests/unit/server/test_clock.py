"""A wall clock that jumps: it tells when an answer was made, and measures nothing."""

from __future__ import annotations

import itertools
import time

import pytest

from octavo.server.options import ServerOptions

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"


@pytest.mark.parametrize("jump", [-3e8, 3e8, 0.0])
async def test_answers_streams_and_limits_go_on_when_the_wall_clock_jumps(serve, monkeypatch, tmp_path, jump):
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: alice, key: sesame, requests_per_minute: 3}]")
    server = await serve([40] * 40, delay=0.002, options=ServerOptions(api_keys_file=str(keys)))
    server.http.headers["authorization"] = "Bearer sesame"
    now, jumps = time.time(), itertools.count()
    monkeypatch.setattr(time, "time", lambda: now + jump * (next(jumps) % 3))
    body = {"prompt": "x", "max_tokens": 30}
    chunks = await server.stream(PATH, body)
    assert len({chunk["created"] for chunk in chunks}) == 1
    for _ in range(2):
        assert (await server.ask(PATH, body))["usage"]["completion_tokens"] == 30
    # A jump forward refills no bucket, and one backward keeps nobody out for longer than a minute.
    response = await server.send(PATH, body)
    assert response.status_code == 429
    assert 0 < float(response.headers["retry-after"]) <= 60
