"""Checks of answers: what passes, what is refused by name, and that none takes long."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck, passes, reference, refuse_unusable

ORDER = {
    "type": "object",
    "properties": {"item": {"type": "string", "pattern": "^[a-z]+$"}, "count": {"$ref": "#/$defs/count"}},
    "required": ["item", "count"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer", "minimum": 1}},
}


def passed(answer: str, **check: Any) -> bool:
    """Whether an answer passes a check with a reference for all rows."""
    one = AnswerCheck.model_validate(check)
    refuse_unusable([one], "checks")
    return passes(one, answer, None if one.given is None else reference(one, one.given))


@pytest.mark.parametrize(
    ("answer", "check", "expected"),
    [
        ("Paris", {"type": "exact", "expected": "Paris"}, True),
        (" Paris", {"type": "exact", "expected": "Paris"}, False),
        (" PARIS \n\uff21", {"type": "exact", "expected": "paris a", "normalize": True}, True),
        ("Paris.", {"type": "exact", "expected": "paris", "normalize": True}, False),
        ("42", {"type": "exact", "expected": 42.0}, True),
        ("It is 12 EUR", {"type": "regex", "pattern": r"\d+ (EUR|USD)"}, True),
        ("It is 12 EUR", {"type": "regex", "pattern": r"\A\d+ (EUR|USD)\Z"}, False),
        ("[1, null]", {"type": "json"}, True),
        ("[1, NaN]", {"type": "json"}, False),
        ("[" * 90_000, {"type": "json"}, False),
        ('so: {"a": 1}', {"type": "json"}, False),
        ('so: {"a": {}} !', {"type": "json", "extract": True}, True),
        ("} no {", {"type": "json", "extract": True}, False),
        ('{"b": [1.0], "a": 1}', {"type": "json", "expected": {"a": 1, "b": [1]}}, True),
        ('{"a": true}', {"type": "json", "expected": '{"a": 1}'}, False),
        ('{"a": 1, "b": 2}', {"type": "json", "expected": {"a": 1}}, False),
        *(
            (answer, {"type": "json_schema", "json_schema": {"uniqueItems": True}}, expected)
            for answer, expected in (
                ('[1, true, "1", [1], {"a": 1}, null]', True),
                ("[1, 2, 1.0]", False),
                ('[{"a": 1, "b": [true]}, {"b": [true], "a": 1.0}]', False),
                ('["a", {}, []]', True),
            )
        ),
        ("1e999", {"type": "json_schema", "json_schema": {"multipleOf": 0.01}}, False),
        ("1" + "0" * 400, {"type": "json_schema", "json_schema": {"multipleOf": 0.01}}, False),
        ('{"item": "shirt", "count": 2}', {"type": "json_schema", "json_schema": ORDER}, True),
        ('{"item": "Shirt", "count": 2}', {"type": "json_schema", "json_schema": ORDER}, False),
        ('{"item": "shirt", "count": 0}', {"type": "json_schema", "json_schema": ORDER}, False),
        ('Yes: {"item": "shirt", "count": 2}', {"type": "json_schema", "json_schema": ORDER, "extract": True}, True),
    ],
)
def test_an_answer_passes_or_fails(answer: str, check: dict[str, Any], expected: bool) -> None:
    assert passed(answer, **check) is expected


def test_the_references_of_rows_may_be_texts() -> None:
    by_column = {"type": "json_schema", "column": "shape"}
    check = AnswerCheck.model_validate(by_column)
    assert passes(check, '{"item": "shirt", "count": 2}', reference(check, json.dumps(ORDER)))
    assert AnswerCheck(type="exact").reads_answers
    assert not AnswerCheck(type="exact", column="a").reads_answers


BRANCHES = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}


@pytest.mark.parametrize(
    "check",
    [
        {"type": "regex", "pattern": "^.(a|aa)+$"},
        {"type": "json_schema", "json_schema": {"pattern": "^(a|aa)+$"}},
        {
            **{"type": "json_schema"},
            "json_schema": {
                **{"$schema": "https://json-schema.org/draft/2020-12/schema", "$ref": "#/$defs/a"},
                "$defs": {"a": {"allOf": [True, {"$ref": "#/$defs/b"}]}, "b": {"pattern": "^(a|aa)+$"}},
            },
        },
        {"type": "json_schema", "json_schema": {"$ref": "#/$defs/d0", "$defs": {**BRANCHES, "d40": True}}},
    ],
    ids=["pattern", "pattern-of-a-schema", "pattern-behind-a-reference", "branches-of-a-schema"],
)
def test_a_check_that_would_not_end_is_given_up(check: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_stack_provider_trl.specs.compiled_checks.TIMEOUT", 0.05)
    one = AnswerCheck.model_validate(check)
    with pytest.raises(TimeoutError):
        passes(one, json.dumps("a" * 90 + "!"), reference(one, one.given))


@pytest.mark.parametrize(
    ("check", "field", "sentence"),
    [
        ({"type": "regex"}, "checks.1.pattern", "needs pattern for all rows, or the column"),
        ({"type": "regex", "pattern": "(a"}, "checks.1.pattern", "not a regular expression .missing"),
        ({"type": "regex", "pattern": "a", "expected": "b"}, "checks.1.expected", "has pattern, column: leave it out"),
        ({"type": "exact", "expected": "a", "column": "b"}, "checks.1.column", "send one of the two"),
        ({"type": "exact", "expected": ["a"]}, "checks.1.expected", "found a list, expected text"),
        ({"type": "regex", "pattern": "a", "expected": False}, "checks.1.expected", "leave it out"),
        ({"type": "exact", "extract": True}, "checks.1.extract", "has expected, column, normalize"),
        ({"type": "json", "expected": "{"}, "checks.1.expected", "text that is not JSON"),
        ({"type": "json", "expected": "null"}, "checks.1.expected", "found null"),
        ({"type": "json"}, "checks.1.name", "another check has this name"),
        ({"type": "json_schema"}, "checks.1.json_schema", "needs json_schema for all rows"),
        *(
            ({"type": "json_schema", "json_schema": schema}, "checks.1.json_schema", sentence)
            for schema, sentence in (
                ({"type": "text"}, "not a JSON schema: at type"),
                ({"items": {"pattern": "("}}, "not a regular expression"),
                ({"$defs": {"a": {"patternProperties": {"a": {}}}}}, "patternProperties, which is not supported"),
                ({"$ref": "http://127.0.0.1:1/a"}, "is not in the schema"),
                ({"not": {"$ref": "#/nowhere"}}, "'#/nowhere' is not in the schema"),
                ({"$schema": "http://json-schema.org/draft-07/schema#"}, "write it in draft 2020-12"),
                ({"enum": ["a" * 70_000]}, "at most 65536"),
                ({"const": "\ud800"}, "surrogates not allowed"),
                (
                    {"properties": {"a": {"$schema": "https://json-schema.org/draft/2020-12/schema", "pattern": "a"}}},
                    "it has .schema, which is not supported",
                ),
                ({"$ref": "#/x", "x": {"$schema": "https://json-schema.org/draft/2020-12/schema"}}, "it has .schema"),
                ({"$defs": {"a": {"unevaluatedProperties": False}}}, "unevaluatedProperties, which is not supported"),
                ({"type": [*range(5000), "a"]}, "a list of 5001 values that are mixed"),
                ({"$ref": "#/x", "x": {"pattern": 5}}, "not a JSON schema: at pattern"),
                ({"$ref": "#/x", "x": {"allOf": 5}}, "not a JSON schema: at allOf"),
                ({"$ref": "#/x", "x": {"$ref": 5}}, "not a JSON schema: at .ref"),
                ({"$ref": "#/x", "x": {"minimum": "a"}}, "not a JSON schema: at minimum"),
                ({"$ref": "#/x", "x": 5}, "not a JSON schema: at its top"),
                ({"$ref": "#/a/b", "a": 5}, "'#/a/b' is not in the schema"),
                (
                    {"allOf": [{"$ref": f"#/x/{n}"} for n in range(17)], "x": [{"minimum": n} for n in range(17)]},
                    "names more than 16 parts that are no schemas",
                ),
            )
        ),
    ],
)
def test_what_cannot_be_checked_is_refused_by_name(check: dict[str, Any], field: str, sentence: str) -> None:
    checks = [AnswerCheck(type="json"), AnswerCheck.model_validate(check)]
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        refuse_unusable(checks, "checks")
    assert caught.value.field == field


def test_a_schema_may_describe_a_property_that_is_named_as_a_keyword() -> None:
    schema = {"properties": {"patternProperties": {"type": "string"}, "$ref": {"type": "string", "pattern": r"\p{L}"}}}
    assert passed('{"patternProperties": "a", "$ref": "b"}', type="json_schema", json_schema=schema)
    assert not passed('{"$ref": "1"}', type="json_schema", json_schema=schema)
