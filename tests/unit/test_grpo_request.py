"""GRPO's rewards: what they give an answer, how they are requested, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows
from llama_stack_provider_trl.requests.bodies import PreferenceOptimizeRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs import reward_checks
from llama_stack_provider_trl.specs.job import DatasetRef, JobSpec, ShardingSpec
from llama_stack_provider_trl.specs.methods import GrpoSpec
from llama_stack_provider_trl.specs.reward_checks import matches, schema_problem, score
from llama_stack_provider_trl.specs.rewards import RewardSource, check_columns
from llama_stack_provider_trl.specs.rows import check_rows

EXACT = {"check": "exact", "column": "answer"}
SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "minimum": 1}}}


def spec_of(config: dict[str, Any], *, sharding: bool = False, data: Any = None, **options: Any) -> JobSpec:
    data = {"dataset_id": "prompts", "batch_size": 2, **(data or {})}
    body = PreferenceOptimizeRequest(
        job_uuid="job-1",
        model="org/base",
        training_config={"n_epochs": 1, "data_config": data},
        algorithm_config={"type": "grpo", **config},
    )
    many = {"sharding": ShardingSpec(), "max_ranks": 2} if sharding else {}
    settings = Settings(data_dir=Path("/data"), devices=("cpu",), **many)
    rows = DatasetRef(dataset_id="prompts", path=Path("/rows"), sha256="0" * 64, num_rows=4)
    spec = resolve(body, ProviderOptions.parse(options), settings).spec(rows, None)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    return spec


@pytest.mark.parametrize(
    ("fields", "answer", "expected"),
    [
        (EXACT, " 42\n", 1.0),
        (EXACT, "42.", 0.0),
        ({"check": "regex", "pattern": "[0-9]"}, "about 7", 1.0),
        ({"check": "regex", "pattern": "[0-9]"}, "seven", 0.0),
        ({"check": "regex", "pattern": "#### (.*)", "column": "answer"}, "6 * 7\n#### 42 ", 1.0),
        ({"check": "regex", "pattern": "#### (.*)", "column": "answer"}, "#### 43, or 42", 0.0),
        ({"check": "json"}, '{"a": 1}', 1.0),
        ({"check": "json"}, "NaN", 0.0),
        ({"check": "json", "column": "data"}, '{"b": [1.0, true], "a": null}', 1.0),
        ({"check": "json", "column": "data"}, '{"a": null, "b": [1, 1]}', 0.0),
        ({"check": "json", "column": "answer"}, "42", 1.0),
        ({"check": "json_schema", "json_schema": SCHEMA}, '{"n": 3}', 1.0),
        ({"check": "json_schema", "json_schema": SCHEMA}, '{"n": true}', 0.0),
        ({"check": "json_schema", "json_schema": SCHEMA}, "no JSON", 0.0),
    ],
)
def test_a_check_gives_an_answer_1_or_0(fields: dict[str, Any], answer: str, expected: float) -> None:
    (source,) = _sources(spec_of({"rewards": [fields]}))
    assert score(source, answer, {"answer": 42, "data": '{"a": null, "b": [1, true]}'}) == expected


@pytest.mark.parametrize("fields", [{"check": "regex"}, {"check": "json_schema"}])
def test_a_pattern_that_backtracks_without_end_does_not_pass(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_checks, "_SECONDS", 0.05)
    pattern = r"^(a|aa)+$"
    rule = {"pattern": pattern} if fields["check"] == "regex" else {"json_schema": {"not": {"pattern": pattern}}}
    (source,) = _sources(spec_of({"rewards": [{**fields, **rule}]}))
    assert score(source, json.dumps("a" * 90 + "!") if source.json_schema else "a" * 90 + "!", {}) == 0.0


def _sources(spec: JobSpec) -> tuple[RewardSource, ...]:
    assert isinstance(spec.method, GrpoSpec)
    return spec.method.rewards


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": ["string", "null"]}, ["", None], [1, {}]),
        ({"type": "number", "exclusiveMaximum": 2}, [1.5, -3], [2, True, "1"]),
        ({"enum": [1, "a"]}, [1.0, "a"], [True, "b"]),
        ({"const": [1, {"a": False}]}, [[1, {"a": False}]], [[1, {"a": 0}], [1]]),
        ({"type": "array", "items": {"maxLength": 1}, "minItems": 1}, [["a"], [9]], [[], ["ab"]]),
        ({"properties": {"a": {}}, "additionalProperties": False}, [{}, {"a": 1}], [{"b": 1}]),
        ({"anyOf": [{"pattern": "^x"}, {"minLength": 3}]}, ["x", "abc", 1], ["a"]),
        ({"not": {"type": "integer"}}, [1.5, "1"], [1, 2.0]),
    ],
)
def test_a_schema_holds_for_the_values_that_it_describes(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    assert schema_problem(schema) == ""
    assert [matches(value, schema) for value in valid] == [True] * len(valid)
    assert [matches(value, schema) for value in invalid] == [False] * len(invalid)


def test_a_method_gets_its_parameters_and_names_its_rewards_apart() -> None:
    regex = {"check": "regex", "pattern": "a"}
    spec = spec_of({"rewards": [EXACT, regex, {**regex, "weight": -0.5}], "num_generations": 4, "beta": 0.1})
    assert isinstance(spec.method, GrpoSpec)
    assert [(one.name, one.weight) for one in spec.method.rewards] == [("exact", 1), ("regex", 1), ("regex_2", -0.5)]
    assert (spec.method.num_generations, spec.method.loss_type, spec.kl_weight) == (4, "dapo", 0.1)
    assert (spec.algorithm, spec.sequences_per_row, spec.has_pairs) == ("grpo", 4, False)


@pytest.mark.parametrize(
    ("config", "options", "field", "words"),
    [
        ({}, {}, "rewards", "send at least one"),
        ({"rewards": [{}]}, {}, "rewards[0]", "either a check or a function"),
        ({"rewards": [{**EXACT, "function": "f"}]}, {}, "rewards[0]", "either a check or a function"),
        ({"rewards": [{"check": "exakt", "column": "a"}]}, {}, "rewards[0].check", "the nearest is 'exact'"),
        ({"rewards": [EXACT, {"check": "exact"}]}, {}, "rewards[1].column", "needs it"),
        ({"rewards": [{"check": "json", "pattern": "a"}]}, {}, "rewards[0].pattern", "does not read it"),
        ({"rewards": [{"check": "regex", "pattern": "("}]}, {}, "rewards[0].pattern", "no regular expression"),
        ({"rewards": [{**EXACT, "weight": 0}]}, {}, "rewards[0].weight", "teaches nothing"),
        ({"rewards": [{**EXACT, "code": "x"}]}, {}, "rewards[0].code", "Extra inputs"),
        ({"rewards": [{"model": "job:r"}]}, {}, "rewards[0].model", "are not supported"),
        ({"rewards": [{"function": "absent"}]}, {}, "rewards[0].function", "no installed package adds one"),
        (
            {"rewards": [{"check": "json_schema", "json_schema": {"items": {"$ref": "#"}}}]},
            {},
            "rewards[0].json_schema",
            "items.$ref is not among the supported keywords",
        ),
        ({"rewards": [EXACT], "loss_type": "dr_grpo"}, {}, "loss_type", "expected one of grpo, dapo"),
        ({"rewards": [EXACT], "scale_rewards": "std"}, {}, "scale_rewards", "expected one of group, batch, none"),
        ({"rewards": [EXACT], "epsilon": 0.2}, {}, "epsilon", "GRPO has no such field"),
        ({"rewards": [EXACT], "max_completion_length": 64}, {"max_seq_length": 64}, "max_completion_length", "prompt"),
        ({"rewards": [EXACT]}, {"reference_model": "org/b"}, "provider_options.reference_model", "as it begins"),
        ({"rewards": [EXACT]}, {"label_smoothing": 0.1}, "provider_options.label_smoothing", "smoothed labels"),
        ({"rewards": [EXACT]}, {"lora": {"quantize_base": True}}, "provider_options.lora.quantize_base", "4 bits"),
    ],
)
def test_what_grpo_cannot_do_is_refused_by_name(config: Any, options: Any, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        spec_of(config, **options)
    assert refused.value.field == (field if field.startswith("provider_options.") else f"algorithm_config.{field}")
    assert words in str(refused.value)


def test_several_processes_and_held_out_rows_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"nproc_per_node=2 .*trains in one process: send 1"):
        spec_of({"rewards": [EXACT]}, sharding=True, nproc_per_node=2)
    with pytest.raises(InvalidRequest, match=r"validation_dataset_id='more' .*on no held-out rows"):
        spec_of({"rewards": [EXACT]}, data={"validation_dataset_id": "more"})


def test_a_function_is_found_where_its_package_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "judges-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: judges\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[llama_stack_provider_trl.rewards]\npolite = judges:polite\n")
    monkeypatch.syspath_prepend(tmp_path)
    (source,) = _sources(spec_of({"rewards": [{"function": "polite", "weight": 2}]}))
    assert (source.name, source.function, source.weight) == ("polite", "polite", 2.0)
    assert "judges" not in sys.modules  # a service imports no code of a reward
    with pytest.raises(InvalidRequest, match="the nearest is 'polite'"):
        spec_of({"rewards": [{"function": "polit"}]})


def test_a_row_without_the_column_of_a_reward_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": None}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = _sources(spec_of({"rewards": [EXACT]}))
    with pytest.raises(InvalidRows, match="row 1: found the columns prompt, expected the column 'answer', which"):
        check_columns(sources, path)
    report = check_rows(rows, "grpo")
    assert (report.shapes, report.warnings) == ({"prompt": 2}, [])
