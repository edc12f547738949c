"""GET /openapi.json: the routes as OpenAPI 3.1, made of what the handlers' annotations and bodies' structs say.

handler annotations ──> body, answer, chunk types ──msgspec──> JSON schemas ──RANGES of SamplingParams──> document

A field's `msgspec.Meta` adds what its type cannot say (a schema of an `Any`, examples); a body's example is made of
the examples of its fields.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from octavo import __version__
from octavo.sampling.params import RANGES, Range
from octavo.server.endpoint import Call, Handler, Raw, Stream, encode_json
from octavo.server.errors import ApiError
from octavo.server.middleware import OPEN_PATHS
from octavo.server.service import Service

Routes = Mapping[tuple[str, str], Handler]
PATH_FIELD = re.compile(r"\{(\w+)(?::\w+)?\}")
REF = "#/components/schemas/{name}"


class Signature(msgspec.Struct, frozen=True):
    """What a handler takes and gives; None where there is no such thing. raw: bytes of no JSON type."""

    body: Any
    answer: Any
    chunk: Any
    raw: bool


def read_signature(handler: Handler) -> Signature:
    """The types of a handler's annotations. Raises TypeError for a handler that does not say them."""
    hints = get_type_hints(handler)
    calls = [hint for hint in hints.values() if get_origin(hint) is Call]
    given = hints.get("return")
    parts = get_args(given) if get_origin(given) in (typing.Union, types.UnionType) else (given,)
    chunks = [get_args(part)[0] for part in parts if get_origin(part) is Stream]
    answers = [part for part in parts if get_origin(part) is not Stream and part is not Raw]
    if len(calls) != 1 or None in parts or Any in parts or len(chunks) > 1 or len(answers) > 1:
        name = f"{handler.__module__}.{getattr(handler, '__qualname__', handler)}"
        raise TypeError(
            f"{name}: annotate `call: Call[Body]` and the answer's type, `-> Answer | Stream[Chunk]`, not {given}"
        )
    body = get_args(calls[0])[0]
    return Signature(
        body=None if body is type(None) else body,
        answer=answers[0] if answers else None,
        chunk=chunks[0] if chunks else None,
        raw=Raw in parts,
    )


def serve_document(routes: Routes) -> Handler:
    """The handler of /openapi.json for a table of routes, which may hold that handler itself."""
    made: list[bytes] = []

    async def get_openapi(service: Service, call: Call[None]) -> dict[str, Any] | Raw:
        """This document."""
        if not made:
            made.append(encode_json(document(routes)))
        return Raw(made[0], "application/json")

    return get_openapi


def document(routes: Routes) -> dict[str, Any]:
    """The OpenAPI document of a table of routes. Raises TypeError for a handler without annotations."""
    signatures = {route: read_signature(handler) for route, handler in routes.items()}
    kinds: list[Any] = []
    for (_, path), said in signatures.items():
        used = (error_kind(path), said.body, said.answer, said.chunk)
        kinds += [kind for kind in used if kind is not None and kind not in kinds]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REF)
    named = dict(zip(kinds, schemas, strict=True))
    for schema in components.values():
        add_ranges(schema)
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), handler in routes.items():
        operation = describe(method, path, handler, signatures[method, path], named)
        paths.setdefault(PATH_FIELD.sub(r"{\1}", path), {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        # Keys are asked for only where the operator set some.
        "security": [{}, {"key": []}],
    }


def describe(
    method: str, path: str, handler: Handler, said: Signature, schemas: Mapping[Any, dict[str, Any]]
) -> dict[str, Any]:
    """One operation."""
    text = inspect.getdoc(handler) or ""
    words = re.findall(r"\w+", method.lower() + PATH_FIELD.sub(r"by_\1", path))
    operation: dict[str, Any] = {
        "operationId": "_".join(words),
        "summary": re.split(r"[.:]\s", text, maxsplit=1)[0].rstrip("."),
        "responses": {"200": {"description": "The answer.", "content": contents(said, schemas)}},
    }
    if path in OPEN_PATHS:
        operation["security"] = []
    operation["responses"]["default"] = {
        "description": "An error.",
        "content": {"application/json": {"schema": schemas[error_kind(path)]}},
    }
    if fields := PATH_FIELD.findall(path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in fields
        ]
    if said.body is not None:
        media: dict[str, Any] = {"schema": schemas[said.body]}
        if (example := example_of(said.body)) is not None:
            media["example"] = example
        operation["requestBody"] = {"required": True, "content": {"application/json": media}}
    return operation


def error_kind(path: str) -> type[msgspec.Struct]:
    """The struct that errors of a path are."""
    return type(ApiError(500, "").body_for(path, None))


def contents(said: Signature, schemas: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    """Media types of a good answer, each with the schema of its data."""
    content: dict[str, Any] = {}
    if said.answer is not None:
        content["application/json"] = {"schema": schemas[said.answer]}
    if said.chunk is not None:
        # One event's data; OpenAPI 3.1 has no word for a sequence of them.
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-event-data": schemas[said.chunk]}
    if said.raw and not content:
        content["text/plain"] = {"schema": {"type": "string"}}
    return content


def example_of(body: Any) -> dict[str, Any] | None:
    """A body made of the first example of each field that has one; None if that is none."""
    example: dict[str, Any] = {}
    if not (inspect.isclass(body) and issubclass(body, msgspec.Struct)):
        return None
    for field in msgspec.structs.fields(body):
        for meta in getattr(field.type, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and meta.examples:
                example[field.encode_name] = meta.examples[0]
    return example or None


def add_ranges(schema: dict[str, Any]) -> None:
    """Write the ranges that `SamplingParams` checks into the properties of those names."""
    for name, property in schema.get("properties", {}).items():
        limits = RANGES.get(name)
        for part in property.get("anyOf", [property]):
            if limits is not None and part.get("type") in ("integer", "number"):
                part.update(limits_json(limits))


def limits_json(limits: Range) -> dict[str, float]:
    """A range in the words of JSON schema."""
    written = {"exclusiveMinimum" if limits.above else "minimum": limits.low, "maximum": limits.high}
    return {word: value for word, value in written.items() if value is not None}
