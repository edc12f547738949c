"""Answers and errors are what /openapi.json says they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from octavo.server import pooling
from octavo.server.app import ROUTES
from octavo.server.openapi import PATH_FIELD

pytestmark = pytest.mark.anyio
ANSWERED = [
    (method, path)
    for method, path in ROUTES
    if "{" not in path and path not in ("/metrics", "/openapi.json") and not path.startswith("/v1/responses")
]


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """Validate against a schema of the document."""
    # Its references are to the document, so it is put there.
    whole = document | {"checked": schema, "$schema": "https://json-schema.org/draft/2020-12/schema"}
    registry = Registry().with_resource("octavo:", Resource.from_contents(whole))
    Draft202012Validator({"$ref": "octavo:#/checked"}, registry=registry).validate(value)


@pytest.mark.parametrize(("method", "path"), ANSWERED)
async def test_the_example_of_a_route_is_answered_as_described(serve, method, path):
    server = await serve("yes")
    document = (await server.get("/openapi.json")).json()
    operation = document["paths"][PATH_FIELD.sub(r"{\1}", path)][method.lower()]
    media = operation.get("requestBody", {"content": {"application/json": {}}})["content"]["application/json"]
    response = await server.http.request(method, path, json=media.get("example"))
    content = operation["responses"]["200" if response.status_code == 200 else "default"]["content"]
    pools = path in pooling.PATHS  # no model that is served here does
    assert response.status_code == (400 if pools else 200), response.text
    check(document, content["application/json"]["schema"], response.json())
    if "text/event-stream" in content and "example" in media:
        streamed = await server.send(path, media["example"] | {"stream": True})
        assert streamed.status_code == 200
        data = [line.removeprefix("data: ") for line in streamed.text.split("\n") if line.startswith("data: ")]
        for item in data:
            if item != "[DONE]":
                check(document, content["text/event-stream"]["x-event-data"], json.loads(item))


@pytest.mark.parametrize(("method", "path"), [route for route in ANSWERED if route[0] == "POST"])
async def test_an_error_of_a_route_is_as_described(serve, method, path):
    server = await serve()
    document = (await server.get("/openapi.json")).json()
    response = await server.send(path, raw="{")
    assert response.status_code == 400
    schema = document["paths"][path]["post"]["responses"]["default"]["content"]["application/json"]["schema"]
    check(document, schema, response.json())
