"""Every answer that ends is valid, for all schemas of the corpus; what cannot be kept to is refused by name."""

from __future__ import annotations

import json
from collections import Counter

import jsonschema
import pytest

from octavo.errors import RequestError
from octavo.structured.compile import Library, check, compile_spec
from octavo.structured.spec import StructuredOutputs
from octavo.testing.schema_corpus import ILL_FORMED, corpus

CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
BEYOND_BOTH = ("uniqueItems", "contains", "propertyNames", "dependentRequired", "oneOf", "not", "if", "unevaluated")


def test_every_answer_of_the_corpus_is_valid(libraries: dict[str, Library], draw) -> None:
    seen: Counter[str] = Counter()
    refusals: list[str] = []
    for number, schema in enumerate(corpus()):
        try:
            compiled = compile_spec(StructuredOutputs(json=schema), libraries)
        except RequestError as error:
            refusals.append(str(error))
            continue
        seen[compiled.backend] += 1
        for seed in (number, number + 1):
            answer = draw(compiled, seed)
            if answer is None:
                seen["unfinished"] += 1
                continue
            jsonschema.Draft202012Validator(schema, format_checker=CHECKER).validate(json.loads(answer))
            seen["valid"] += 1
    assert seen["xgrammar"] + seen["guidance"] + len(refusals) >= 200
    assert all(any(name in refusal for name in BEYOND_BOTH) for refusal in refusals), refusals
    assert min(seen["xgrammar"], seen["guidance"]) >= 80, seen
    assert seen["valid"] > 400, seen
    assert 0 < len(refusals) < 40


@pytest.mark.parametrize("schema", ILL_FORMED, ids=str)
def test_an_ill_formed_schema_is_refused_before_any_library_sees_it(schema: dict) -> None:
    with pytest.raises(RequestError, match="JSON schema") as error:
        check(StructuredOutputs(json=schema))
    assert error.value.field == "structured_outputs.json"
