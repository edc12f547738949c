"""From a spec to a compiled grammar: which library takes it, and what to say if none does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from octavo.errors import RequestError
from octavo.structured import schema
from octavo.structured.matcher import Compiled, Unsupported
from octavo.structured.spec import StructuredOutputs, field_of

PLAIN_REGEX = re.compile(r"(?:\\[dDwWsS.*+?()\[\]{}|/^$\-\\nrtf\"]|\(\?:|\((?!\?)|\[(?:[^\]\[\\&]|\\.)+\]|[^\\(\[^$])*")
"""Regular expressions without what xgrammar refuses, ignores or reads in a way of its own."""


class Library(Protocol):
    """Compiles specs; raises Unsupported."""

    def compile(self, spec: StructuredOutputs) -> Compiled: ...


def check(spec: StructuredOutputs) -> None:
    """Raise RequestError for a schema that is ill formed, wherever the spec holds one. Needs no library."""
    if spec.json is not None:
        schema.check(json.loads(str(spec.json)), field_of("json"))
    for tagged in _tagged_schemas(spec):
        schema.check(tagged, field_of("structural_tag"))


def compile_spec(spec: StructuredOutputs, libraries: Mapping[str, Library]) -> Compiled:
    """The grammar of a spec, by the library that it names or, with "auto", by the first that keeps to all of it.

    Raises RequestError naming the field, and the part that cannot be done.
    """
    check(spec)
    if spec.backend == "xgrammar":
        _refuse_inexact(spec)
    order = [spec.backend]
    if spec.backend == "auto":
        order = ["xgrammar", "guidance"] if prefers_xgrammar(spec) else ["guidance"]
    if spec.structural_tag is not None and spec.backend == "auto":
        order = ["xgrammar"]
    reasons = []
    for name in order:
        try:
            return libraries[name].compile(spec)
        except Unsupported as error:
            reasons.append(f"{name}: {error}")
    raise RequestError(f"{spec.kind} cannot be compiled. {'; '.join(reasons)}", field=field_of(spec.kind))


def prefers_xgrammar(spec: StructuredOutputs) -> bool:
    """Whether xgrammar keeps to all of the spec, as far as one can tell without asking it."""
    if spec.whitespace_pattern is not None or spec.choice is not None:
        return False  # xgrammar works out masks for every place in every text: minutes for thousands of them
    if spec.json is not None:
        return schema.exact_for_xgrammar(json.loads(str(spec.json)))
    if spec.regex is not None:
        return PLAIN_REGEX.fullmatch(spec.regex.removeprefix("^").removesuffix("$")) is not None
    if spec.grammar is not None:
        return "::=" in spec.grammar
    if spec.structural_tag is not None:
        _refuse_inexact(spec)
    return True


def _refuse_inexact(spec: StructuredOutputs) -> None:
    """Raise RequestError for schemas of which xgrammar would ignore a part, where only it can be asked."""
    schemas = [json.loads(str(spec.json))] if spec.json is not None else _tagged_schemas(spec)
    for each in schemas:
        if not schema.exact_for_xgrammar(each):
            names = ", ".join(schema.inexact_keywords(each))
            raise RequestError(
                f"{spec.kind} cannot be compiled: xgrammar does not keep to {names} as this schema has it",
                field=field_of(spec.kind),
            )
    if spec.whitespace_pattern is not None:
        raise RequestError("whitespace_pattern needs the backend guidance", field=field_of("whitespace_pattern"))


def _tagged_schemas(spec: StructuredOutputs) -> list[Any]:
    """The schemas within a structural tag: `json_schema` of its formats, `schema` of the older structures."""
    if spec.structural_tag is None:
        return []
    found: list[Any] = []
    todo: list[Any] = [json.loads(str(spec.structural_tag))]
    while todo:
        node = todo.pop()
        if isinstance(node, list):
            todo += node
        elif isinstance(node, dict):
            for key, value in node.items():
                is_schema = key == "json_schema" or (key == "schema" and "begin" in node)
                (found if is_schema else todo).append(value)
    return found
