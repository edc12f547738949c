"""The API description holds every route, is valid JSON schema, and says what the validator does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from octavo.errors import RequestError
from octavo.sampling.params import RANGES, SamplingParams
from octavo.server import admin
from octavo.server.app import ROUTES
from octavo.server.decode import decode_body
from octavo.server.endpoint import Call
from octavo.server.openapi import PATH_FIELD, document, read_signature

DOCUMENT = json.loads(msgspec.json.encode(document(ROUTES)))
WITH_BODY = [route for route, handler in ROUTES.items() if read_signature(handler).body is not None]

NEEDED: dict[str, dict[str, Any]] = {"best_of": {"use_beam_search": True}}
"""What else must be set for a parameter to be allowed at all."""


def validator(pointer: str) -> Draft202012Validator:
    """Validates against the schema at a JSON pointer of the document."""
    whole = Resource.from_contents(DOCUMENT | {"$schema": "https://json-schema.org/draft/2020-12/schema"})
    return Draft202012Validator({"$ref": f"octavo:#{pointer}"}, registry=Registry().with_resource("octavo:", whole))


def operation(method: str, path: str) -> dict[str, Any]:
    return DOCUMENT["paths"][PATH_FIELD.sub(r"{\1}", path)][method.lower()]


def refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from refs(item)
    elif isinstance(value, list):
        for item in value:
            yield from refs(item)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_is_described(method: str, path: str) -> None:
    found = operation(method, path)
    assert found["summary"]
    assert found["responses"]["200"]["content"]
    assert found["responses"]["default"]["content"]["application/json"]["schema"]["$ref"]


def test_routes_of_operators_are_described_where_they_are_open() -> None:
    assert admin.ROUTES
    found = document(ROUTES | admin.ROUTES)["paths"]
    assert {PATH_FIELD.sub(r"{\1}", path) for _, path in admin.ROUTES} <= set(found)


def test_nothing_else_is_described_and_names_are_unique() -> None:
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == {(method, PATH_FIELD.sub(r"{\1}", path)) for method, path in ROUTES}
    names = [op["operationId"] for methods in DOCUMENT["paths"].values() for op in methods.values()]
    assert len(names) == len(set(names))


def test_all_schemas_are_schemas_and_all_references_lead_somewhere() -> None:
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    for ref in refs(DOCUMENT):
        assert ref.removeprefix("#/components/schemas/") in DOCUMENT["components"]["schemas"], ref


@pytest.mark.parametrize(("method", "path"), WITH_BODY)
def test_every_body_has_an_example_that_schema_and_decoder_take(method: str, path: str) -> None:
    media = operation(method, path)["requestBody"]["content"]["application/json"]
    assert "example" in media, "give the body's fields examples: Annotated[..., msgspec.Meta(examples=[...])]"
    validator(media["schema"]["$ref"].removeprefix("#")).validate(media["example"])
    decode_body(json.dumps(media["example"]).encode(), read_signature(ROUTES[method, path]).body)


@pytest.mark.parametrize(("name", "limits"), RANGES.items())
def test_ranges_of_sampling_are_those_that_are_checked(name: str, limits: Any) -> None:
    properties = DOCUMENT["components"]["schemas"]["CompletionBody"]["properties"]
    described = Draft202012Validator(properties[name])
    beyond = [limits.low if limits.above else limits.low - 1]
    beyond += [] if limits.high is None else [limits.high + 1]
    inside = [limits.low + 1 if limits.above else limits.low]
    inside += [] if limits.high is None else [limits.high]
    for value in beyond:
        assert not described.is_valid(value)
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: value})
    for value in inside:
        assert described.is_valid(value)
        SamplingParams(**NEEDED.get(name, {}) | {name: value})


def test_a_handler_that_says_nothing_is_named() -> None:
    async def silent(service, call: Call[None]):  # type: ignore[no-untyped-def]
        return {}

    with pytest.raises(TypeError, match="silent"):
        document({("GET", "/x"): silent})
