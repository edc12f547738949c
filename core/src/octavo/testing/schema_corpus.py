"""JSON schemas by keyword, and combinations of them: what a request may ask for, for tests of structured outputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

STRINGS: list[Schema] = [
    {"type": "string"},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "maxLength": 0},
    {"type": "string", "minLength": 3},
    {"type": "string", "pattern": "^[a-z]{2,5}$"},
    {"type": "string", "pattern": "^(foo|ba[rz])-\\d+$"},
    {"type": "string", "pattern": "b[^a]d"},
    {"type": "string", "pattern": '^"quoted\\\\"$'},
    {"type": "string", "pattern": "^[ -~]{1,4}$"},
    {"type": "string", "pattern": "^.{3}$"},
    {"type": "string", "pattern": "^\\w+\\s\\S$"},
    {"type": "string", "pattern": "^é{1,2}[à-ü]?$"},
    {"type": "string", "pattern": "^[a-c]+$", "minLength": 3, "maxLength": 5},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "date", "minLength": 10},
    {"enum": ["a", 'with "quotes"', "new\nline", "back\\slash", "ünï", "😀"]},
    {"const": "fixed"},
    {"type": "string", "enum": ["x"]},
    {"type": "string", "enum": ["x", "y"], "pattern": "^x"},
]
NUMBERS: list[Schema] = [
    {"type": "integer"},
    {"type": "number"},
    {"type": "integer", "minimum": -7, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 0},
    {"type": "integer", "exclusiveMaximum": 100, "minimum": 98},
    {"type": "integer", "minimum": 1, "maximum": 1_000_000},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "minimum": -1.5, "maximum": 2.25},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "integer", "multipleOf": 7},
    {"type": "integer", "multipleOf": 5, "minimum": 3, "maximum": 42},
    {"type": "integer", "enum": [1, 2, 30]},
    {"type": "integer", "enum": [1, "one"]},
    {"const": 3.5},
    {"type": "number", "multipleOf": 0.5},
]
OTHERS: list[Schema] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["string", "null"]},
    {"type": ["integer", "null"], "minimum": 5},
    {"type": ["string", "integer"], "maxLength": 2},
    {"enum": [True, None, 0, "", [], {}]},
    {"const": {"a": [1, {"b": None}]}},
    {"const": None},
    {"enum": [[1, 2], {"k": "v"}]},
    {},
    {"description": 'a "quoted" ] text\nof } two lines', "type": "integer"},
]
ARRAYS: list[Schema] = [
    {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
    {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1},
    {"type": "array", "items": {"type": "null"}},
    {"type": "array", "maxItems": 0},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "null"}},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "minItems": 2, "items": False},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}, "maxItems": 2},
    {"type": "array", "minItems": 1, "maxItems": 2},
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    {"type": "array", "contains": {"const": 1}},
    {"type": "array", "contains": {"const": 1}, "minContains": 2, "maxContains": 3},
]
OBJECTS: list[Schema] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}}, "required": ["b"]},
    {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": True, "required": ["a"]},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {'q"uote': {"type": "null"}, "back\\slash": {"type": "null"}, "ü": {"const": 1}}},
    {"type": "object", "properties": {"a": {"const": 1}}, "required": ["b"]},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
    {"type": "object", "minProperties": 1},
    {"type": "object", "maxProperties": 1},
    {"type": "object", "properties": {}},
    {"type": "object"},
    {"properties": {"a": {"type": "integer"}}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "properties": {"o": {"type": "object", "properties": {"p": {"const": 0}}, "required": ["p"]}}},
    {"type": "object", "properties": {"a": False, "b": True}},
]
COMBINED: list[Schema] = [
    {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    {"anyOf": [{"type": "integer"}, {"type": "number"}], "minimum": 5},
    {"anyOf": [{"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]}, {"type": "boolean"}]},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
            {"type": "object", "properties": {"k": {"const": "b"}, "n": {"type": "integer"}}, "required": ["k", "n"]},
        ]
    },
    {"allOf": [{"type": "integer"}, {"minimum": 5}, {"maximum": 9}]},
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"]},
        ]
    },
    {"type": "integer", "not": {"const": 3}},
    {"not": {}},
    {"if": {"type": "integer"}, "then": {"minimum": 5}},
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}},
    {"$ref": "#/$defs/n", "minimum": 5, "$defs": {"n": {"type": "integer"}}},
    {"$ref": "#/definitions/a~1b", "definitions": {"a/b": {"type": "boolean"}}},
    {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
                "required": ["v"],
            }
        },
    },
    {"type": "object", "properties": {"me": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["me"]},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "anyOf": [{"required": ["a"]}]},
    {"type": "object", "properties": {"a": {"const": 1}}, "unevaluatedProperties": False},
]

ILL_FORMED: list[Schema] = [
    {"properties": {"foo": "bar"}},
    {"type": "strin"},
    {"type": []},
    {"type": 5},
    {"required": "a"},
    {"required": [1]},
    {"enum": []},
    {"enum": "a"},
    {"minLength": -1},
    {"minLength": "3"},
    {"minimum": "3"},
    {"multipleOf": 0},
    {"pattern": 5},
    {"anyOf": {}},
    {"anyOf": []},
    {"allOf": [1]},
    {"items": [{"type": "integer"}]},
    {"items": 3},
    {"additionalProperties": "no"},
    {"$ref": 5},
    {"$ref": "#/nowhere"},
    {"$ref": "https://example.com/schema.json"},
    {"uniqueItems": "yes"},
    {"not": 3},
    {"properties": []},
    {"patternProperties": {"a": 1}},
    {"dependentRequired": {"a": "b"}},
    {"type": "array", "prefixItems": [{"type": "nope"}]},
    {"$defs": {"a": 3}},
]


def corpus() -> Iterator[Schema]:
    """All well-formed schemas: each by itself, within an object, within an array, and beside others."""
    plain = [*STRINGS, *NUMBERS, *OTHERS, *ARRAYS, *OBJECTS, *COMBINED]
    yield from plain
    for schema in plain:
        if "#" not in str(schema):  # a reference to the top would mean another schema there
            yield {"type": "object", "properties": {"value": schema}, "required": ["value"]}
    for one, other in itertools.pairwise(s for s in plain if "#" not in str(s)):
        yield {"type": "object", "properties": {"one": one, "other": other}, "additionalProperties": False}
