"""Several jobs of one file, in the order in which they depend on one another, each under a name that its inputs decide.

A pipeline is `{"jobs": {NAME: REQUEST, ...}}`, with a section `teacher_student` beside the jobs or in their place. In a
request, `after`, the evaluations of `promote_if` and every `job:NAME` name jobs of the file: a base model, rows, what
is merged or averaged, judges, reward models, teachers, and such values of a search. The job_uuid of each is its name
with a digest of its request, of the rows that it names and of the jobs before it. So what was trained already is found
by its name, and is not trained again.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.decisions.graph import cycle
from llama_stack_provider_trl.requests.work import KINDS
from llama_stack_provider_trl.system.texts import json_digest

from .teacher_student import SECTION, expanded

Json = dict[str, Any]
JOBS = "jobs"
"""Key of a file that makes it a pipeline."""
MOST = 256
"""Jobs of a pipeline: more than a distillation of 64 students has."""
_PREFIX = "job:"
_ROWS, _OTHER_ROWS = "dataset_id", "validation_dataset_id"
_SEARCH = "hyperparam_search_config"
_Field = tuple[str, Any, Any]
"""A field's name, the object or list that has its value, and the key or number of it there."""
_DEEPEST = 16
"""Parts of the path of a searched field: none lies deeper. Each value is put into as many objects, which took hours
with a path of 200,000 parts."""
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"


@dataclass(frozen=True)
class PipelineJob:
    name: str
    request: Json
    after: tuple[str, ...]
    """Jobs of the file before it."""
    dataset_ids: tuple[str, ...]


def steps_of(body: Mapping[str, Any]) -> list[PipelineJob]:
    """The jobs of a pipeline, each after those that it depends on. Raises InvalidRequest: names the job and the
    field."""
    jobs = _jobs(body)
    if len(jobs) > MOST:
        raise InvalidRequest(JOBS, len(jobs), f"expected at most {MOST} jobs: divide the pipeline")
    steps = {name: _step(name, request, jobs.keys()) for name, request in jobs.items()}
    if found := cycle({name: step.after for name, step in steps.items()}):
        raise InvalidRequest(
            JOBS, " -> ".join(found), "these jobs wait for one another: leave one of them out of `after`"
        )
    ordered: list[PipelineJob] = []
    while len(ordered) < len(steps):
        done = {step.name for step in ordered}
        ordered += [step for step in steps.values() if step.name not in done and done.issuperset(step.after)]
    return ordered


