"""Distillation as ordinary jobs: a teacher answers prompts, students learn its answers and are merged or an ensemble.

`expanded` turns the section `teacher_student` of a pipeline into requests. Nothing else knows of it: its jobs are
named, repeated and resumed like those that a pipeline writes out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.requests.bodies import algorithm_of
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.work import MOST_WEIGHT, EvaluateRequest, GenerateRequest

Json = dict[str, Any]
SECTION = "teacher_student"
"""Key of a pipeline."""
ANSWERS, STUDENT, MERGED, ENSEMBLE, SCORE = "answers", "student", "merged", "ensemble", "score"
"""Names of the jobs, or what they begin with."""
REQUIRED = ("teacher", "prompts", "held_out", "students")
OPTIONAL = ("student", "data", "result", "weights", "generate", "evaluate")
_CHOICES = {"data": ("full", "shards"), "result": ("merge", "ensemble", "students")}
"""Field -> its values, the default first."""
_DECIDED = {
    *("job_uuid", "model", "models", "dataset_id", "output", "algorithm", "reference_model", "checkpoint_dir"),
    "harness",
}
"""Fields of the jobs `generate` and `evaluate` that follow from the section, or have no place in it."""
_DEFAULTS: Json = {
    "algorithm_config": {"type": "LoRA"},
    "training_config": {"n_epochs": 1, "data_config": {"batch_size": 4, "shuffle": True}},
}
"""Of a student."""
_SEED = ProviderOptions.model_fields["seed"].default
_MOST = 64
"""Students: a merge has at most so many models."""


def expanded(section: Any) -> dict[str, Json]:
    """The jobs of a section: name -> request, in which `job:NAME` names jobs of the same pipeline. Raises
    InvalidRequest: names the field."""
    fields = _checked(section)
    students = {f"{STUDENT}-{number}": one for number, one in enumerate(_students(fields), 1)}
    jobs = {ANSWERS: _answers(fields), **students}
    weights = _weights(fields.get("weights"), len(students))
    models = [{"model": f"job:{name}", "weight": weight} for name, weight in zip(students, weights, strict=True)]
    if fields["result"] == "merge":
        jobs[MERGED] = {"kind": "merge", "models": models}
    measured: dict[str, Json] = {"teacher": {"model": fields["teacher"]}}
    measured |= {name: {"model": f"job:{name}"} for name in jobs if name != ANSWERS}
    if fields["result"] == "ensemble":
        measured[ENSEMBLE] = {"models": models}
    return {**jobs, **{f"{SCORE}-{name}": _score(fields, what) for name, what in measured.items()}}


def _checked(section: Any) -> Json:
    """The fields of a section, with their defaults."""
    if not isinstance(section, Mapping):
        raise InvalidRequest(SECTION, section, f"expected an object with {', '.join(REQUIRED)}")
    for name in section:
        if name not in REQUIRED + OPTIONAL:
            hint = f"there is no such field: it has {', '.join(REQUIRED + OPTIONAL)}"
            raise InvalidRequest(f"{SECTION}.{name}", section[name], hint)
    for name in REQUIRED:
        if not section.get(name) and name != "students":
            raise InvalidRequest(f"{SECTION}.{name}", section.get(name), _MEANING[name])
    for name in ("teacher", "prompts", "held_out"):
        if not isinstance(section[name], str):
            raise InvalidRequest(f"{SECTION}.{name}", section[name], _MEANING[name])
    fields = {**{name: values[0] for name, values in _CHOICES.items()}, **section}
    for name, values in _CHOICES.items():
        if fields[name] not in values:
            raise InvalidRequest(f"{SECTION}.{name}", fields[name], f"expected one of {', '.join(values)}")
    if "weights" in fields and fields["result"] == "students":
        hint = "students that are kept are not averaged: leave it out, or set result to merge or ensemble"
        raise InvalidRequest(f"{SECTION}.weights", fields["weights"], hint)
    return fields


_MEANING = {
    "teacher": "name who answers: a model id, a directory, or job:NAME of this file",
    "prompts": "name the registered dataset with the prompts",
    "held_out": "name the registered dataset on whose rows all are evaluated",
}


def _answers(fields: Json) -> Json:
    given = _job_fields("generate", fields, GenerateRequest)
    return {**given, "kind": "generate", "model": fields["teacher"], "dataset_id": fields["prompts"]}


def _score(fields: Json, what: Json) -> Json:
    """The evaluation of a model, or of the ensemble."""
    given = _job_fields("evaluate", fields, EvaluateRequest)
    if fields["result"] == "ensemble" and given.get("checks") is not None:
        hint = "answers are those of one model, and the students are an ensemble: leave it out, or set result to merge"
        raise InvalidRequest(f"{SECTION}.evaluate.checks", given["checks"], hint)
    return {**given, "kind": "evaluate", **what, "dataset_id": fields["held_out"]}


def _job_fields(name: str, fields: Json, request: type[BaseModel]) -> Json:
    """The fields that a section sets of its jobs of a kind."""
    given, known = _object(name, fields.get(name)), {*request.model_fields, "provider_options"} - _DECIDED
    if unknown := sorted(given.keys() - known):
        hint = f"it follows from the section, or does not exist: set {', '.join(sorted(known))}"
        raise InvalidRequest(f"{SECTION}.{name}.{unknown[0]}", given[unknown[0]], hint)
    return given


def _students(fields: Json) -> list[Json]:
    """The request of each student."""
    given, common = fields.get("students"), _object("student", fields.get("student"))
    hint = f"expected the number of students, 1 to {_MOST}, or a list of their requests"
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= _MOST:
        students = [_seeded(common, number) for number in range(given)]
        names = ["student"] * given
    elif isinstance(given, list) and 1 <= len(given) <= _MOST:
        names = [f"students.{number}" for number in range(len(given))]
        students = [_merged(common, _object(name, one)) for name, one in zip(names, given, strict=True)]
    else:
        raise InvalidRequest(f"{SECTION}.students", given, hint)
    found = [
        _student(f"{SECTION}.{name}", one, number, len(students), fields)
        for number, (name, one) in enumerate(zip(names, students, strict=True))
    ]
    if fields["result"] == "merge" and len(models := dict.fromkeys(one["model"] for one in found)) > 1:
        hint = "students of different models have other weights or vocabularies and cannot be averaged"
        raise InvalidRequest(f"{SECTION}.students", ", ".join(models), f"{hint}: set result to ensemble or students")
    return found


def _seeded(common: Json, number: int) -> Json:
    """The request of one of several students that differ in their seeds."""
    options = _object("student.provider_options", common.get("provider_options"))
    seed = options.get("seed", _SEED)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise InvalidRequest(f"{SECTION}.student.provider_options.seed", seed, "expected an integer")
    return {**common, "provider_options": {**options, "seed": seed + number}}


def _student(where: str, given: Json, number: int, count: int, fields: Json) -> Json:
    """The request of a student, with what the section decides."""
    request = _merged({name: value for name, value in _DEFAULTS.items() if name != "algorithm_config"}, given)
    request.setdefault("algorithm_config", _DEFAULTS["algorithm_config"])
    if not isinstance(request.get("model"), str):
        hint = "name the model that learns: a model id, a directory, or job:NAME of this file"
        raise InvalidRequest(f"{where}.model", request.get("model"), hint)
    if "kind" in request or algorithm_of(request) != "sft":
        hint = "a student learns the teacher's answers by SFT: set LoRA or QAT settings, or null for every weight"
        raise InvalidRequest(f"{where}.algorithm_config", request["algorithm_config"], hint)
    training = _object(f"{where}.training_config", request["training_config"])
    data = _object(f"{where}.training_config.data_config", training["data_config"])
    if "dataset_id" in data:
        hint = "a student learns the teacher's answers: leave it out, or write the job out under jobs"
        raise InvalidRequest(f"{where}.training_config.data_config.dataset_id", data["dataset_id"], hint)
    request["training_config"] = {**training, "data_config": {**data, "dataset_id": f"job:{ANSWERS}"}}
    request["provider_options"] = _options(where, request, number, count, fields)
    return request


def _options(where: str, request: Json, number: int, count: int, fields: Json) -> Json:
    options = _object(f"{where}.provider_options", request.get("provider_options"))
    if fields["data"] == "shards":
        if "shard" in options:
            hint = "data is shards, which gives each student its own: leave one of them out"
            raise InvalidRequest(f"{where}.provider_options.shard", options["shard"], hint)
        options["shard"] = {"index": number, "count": count}
    config = request["algorithm_config"]
    has_adapter = config is not None and str(config.get("type", "LoRA")).lower() == "lora"
    if has_adapter and fields["result"] == "merge" and not options.setdefault("merge_adapter", True):
        hint = "whole models are averaged: leave it out, or set result to students"
        raise InvalidRequest(f"{where}.provider_options.merge_adapter", False, hint)
    return options


def _weights(given: Any, count: int) -> list[float]:
    """The weights of an average, whose sum is 1."""
    hint = f"expected {count} numbers from 0 to {MOST_WEIGHT:g}, one for each student, of which one is more than 0"
    given = [1.0] * count if given is None else given
    if not isinstance(given, list) or len(given) != count:
        raise InvalidRequest(f"{SECTION}.weights", given, hint)
    for weight in given:
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 <= weight <= MOST_WEIGHT:
            raise InvalidRequest(f"{SECTION}.weights", weight, hint)
    if not (total := math.fsum(given)):
        raise InvalidRequest(f"{SECTION}.weights", given, hint)
    return [weight / total for weight in given]


def _object(name: str, given: Any) -> Json:
    """A copy of an object; of None an empty one."""
    if given is not None and not isinstance(given, Mapping):
        raise InvalidRequest(name if name.startswith(SECTION) else f"{SECTION}.{name}", given, "expected an object")
    return copy.deepcopy(dict(given or {}))


def _merged(common: Mapping[str, Any], changes: Mapping[str, Any]) -> Json:
    """An object with changes, within the objects in it too."""
    found = copy.deepcopy(dict(common))
    for name, value in changes.items():
        inner = found.get(name)
        if isinstance(inner, dict) and isinstance(value, Mapping):
            found[name] = _merged(inner, value)
        else:
            found[name] = copy.deepcopy(value)
    return found
