"""The form that a request wants its answer to have: `response_format`, `structured_outputs`, `guided_*`.

They say the same in three languages: OpenAI's, vLLM's, and vLLM's older one. One of them is taken.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.server.decode import decode_part
from octavo.server.openai.protocol import SamplingFields
from octavo.structured.spec import StructuredOutputs

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "structural_tag": "structural_tag",
}
"""The older fields -> those of StructuredOutputs."""

GUIDED_OPTIONS = {"guided_decoding_backend": "backend", "guided_whitespace_pattern": "whitespace_pattern"}
TYPES = ("text", "json_object", "json_schema", "structural_tag")


class StructuredFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`structured_outputs` of a body. What is wrong with a value is said by `StructuredOutputs`."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


def read_structured_outputs(body: SamplingFields) -> StructuredOutputs | None:
    """The form of the answer, or None if it is free. Raises RequestError naming the field."""
    given = [name for name in ("structured_outputs", *GUIDED) if getattr(body, name) is not None]
    wants = _response_format(body.response_format)
    if wants is not None:
        given.append("response_format")
    if len(given) > 1:
        raise RequestError(f"{' and '.join(sorted(given))} exclude each other", field=sorted(given)[0])
    if not given:
        return None
    (name,) = given
    if wants is not None:
        settings = wants
    elif name == "structured_outputs":
        fields: StructuredFields = decode_part(body.structured_outputs, StructuredFields, name)
        settings = {key: value for key, value in msgspec.structs.asdict(fields).items() if value is not None}
        settings.pop("disable_fallback", None)  # nothing falls back here: a form that cannot be kept is refused
    else:
        settings = {GUIDED[name]: getattr(body, name)}
        settings |= {key: value for old, key in GUIDED_OPTIONS.items() if (value := getattr(body, old)) is not None}
    try:
        return StructuredOutputs(**settings)
    except RequestError as error:
        if name != "structured_outputs":
            error.field = where(name, error.field)
        raise


def field_names(body: SamplingFields) -> dict[str, str]:
    """What a body calls fields that the engine knows by another name."""
    names = {"extra_args": "vllm_xargs"}
    if body.structured_outputs is None:
        names["structured_outputs"] = next(
            (name for name in GUIDED if getattr(body, name) is not None), "response_format"
        )
    return names


def where(name: str, field: str) -> str:
    """The place in a body of a field of StructuredOutputs, where the form was given by the field `name`."""
    if name != "response_format":
        return name
    return "response_format.json_schema.schema" if field == "structured_outputs.json" else name


def _response_format(value: Any) -> dict[str, Any] | None:
    """Settings of StructuredOutputs; None for free text."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RequestError("response_format must be an object with a type", field="response_format")
    kind = value.get("type")
    if kind not in TYPES:
        field = "response_format.type"
        raise RequestError(f"{field} must be one of {', '.join(TYPES)}, not {kind!r}", field=field)
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": value}
    described = value.get("json_schema")
    if not isinstance(described, dict):
        field = "response_format.json_schema"
        raise RequestError(f"{field} must be an object with a schema", field=field)
    schema = described.get("schema")
    if schema is None or schema is True:
        return {"json_object": True}  # any object: OpenAI takes a schema that is left out for one
    if not isinstance(schema, dict):
        field = "response_format.json_schema.schema"
        raise RequestError(f"{field} must be a JSON schema", field=field)
    return {"json": schema}
