"""What nobody would write: requests made from our own API description, and from none. Never a 5xx, never bad JSON.

OCTAVO_FUZZ_EXAMPLES sets how many requests each operation gets in the slow run (200 by default).
"""

from __future__ import annotations

import json
import os
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from invariants import strict
from schemathesis.generation import GenerationMode

SLOW_EXAMPLES = int(os.environ.get("OCTAVO_FUZZ_EXAMPLES", "200"))
QUICK_EXAMPLES = 6
PLAIN = {"prompt": [40, 41], "max_tokens": 1}
QUIET = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example)


def check(response: httpx.Response) -> None:
    """An answer, or an error that is the client's fault, in one of the shapes we promise."""
    assert response.status_code < 500, response.text
    kind = response.headers["content-type"].partition(";")[0]
    if kind == "text/event-stream":
        for event in response.text.split("\n\n"):
            data = [line.removeprefix("data: ") for line in event.split("\n") if line.startswith("data: ")]
            assert all(strict(item.encode()) is not None for item in data if item != "[DONE]")
    elif kind == "application/json":
        body = strict(response.content)
        if response.status_code >= 400:
            assert body["error"]["message"], body


def fuzz(url: str, key: str, *, num_examples: int) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=120) as http:
        schema = schemathesis.openapi.from_dict(http.get("/openapi.json").json())
        for found in schema.get_all_operations():
            operation = found.ok()
            send_cases(http, operation, GenerationMode.POSITIVE, num_examples=num_examples)
            if operation.body:
                send_cases(http, operation, GenerationMode.NEGATIVE, num_examples=num_examples)
        check(http.get("/health"))
        assert http.post("/v1/completions", json=PLAIN).status_code == 200


def send_cases(http: httpx.Client, operation: Any, mode: GenerationMode, *, num_examples: int) -> None:
    """Requests of one operation: such as its schema allows, or such as it does not."""

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=num_examples == QUICK_EXAMPLES,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=QUIET,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        made = case.as_transport_kwargs(base_url=str(http.base_url))
        body = {"json": made["json"]} if "json" in made else {"content": made["data"]} if made.get("data") else {}
        try:
            request = http.build_request(made["method"], made["url"], params=made.get("params"), **body)
        except (httpx.InvalidURL, ValueError):
            return  # what no client can send
        check(http.send(request))

    send()


def test_no_request_that_the_description_allows_or_forbids_is_a_server_error(scripted_server):
    server = scripted_server(delay=0.0, max_n=4, max_body_bytes=2**20)
    fuzz(server.url, "", num_examples=QUICK_EXAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(SLOW_EXAMPLES * 20 + 300)
def test_a_real_model_meets_no_request_that_is_a_server_error(tiny_server):
    fuzz(tiny_server.url, "sesame", num_examples=SLOW_EXAMPLES)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=[*QUIET])
@given(data=st.data())
def send_noise(http: httpx.Client, paths: list[str], fields: dict[str, list[str]], data: st.DataObject) -> None:
    """Bytes, JSON of any kind, or known fields with values of any kind."""
    path = data.draw(st.sampled_from(paths))
    named = st.dictionaries(st.sampled_from(fields[path]), json_values, max_size=5)
    raw = st.binary() | json_values.map(lambda value: json.dumps(value).encode())
    body = data.draw(raw | named.map(lambda value: json.dumps(value).encode()))
    check(http.post(path, content=body, headers={"content-type": "application/json"}))


def test_no_bytes_are_a_server_error(scripted_server):
    server = scripted_server(delay=0.0, max_n=4)
    with httpx.Client(base_url=server.url, timeout=60) as http:
        document = http.get("/openapi.json").json()
        fields = {}
        for path, methods in document["paths"].items():
            if "requestBody" in methods.get("post", {}) and "{" not in path:
                ref = methods["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                fields[path] = list(document["components"]["schemas"][ref.rpartition("/")[2]]["properties"])
        send_noise(http, list(fields), fields)
        assert http.post("/v1/completions", json=PLAIN).status_code == 200
