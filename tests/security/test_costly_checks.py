"""Checks of answers that would take all memory or time: refused by name when they are sent, and a failure of the check,
not a lack of memory, where a training meets one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows, JobFailure
from llama_stack_provider_trl.jobs.supervision.retries import backoff
from llama_stack_provider_trl.recipes.failures import classify
from llama_stack_provider_trl.specs import compiled_checks
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck, passes, reference, refuse_unusable
from llama_stack_provider_trl.specs.answer_rows import refuse_unchecked_rows
from llama_stack_provider_trl.specs.events import Reason
from llama_stack_provider_trl.specs.job import DatasetRef
from llama_stack_provider_trl.system.process import resident_memory

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
RECURSIVE = [
    *("(?R)?", "(?:a|(?R))*", "(?<x>(?&x)?)", "(?(DEFINE)(?<q>(?&q)|a))(?&q)", "(.|(?R))+", "(?P>n)(?P<n>(?P>n)?a)"),
    "(?P>n)(?P<n>(?P>n)?zq7)",
]
USEFUL = [
    *(r"\A\{(?:[^{}]|(?R))*\}\Z", r"(?<b>\((?:[^()]++|(?&b))*+\))", r"(?i)answer:\s*(\d+)", r"^(?:\w+\s?)+$"),
    *(r"(?s)<think>.*?</think>\s*\S", r"(?:\d{1,3},)*\d{3}", r"\p{L}+(?:['-]\p{L}+)*", "(?b)(?:answer){e<=2}"),
]
ENDLESS = [
    {"$ref": "#"},
    {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}},
    {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"not": {"$ref": "#/$defs/x"}}}},
]
BOUNDED: list[dict[str, Any]] = [
    {"$ref": "#/$defs/node", "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}}},
    {"multipleOf": 1e-300},
    {"enum": [*range(10_000)]},
    {"type": "string", "format": "regex"},
    {"minLength": 10**300, "maxItems": 10**300},
]


@pytest.mark.parametrize("pattern", RECURSIVE)
@pytest.mark.parametrize("kind", ["regex", "json_schema"])
def test_a_pattern_that_calls_itself_without_end_is_refused_by_name(pattern: str, kind: str) -> None:
    given: dict[str, Any] = {"pattern": pattern}
    given = given if kind == "regex" else {"json_schema": {"properties": {"a": given}}}
    checks = [AnswerCheck(type="regex", pattern="ok"), AnswerCheck.model_validate({"type": kind, "name": "b", **given})]
    before = resident_memory()
    with pytest.raises(InvalidRequest, match=r"takes all memory that it may have|takes more than") as caught:
        refuse_unusable(checks, "checks")
    assert caught.value.field == f"checks.1.{next(iter(given))}"
    assert resident_memory() - before < 64 << 20


@pytest.mark.parametrize("pattern", USEFUL)
def test_patterns_that_people_use_are_accepted(pattern: str) -> None:
    refuse_unusable([AnswerCheck(type="regex", pattern=pattern)], "checks")


@pytest.mark.parametrize("schema", ENDLESS, ids=["self", "circle", "not"])
def test_a_schema_that_refers_to_itself_without_end_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"\$ref in it leads back to itself without end") as caught:
        refuse_unusable([AnswerCheck(type="json_schema", json_schema=schema)], "checks")
    assert caught.value.field == "checks.0.json_schema"


def test_a_schema_that_takes_too_long_for_any_value_is_refused() -> None:
    branches: dict[str, Any] = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**branches, "d40": True}}
    with pytest.raises(InvalidRequest, match=r"to compare \{\} takes more than 1 s: make it shorter"):
        refuse_unusable([AnswerCheck(type="json_schema", json_schema=schema)], "checks")


@pytest.mark.parametrize("schema", BOUNDED, ids=["tree", "multipleOf", "enum", "format", "huge"])
def test_schemas_of_large_numbers_and_lists_are_compared_in_time(schema: dict[str, Any]) -> None:
    check = AnswerCheck(type="json_schema", json_schema=schema)
    refuse_unusable([check], "checks")
    for answer in ("[" * 900 + "]" * 900, "1e308", "9" * 4000, '{"next": ' * 400 + "1" + "}" * 400, '"a"'):
        assert passes(check, answer, reference(check, schema)) in (True, False)


def test_a_pattern_of_a_row_that_calls_itself_is_refused_by_its_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "form": one}) + "\n" for one in ("a", "(?R)?")))
    dataset = DatasetRef(dataset_id="forms", path=path, sha256="3" * 64, num_rows=2)
    with pytest.raises(InvalidRows, match=r"'forms', row 1: the pattern '\(\?R\)\?' takes (all mem|more than)"):
        refuse_unchecked_rows(dataset, [AnswerCheck(type="regex", column="form")])


@pytest.mark.parametrize("kind", ["regex", "json_schema"])
def test_a_pattern_that_takes_all_memory_in_a_training_is_its_own_fault_and_not_tried_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_checks, "TIMEOUT", 60.0)  # on a slow machine the time is over before the memory is
    given: Any = "(?R)?" if kind == "regex" else {"pattern": "(?R)?"}
    check = AnswerCheck.model_validate({"type": kind, "name": "b", ("pattern" if kind == "regex" else kind): given})
    with pytest.raises(JobFailure, match=r"the check 'b': its .* takes all memory that it may have: it rep") as caught:
        passes(check, '"a"', reference(check, given))
    failed = classify(caught.value)
    assert failed.reason is Reason.invalid_request
    assert backoff(failed.reason, 0) is None


def test_a_template_of_a_judge_writes_few_texts_out() -> None:
    judge = {"type": "judge", "model": "m"}
    refuse_unusable([AnswerCheck.model_validate({**judge, "template": "{prompt}{answer}" * 8})], "checks")
    with pytest.raises(InvalidRequest, match="it names texts 18 times, at most 16"):
        refuse_unusable([AnswerCheck.model_validate({**judge, "template": "{prompt}{answer}" * 9})], "checks")