def _jobs(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The jobs of a pipeline, those of its section `teacher_student` among them."""
    if unknown := sorted(body.keys() - {JOBS, SECTION}):
        raise InvalidRequest(unknown[0], "...", f"a pipeline has the key {JOBS!r} or {SECTION!r}, and no other")
    jobs = body.get(JOBS)
    if not isinstance(jobs, Mapping) or not jobs:
        if jobs is not None or SECTION not in body:
            raise InvalidRequest(JOBS, jobs, "expected an object: the name of each job, and its request")
        jobs = {}
    found = expanded(body[SECTION]) if SECTION in body else {}
    if taken := [name for name in jobs if name in found]:
        hint = f"{SECTION} has a job of this name: choose another one"
        raise InvalidRequest(f"{JOBS}.{taken[0]}", "...", hint)
    return {**found, **jobs}


def digest_of(step: PipelineJob, rows: Mapping[str, Any], before: Mapping[str, str]) -> str:
    """The digest of a job's inputs.

    Args:
        rows: dataset -> what identifies its rows.
        before: job of the file -> its digest.
    """
    document = [
        step.request,
        {name: rows[name] for name in step.dataset_ids},
        {name: before[name] for name in step.after},
    ]
    return json_digest(document)


def resolved(step: PipelineJob, job_uuid: str, names: Mapping[str, str]) -> Json:
    """The request as the service takes it."""
    request = copy.deepcopy(step.request)
    request["job_uuid"] = job_uuid

    def as_on_service(_: str, value: str) -> str:
        named = _named(value)
        return f"{_PREFIX}{names[named]}{value.removeprefix(_PREFIX + named)}"

    _replace_names(request, as_on_service)
    if "output" in _known_fields(request):
        request.setdefault("output", {"dataset_id": job_uuid})
    options = request.get("provider_options") or {}
    if options.get("after"):
        request["provider_options"] = {**options, "after": [names[name] for name in options["after"]]}
    for _, condition, key in _evaluations(request):
        condition[key] = names[condition[key]]
    return request


def _step(name: str, request: Any, names: Any) -> PipelineJob:
    where = f"{JOBS}.{name}"
    if not re.fullmatch(_NAME, name):
        hint = "a name has 1 to 100 letters, digits, '.', '_' or '-', and begins with a letter or digit"
        raise InvalidRequest(JOBS, name, hint)
    if not isinstance(request, Mapping):
        raise InvalidRequest(where, request, "expected an object: the request of a job")
    if "job_uuid" in request:
        raise InvalidRequest(f"{where}.job_uuid", request["job_uuid"], "it follows from the job's name: leave it out")
    after = _after(where, request, names)
    named: list[str] = []

    def collect(field: str, value: str) -> str:
        if (other := _named(value)) not in names:
            hint = f"the jobs of this file are {', '.join(names)}"
            raise InvalidRequest(f"{where}.{field}", f"{_PREFIX}{other}", hint)
        named.append(other)
        return value

    _replace_names(copy.deepcopy(dict(request)), collect)
    for field, condition, key in _evaluations(dict(request)):
        if condition[key] not in names:
            hint = f"{condition[key]!r} is no job of this file, which has {', '.join(names)}"
            raise InvalidRequest(f"{where}.{field}", condition[key], hint)
        named.append(condition[key])
    return PipelineJob(name, dict(request), tuple(dict.fromkeys([*named, *after])), _dataset_ids(dict(request)))


def _after(where: str, request: Mapping[str, Any], names: Any) -> list[str]:
    options = request.get("provider_options") or {}
    if not isinstance(options, Mapping):
        raise InvalidRequest(f"{where}.provider_options", options, "expected an object")
    after = options.get("after") or []
    if not isinstance(after, list) or not all(isinstance(one, str) for one in after):
        raise InvalidRequest(f"{where}.provider_options.after", after, "expected a list of names of jobs")
    for one in after:
        if one not in names:
            hint = f"{one!r} is no job of this file, which has {', '.join(names)}"
            raise InvalidRequest(f"{where}.provider_options.after", after, hint)
    return after


def _evaluations(request: Json) -> list[_Field]:
    """The fields of conditions that name evaluations. None of a form that the service refuses."""
    conditions = request.get("promote_if") if "promote_if" in _known_fields(request) else None
    return [
        (f"promote_if.{number}.{key}", condition, key)
        for number, condition in enumerate(conditions if isinstance(conditions, list) else ())
        if isinstance(condition, dict)
        for key in ("evaluation", "against")
        if isinstance(condition.get(key), str)
    ]


def _known_fields(request: Json) -> Container[str]:
    """The fields that a job of a request's kind has; empty: it trains, or there is no such kind."""
    kind = request.get("kind")
    return KINDS[kind].model_fields if isinstance(kind, str) and kind in KINDS else ()


def _named(value: str) -> str:
    """The job in `job:NAME` or `job:NAME/CHECKPOINT`."""
    return value.removeprefix(_PREFIX).partition("/")[0]


def _replace_names(request: Json, change: Callable[[str, str], str]) -> None:
    """Replace every value of a request that names a job.

    Args:
        change: field, value -> the value in its place.
    """
    for field, holder, key in [*_fields(request), *_searched(request)]:
        value = holder[key]
        if isinstance(value, str) and value.startswith(_PREFIX):
            holder[key] = change(field, value)


def _fields(request: Json) -> list[_Field]:
    """The fields that may name a job. None of a part of another form than expected, which the service refuses."""
    known, data, then = _known_fields(request), _data_of(request), evaluation_of(request)
    # Beside a `model`, `finetuned_model` names the result.
    single = [("model", request, "finetuned_model" if request.get("model") is None else "model")]
    single += [(name, data, name) for name in (_ROWS, _OTHER_ROWS)]
    single += [("base", request, "base")] if "base" in known else []
    single += [("algorithm_config.teacher", _method(request), "teacher")]
    single += [(f"provider_options.evaluate.{_ROWS}", then, _ROWS)]
    lists = {
        **{name: request.get(name) for name in ("models", "checks") if name in known},
        "algorithm_config.rewards": _method(request).get("rewards"),
        "provider_options.evaluate.checks": then.get("checks"),
    }
    several = [
        (field, one, "model")
        for field, given in lists.items()
        if isinstance(given, list)
        for one in given
        if isinstance(one, dict)
    ]
    several += [("algorithm_config.rewards", one, "model") for one in _graders(_method(request).get("rewards"))]
    options = request.get("provider_options")
    mixture = options.get("mixture") if isinstance(options, Mapping) else None
    mixed = [one for one in mixture if isinstance(one, dict)] if isinstance(mixture, list) else []
    several += [(f"provider_options.mixture.{_ROWS}", one, _ROWS) for one in mixed]
    return [(field, holder, key) for field, holder, key in [*single, *several] if key in holder]


def _graders(rewards: Any) -> list[Json]:
    """The graders of rewards that may name a model."""
    found: list[Json] = []
    for reward in rewards if isinstance(rewards, list) else ():
        check = reward.get("check") if isinstance(reward, dict) else None
        grader = check.get("grader") if isinstance(check, dict) else None
        below = grader.get("graders") if isinstance(grader, dict) else None
        found += [one for one in (grader, below) if isinstance(one, dict)]  # one of type multi may have a single grader
        found += [one for one in below.values() if isinstance(one, dict)] if isinstance(below, dict) else []
    return found


def _searched(request: Json) -> list[_Field]:
    """The same of the values that a search has for such fields."""
    config = request.get(_SEARCH)
    parameters = config.get("parameters") if isinstance(config, dict) else None
    found: list[_Field] = []
    for path, given in parameters.items() if isinstance(parameters, dict) else ():
        values = given.get("values") if isinstance(given, dict) else given
        if not isinstance(values, list) or (path == "finetuned_model" and request.get("model") is not None):
            continue
        *above, key = str(path).split(".", _DEEPEST)
        if len(above) == _DEEPEST:
            continue  # the service refuses it
        for number, value in enumerate(values):
            holder: Json = {key: value}
            trial = holder
            for part in reversed(above):
                trial = {part: trial}
            where = f"{_SEARCH}.parameters.{path}"
            for _, one, name in _fields(trial):
                is_value = one is holder and name == key
                found.append((where, values, number) if is_value else (where, one, name))
    return found


def _method(request: Mapping[str, Any]) -> dict[str, Any]:
    """What `algorithm_config`, or the provider option `method`, has."""
    options = request.get("provider_options")
    method = options.get("method") if isinstance(options, Mapping) else None
    fields = method or request.get("algorithm_config")
    return fields if isinstance(fields, dict) else {}


def evaluation_of(request: Mapping[str, Any]) -> Json:
    """The provider option `evaluate`."""
    options = request.get("provider_options")
    then = options.get("evaluate") if isinstance(options, Mapping) else None
    return then if isinstance(then, dict) else {}


def _data_of(request: Json) -> Json:
    """The part of a request that names its datasets; empty where it is of another form, which the service refuses."""
    if "kind" in request:
        return request
    training = request.get("training_config")
    data = training.get("data_config") if isinstance(training, Mapping) else None
    return data if isinstance(data, dict) else {}


def _dataset_ids(request: Json) -> tuple[str, ...]:
    """The registered datasets of a request: to train on, to evaluate on, of an evaluation after it, and those that a
    search tries."""
    found = [
        holder[key]
        for field, holder, key in [*_fields(request), *_searched(request)]
        if (key if isinstance(key, str) else field.rpartition(".")[2]) in (_ROWS, _OTHER_ROWS)
    ]
    return tuple(dict.fromkeys(one for one in found if isinstance(one, str) and not one.startswith(_PREFIX)))
