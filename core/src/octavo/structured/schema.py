"""JSON schemas before a grammar library sees them: is one well formed, and does xgrammar keep to all of it?

xgrammar takes many keywords that it then ignores, alone or beside others. So it gets a schema only if every part has
one of the forms that it is exact for (`exact_for_xgrammar`); everything else goes to llguidance, which refuses by name
what it cannot do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from octavo.errors import RequestError


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
ANNOTATIONS = _words(
    "title description default examples deprecated readOnly writeOnly discriminator $schema $id $comment $defs "
    "definitions"
)
"""Keywords that say nothing of a value."""

FORMATS = _words("date time date-time duration email hostname uri uuid")
"""String formats that xgrammar keeps to (its IPv4 addresses may have leading zeros)."""

PLAIN_PATTERN = re.compile(
    r"\^?(?:\((?!\?)|\(\?:|\[(?:[A-Za-z0-9]-[A-Za-z0-9]|[A-Za-z0-9 _.:,#@=%&/])*-?\]|[A-Za-z0-9 _\-/:,#@=%&)|?*+{}]"
    r"|\\[d.+*?()\[\]{}|/-])*\$?"
)
"""Patterns without anything that xgrammar reads in a way of its own within JSON strings: no class that is negated or
could hold a quote, no look-around, no anchor but the outer ones."""

ALONE: dict[str, frozenset[str]] = {
    "$ref": frozenset(),
    "const": frozenset({"type"}),
    "enum": frozenset({"type"}),
    "anyOf": frozenset(),
}
"""Keywords for which xgrammar ignores all others but these."""

BESIDE_TYPE: dict[str, tuple[frozenset[str], ...]] = {
    "string": tuple(map(frozenset, ({"pattern"}, {"format"}))),
    "integer": (_words("minimum maximum exclusiveMinimum exclusiveMaximum"),),
    "number": (_words("minimum maximum"),),
    "boolean": (),
    "null": (),
    "array": (_words("items minItems maxItems"), _words("prefixItems items")),
    "object": (_words("properties required additionalProperties"),),
}
"""Which keywords xgrammar keeps to, together, beside a type."""

MAPS_OF_SCHEMAS = _words("properties patternProperties $defs definitions dependentSchemas")
LISTS_OF_SCHEMAS = _words("anyOf oneOf allOf prefixItems")
SCHEMAS = _words(
    "items additionalItems additionalProperties unevaluatedProperties unevaluatedItems propertyNames contains not if "
    "then else"
)
MEETS = _words("allOf not if then else dependentSchemas")
"""Applicators whose schemas hold together with their neighbours."""
SAYS_WHAT_ELSE = _words("additionalProperties unevaluatedProperties patternProperties propertyNames anyOf oneOf $ref")


def check(schema: object, field: str) -> None:
    """Raise RequestError naming the keyword and its place if a keyword has a value that no schema may give it."""
    for path, node in walk(schema):
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise RequestError(f"not a JSON schema: {path or 'the top'} is {_show(node)}, not an object", field=field)
        for keyword, value in node.items():
            rule = RULES.get(keyword)
            if rule is not None and not rule[0](value):
                raise RequestError(
                    f"not a JSON schema: {path}/{keyword} must be {rule[1]}, not {_show(value)}", field=field
                )
        reference = node.get("$ref")
        if reference is not None and not resolves(reference, schema):
            raise RequestError(
                f"not a usable JSON schema: {path}/$ref is {_show(reference)}, which is not in the schema", field=field
            )


def exact_for_xgrammar(schema: object) -> bool:
    """Whether xgrammar accepts exactly what this well-formed schema allows, or less."""
    return all(isinstance(node, bool) or (isinstance(node, dict) and _exact(node)) for _, node in walk(schema))


def inexact_keywords(schema: object) -> list[str]:
    """Keywords of the parts that xgrammar is not exact for."""
    bad = [node for _, node in walk(schema) if isinstance(node, dict) and not _exact(node)]
    return sorted({keyword for node in bad for keyword in node.keys() - ANNOTATIONS - {"type"}})


def _exact(node: dict[str, Any]) -> bool:
    keywords = node.keys() - ANNOTATIONS
    for keyword, others in ALONE.items():
        if keyword in keywords:
            values = node["enum"] if keyword == "enum" else [node["const"]] if keyword == "const" else []
            types = _types(node)
            return keywords <= others | {keyword} and all(_is_of(value, types) for value in values)
    if "pattern" in node and not PLAIN_PATTERN.fullmatch(node["pattern"]):
        return False
    if "format" in node and node["format"] not in FORMATS:
        return False
    if "required" in node and not set(node["required"]) <= node.get("properties", {}).keys():
        return False
    types = _types(node)
    rest = keywords - {"type"}
    if len(types) != 1:
        # Without one type, keywords of a type bind only values of that type.
        return not rest
    return not rest or any(rest <= group for group in BESIDE_TYPE[types[0]])


def closed(schema: object, *, every: bool) -> object:
    """The schema with `additionalProperties: false` on objects that do not say what else they take.

    every: on all of them; else only on those that list properties, which is how xgrammar reads them too. A schema with
    parts that hold together with others (allOf, a $ref with neighbours) is left as it is: those must stay open.
    """
    nodes = [node for _, node in walk(schema) if isinstance(node, dict)]
    if any(node.keys() & MEETS or ("$ref" in node and node.keys() - ANNOTATIONS - {"$ref"}) for node in nodes):
        return schema
    out = json.loads(json.dumps(schema))
    for _, node in walk(out):
        if not isinstance(node, dict) or node.keys() & SAYS_WHAT_ELSE:
            continue
        lists = "properties" in node and set(node.get("required", ())) <= node["properties"].keys()
        if lists or (every and node.get("type") == "object"):
            node["additionalProperties"] = False
    return out


def walk(schema: object) -> Iterator[tuple[str, object]]:
    """(JSON pointer, schema) of a schema and all within it, also of values that are no schema where one belongs."""
    todo: list[tuple[str, object]] = [("", schema)]
    while todo:
        path, node = todo.pop()
        yield path, node
        if not isinstance(node, dict):
            continue
        for keyword, value in node.items():
            here = f"{path}/{keyword}"
            if keyword in SCHEMAS:
                todo.append((here, value))
            elif keyword in LISTS_OF_SCHEMAS and isinstance(value, list):
                todo += [(f"{here}/{i}", each) for i, each in enumerate(value)]
            elif keyword in MAPS_OF_SCHEMAS and isinstance(value, dict):
                todo += [(f"{here}/{name}", each) for name, each in value.items()]


def resolves(reference: str, schema: object) -> bool:
    """Whether "#/..." points into the schema. Other documents are never fetched."""
    if reference == "#":
        return True
    if not reference.startswith("#/"):
        return False
    node = schema
    for part in reference[2:].split("/"):
        key = re.sub("%([0-9A-Fa-f]{2})", lambda m: chr(int(m[1], 16)), part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return False
    return isinstance(node, dict | bool)


def _types(node: dict[str, Any]) -> tuple[str, ...]:
    kinds = node.get("type")
    if kinds is None:
        return TYPES
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def _is_of(value: object, types: tuple[str, ...]) -> bool:
    return any(OF_TYPE[each](value) for each in types)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return _is_number(value) and value not in (float("inf"), float("-inf")) and int(value) == value


def _is_count(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_filled(value: object) -> bool:
    return isinstance(value, list) and bool(value)


def _is_type(value: Any) -> bool:
    return value in TYPES if isinstance(value, str) else _is_filled(value) and all(each in TYPES for each in value)


def _show(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:60] + "..."


OF_TYPE: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": _is_integer,
    "number": _is_number,
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}

Rule = tuple[Callable[[Any], bool], str]


def _rules(names: str, check: Callable[[Any], bool], text: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), (check, text))


RULES: dict[str, Rule] = {
    **_rules("type", _is_type, f"one of {', '.join(TYPES)}, or a list of them"),
    **_rules(" ".join(MAPS_OF_SCHEMAS), OF_TYPE["object"], "an object of schemas"),
    **_rules(" ".join(LISTS_OF_SCHEMAS), _is_filled, "a list of schemas that is not empty"),
    **_rules(" ".join(SCHEMAS), lambda value: isinstance(value, dict | bool), "a schema (an object, true or false)"),
    **_rules("required", _is_texts, "a list of texts"),
    **_rules("enum", _is_filled, "a list that is not empty"),
    **_rules("minLength maxLength minItems maxItems minProperties maxProperties", _is_count, "a count"),
    **_rules("minContains maxContains", _is_count, "a count"),
    **_rules("minimum maximum exclusiveMinimum exclusiveMaximum", _is_number, "a number"),
    **_rules("multipleOf", lambda value: _is_number(value) and value > 0, "a number above 0"),
    **_rules("pattern", lambda value: isinstance(value, str) and "\0" not in value, "a regular expression"),
    **_rules("format $ref title description $comment", OF_TYPE["string"], "a text"),
    **_rules("uniqueItems", OF_TYPE["boolean"], "true or false"),
    **_rules(
        "dependentRequired",
        lambda value: isinstance(value, dict) and all(map(_is_texts, value.values())),
        "an object of lists of texts",
    ),
}
"""Keyword -> (whether a value is of the right form, which form that is)."""
