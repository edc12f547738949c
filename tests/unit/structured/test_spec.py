"""What StructuredOutputs takes, and what it says of the rest."""

from __future__ import annotations

import pytest

from octavo.errors import RequestError
from octavo.sampling.params import SamplingParams
from octavo.structured import spec
from octavo.structured.spec import StructuredOutputs


def test_a_schema_is_kept_as_text_in_the_order_of_its_keys() -> None:
    assert StructuredOutputs(json={"type": "object", "$id": "ü"}).json == '{"type": "object", "$id": "ü"}'
    assert StructuredOutputs(json='{"b":1,"a":2}').json == '{"b":1,"a":2}'


def test_choices_are_a_tuple_without_repetition() -> None:
    assert StructuredOutputs(choice=["b", "a", "b"]).choice == ("b", "a")  # type: ignore[arg-type]


def nested(depth: int) -> dict:
    out: dict = {}
    for _ in range(depth):
        out = {"not": out}
    return out


@pytest.mark.parametrize(
    ("given", "field", "says"),
    [
        ({}, "", "exactly one of"),
        ({"regex": "a", "json": "{}"}, "", "json and regex"),
        ({"json": "{"}, "json", "not JSON"),
        ({"json": "[]"}, "json", "object"),
        ({"json": '{"a": NaN}'}, "json", "NaN"),
        ({"json": {"a": {1, 2}}}, "json", "not JSON"),
        ({"json": {"a": "\ud800"}}, "json", "surrogate"),
        ({"json": nested(70)}, "json", "64 levels"),
        ({"json": '{"a":' * 5000 + "1" + "}" * 5000}, "json", "64 levels"),
        ({"json": '{"a": "' + "x" * spec.MAX_BYTES + '"}'}, "json", "bytes"),
        ({"structural_tag": nested(90)}, "structural_tag", "80 levels"),
        ({"regex": ""}, "regex", "not empty"),
        ({"regex": "a\0b"}, "regex", "NUL"),
        ({"grammar": 5}, "grammar", "text"),
        ({"choice": []}, "choice", "not empty"),
        ({"choice": [""]}, "choice", "not empty"),
        ({"choice": "abc"}, "choice", "list"),
        ({"choice": list(map(str, range(spec.MAX_CHOICES + 1)))}, "choice", "at most"),
        ({"json_object": False}, "json_object", "true"),
        ({"regex": "a", "backend": "outlines"}, "backend", "one of"),
        ({"json": "{}", "whitespace_pattern": " ", "disable_any_whitespace": True}, "whitespace_pattern", "together"),
        ({"json": "{}", "disable_any_whitespace": "yes"}, "disable_any_whitespace", "true or false"),
    ],
)
def test_what_is_wrong_is_named(given: dict, field: str, says: str) -> None:
    with pytest.raises(RequestError, match=says) as error:
        StructuredOutputs(**given)
    assert error.value.field == ("structured_outputs." + field).removesuffix(".")


def test_sampling_params_take_only_a_spec() -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    assert error.value.field == "structured_outputs"
