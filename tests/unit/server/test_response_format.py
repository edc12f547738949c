"""The form that a request wants its answer to have, in the three languages that say it."""

from __future__ import annotations

import json

import pytest

from octavo.errors import RequestError
from octavo.server.decode import decode_body
from octavo.server.openai.protocol import CompletionBody
from octavo.server.openai.response_format import read_structured_outputs
from octavo.structured.spec import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"pages": {"type": "integer"}}, "required": ["pages"]}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
OLD_TAG = {"type": "structural_tag", "structures": [], "triggers": ["<f>"]}


def read(**fields):
    return read_structured_outputs(decode_body(json.dumps({"prompt": "x"} | fields).encode(), CompletionBody))


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "book", "schema": SCHEMA}}},
            StructuredOutputs(json=SCHEMA),
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, StructuredOutputs(json_object=True)),
        ({"response_format": TAG}, StructuredOutputs(structural_tag=TAG)),
        ({"response_format": OLD_TAG}, StructuredOutputs(structural_tag=OLD_TAG)),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, StructuredOutputs(json=json.dumps(SCHEMA))),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, StructuredOutputs(regex="a+")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, StructuredOutputs(choice=("yes", "no"))),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, StructuredOutputs(grammar='root ::= "a"')),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            StructuredOutputs(json=SCHEMA, disable_any_whitespace=True),
        ),
        ({"guided_json": SCHEMA}, StructuredOutputs(json=SCHEMA)),
        ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"guided_choice": ["yes", "no"]}, StructuredOutputs(choice=("yes", "no"))),
        ({"guided_grammar": 'root ::= "a"'}, StructuredOutputs(grammar='root ::= "a"')),
        ({"guided_json_object": True}, StructuredOutputs(json_object=True)),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?", "guided_decoding_backend": "guidance"},
            StructuredOutputs(json=SCHEMA, whitespace_pattern=" ?", backend="guidance"),
        ),
    ],
)
def test_all_languages_say_the_same(fields, wanted):
    assert read(**fields) == wanted


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": "x"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": "a+"}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json_object": False}, "guided_json_object"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_what_is_wrong_is_named(fields, field):
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert caught.value.field == field
