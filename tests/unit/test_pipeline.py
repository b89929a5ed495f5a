"""Files with several jobs: their order, their names, and what is submitted again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl_remote.service.jobs import pipeline_steps
from llama_stack_provider_trl_remote.service.jobs.pipeline_steps import JOBS, SECTION, digest_of, resolved, steps_of
from llama_stack_provider_trl_remote.submitting import KEYS, is_pipeline, place
from tests.unit.pipeline_service import Json, Service


def job(dataset_id: str = "rows", **changes: Any) -> Json:
    return {
        "model": "org/base",
        "training_config": {"n_epochs": 1, "data_config": {"dataset_id": dataset_id}},
        **changes,
    }


PIPELINE: Json = {
    "jobs": {
        "last": job(provider_options={"after": ["prefer", "tune"], "seed": 1}),
        "prefer": job("pairs", model="job:tune/checkpoint-4", algorithm_config={"type": "dpo"}),
        "tune": job(),
    }
}


def changed(name: str, **changes: Any) -> Json:
    jobs = {**PIPELINE["jobs"], name: {**PIPELINE["jobs"][name], **changes}}
    return {"jobs": jobs}


def test_jobs_are_submitted_in_the_order_in_which_they_depend_on_one_another() -> None:
    service = Service()
    placed = service.run(PIPELINE)
    assert [(one.name, one.is_new) for one in placed] == [("tune", True), ("prefer", True), ("last", True)]
    names = {one.name: one.job_uuid for one in placed}
    assert all(job_uuid.startswith(f"{name}-") and len(job_uuid) == len(name) + 13 for name, job_uuid in names.items())
    assert service.bodies[names["prefer"]]["model"] == f"job:{names['tune']}/checkpoint-4"
    options = service.bodies[names["last"]]["provider_options"]
    assert options == {"after": [names["prefer"], names["tune"]], "seed": 1}


def test_beside_a_model_finetuned_model_is_the_name_of_the_result() -> None:
    named = job(model="job:tune", finetuned_model="job:result")
    service = Service()
    tune, other = service.run({"jobs": {"tune": job(), "other": named}})
    assert service.bodies[other.job_uuid]["model"] == f"job:{tune.job_uuid}"
    assert service.bodies[other.job_uuid]["finetuned_model"] == "job:result"


def test_a_file_that_is_run_again_submits_nothing() -> None:
    service = Service()
    before = service.run(PIPELINE)
    service.states = dict.fromkeys(service.states, "completed")
    again = service.run(PIPELINE)
    assert [one.job_uuid for one in again] == [one.job_uuid for one in before]
    assert [(one.is_new, one.state) for one in again] == [(False, "completed")] * 3


@pytest.mark.parametrize(
    ("pipeline", "new"),
    [
        (changed("last", model="org/other"), {"last"}),
        (changed("prefer", algorithm_config={"type": "dpo", "beta": 0.2}), {"prefer", "last"}),
        (changed("tune", seed=3), {"tune", "prefer", "last"}),
    ],
)
def test_a_changed_request_makes_new_jobs_of_itself_and_of_what_depends_on_it(pipeline: Json, new: set[str]) -> None:
    service = Service()
    service.run(PIPELINE)
    assert {one.name for one in service.run(pipeline) if one.is_new} == new


def test_other_rows_make_new_jobs_too() -> None:
    service = Service()
    service.run(PIPELINE)
    service.rows["pairs"] = "c" * 64
    assert {one.name for one in service.run(PIPELINE) if one.is_new} == {"prefer", "last"}


@pytest.mark.parametrize(
    "given",
    [
        job(provider_options={"evaluate": {"dataset_id": "pairs"}}),
        job(
            hyperparam_search_config={
                "method": "grid",
                "parameters": {"training_config.data_config.dataset_id": ["rows", "pairs"]},
            }
        ),
        job(
            hyperparam_search_config={
                "method": "grid",
                "parameters": {"training_config.data_config": {"values": [{"validation_dataset_id": "pairs"}]}},
            }
        ),
    ],
)
def test_other_rows_of_an_evaluation_or_a_search_make_a_new_job(given: Json) -> None:
    service, pipeline = Service(), {"jobs": {"tune": given, "other": job()}}
    service.run(pipeline)
    assert not [one for one in service.run(pipeline) if one.is_new]
    service.rows["pairs"] = "c" * 64
    assert {one.name for one in service.run(pipeline) if one.is_new} == {"tune"}


def test_what_failed_is_submitted_again_with_what_waited_for_it_and_found_the_next_time() -> None:
    service = Service()
    tune, prefer, last = (one.job_uuid for one in service.run(PIPELINE))
    service.states |= {tune: "completed", prefer: "failed", last: "cancelled"}
    placed = service.run(PIPELINE)
    assert [(one.job_uuid, one.is_new) for one in placed] == [(tune, False), (f"{prefer}-2", True), (f"{last}-2", True)]
    assert service.bodies[f"{last}-2"]["provider_options"]["after"] == [f"{prefer}-2", tune]
    assert not [one for one in service.run(PIPELINE) if one.is_new]


def test_what_still_waits_for_a_job_that_failed_is_submitted_again() -> None:
    service = Service()
    tune, prefer, last = (one.job_uuid for one in service.run(PIPELINE))
    service.states[tune] = "failed"  # the supervisor has not ended those that wait for it yet
    placed = [(one.job_uuid, one.is_new) for one in service.run(PIPELINE)]
    assert placed == [(f"{tune}-2", True), (f"{prefer}-2", True), (f"{last}-2", True)]
    assert not [one for one in service.run(PIPELINE) if one.is_new]


def test_a_digest_depends_on_nothing_but_the_inputs() -> None:
    tune, prefer, _ = steps_of(PIPELINE)
    again = steps_of({"jobs": dict(reversed(PIPELINE["jobs"].items()))})[0]
    assert digest_of(tune, {"rows": 1}, {}) == digest_of(again, {"rows": 1}, {})
    assert digest_of(prefer, {"pairs": 1}, {"tune": "x"}) != digest_of(prefer, {"pairs": 1}, {"tune": "y"})
    assert resolved(tune, "t", {}) == {**tune.request, "job_uuid": "t"}


@pytest.mark.parametrize(
    ("pipeline", "why"),
    [
        ({"jobs": {}}, "expected an object: the name of each job"),
        ({"jobs": [job()]}, "expected an object: the name of each job"),
        ({"jobs": {"a": job()}, "service": {}}, "service='...' is not supported: a pipeline has the key 'jobs'"),
        ({"jobs": {"a b": job()}}, "a name has 1 to 100 letters"),
        ({"jobs": {"a": []}}, r"jobs\.a=.*expected an object: the request"),
        ({"jobs": {"a": job(job_uuid="x")}}, r"jobs\.a\.job_uuid='x'.*leave it out"),
        ({"jobs": {"a": job(model="job:typo")}}, r"jobs\.a\.model='job:typo'.*the jobs of this file are a"),
        ({"jobs": {"a": job(provider_options={"after": ["typo"]})}}, r"'typo' is no job of this file, which has a"),
        ({"jobs": {"a": job(provider_options={"after": "b"})}}, "expected a list of names"),
        ({"jobs": {"a": job(provider_options=[1])}}, r"jobs\.a\.provider_options=.*expected an object"),
        ({"jobs": {"a": job(model="job:a")}}, "a -> a.*these jobs wait for one another"),
        (
            {"jobs": {"a": job(model="job:b"), "b": job(provider_options={"after": ["a"]})}},
            "a -> b -> a.*these jobs wait for one another",
        ),
    ],
)
def test_a_pipeline_that_cannot_run_is_refused_by_name(pipeline: Json, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        steps_of(pipeline)


def test_a_dataset_that_is_not_registered_is_named_before_anything_is_submitted() -> None:
    service = Service()
    del service.rows["pairs"]
    with pytest.raises(InvalidRequest, match="datasets add FILE --id pairs"):
        service.run(PIPELINE)
    assert service.states == {}


def test_a_request_of_one_job_is_no_pipeline() -> None:
    assert not is_pipeline(job())
    assert is_pipeline(PIPELINE)
    assert KEYS == (JOBS, SECTION)


@pytest.mark.parametrize("kind", ["alone", "multi", "single"])
def test_models_that_grade_are_jobs_of_the_file(kind: str) -> None:
    def reward(model: str) -> Any:
        leaf = {"type": "score_model", "name": "a", "model": model, "input": [{"role": "user", "content": "job:x"}]}
        below = leaf if kind == "single" else {"a": leaf, "b": {"type": "string_check"}, "c": 3}
        grader = leaf if kind == "alone" else {"type": "multi", "name": "m", "graders": below}
        return {"check": {"type": "grader", "grader": grader}}

    config = {"type": "grpo", "rewards": [{"check": 3}, {"check": {"grader": 3}}, reward("job:judge/final")]}
    first, second = steps_of({"jobs": {"policy": job(algorithm_config=config), "judge": job()}})
    assert (first.name, second.after) == ("judge", ("judge",))
    sent = resolved(second, "policy-1", {"judge": "judge-1"})
    assert sent["algorithm_config"]["rewards"][2] == reward("job:judge-1/final")


def searched(path: str, values: Any) -> Json:
    return job(hyperparam_search_config={"method": "grid", "parameters": {path: values}})


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"kind": "merge", "models": [{"model": "org/a"}], "method": "ties", "base": "job:x"}, "base"),
        ({"kind": "merge", "models": [{"model": "org/a"}, {"model": "job:x/final"}]}, "models"),
        ({"kind": "generate", "model": "job:x/checkpoint-4", "dataset_id": "rows"}, "model"),
        ({"kind": "evaluate", "model": "org/a", "dataset_id": "job:x"}, "dataset_id"),
        ({"kind": "evaluate", "models": [{"model": "job:x"}], "dataset_id": "rows"}, "models"),
        (
            {
                "kind": "evaluate",
                "model": "org/a",
                "dataset_id": "rows",
                "checks": [{"type": "judge", "model": "job:x"}],
            },
            "checks",
        ),
        (job(model=None, finetuned_model="job:x"), "model"),
        (job("job:x"), "dataset_id"),
        (
            job(training_config={"data_config": {"dataset_id": "rows", "validation_dataset_id": "job:x"}}),
            "validation_dataset_id",
        ),
        (job(algorithm_config={"type": "grpo", "rewards": [{"model": "job:x"}]}), "algorithm_config.rewards"),
        (job(algorithm_config={"type": "distillation", "teacher": "job:x"}), "algorithm_config.teacher"),
        (
            job(provider_options={"method": {"type": "grpo", "rewards": [{"model": "job:x"}]}}),
            "algorithm_config.rewards",
        ),
        (
            job(provider_options={"method": {"type": "distillation", "teacher": "job:x"}}),
            "algorithm_config.teacher",
        ),
        (job(provider_options={"evaluate": {"dataset_id": "job:x"}}), "provider_options.evaluate.dataset_id"),
        (
            job(provider_options={"evaluate": {"dataset_id": "rows", "checks": [{"type": "judge", "model": "job:x"}]}}),
            "provider_options.evaluate.checks",
        ),
        (searched("model", ["org/a", "job:x"]), "hyperparam_search_config.parameters.model"),
        (
            searched("algorithm_config.teacher", {"values": ["job:x/merged"]}),
            "hyperparam_search_config.parameters.algorithm_config.teacher",
        ),
        (
            searched("algorithm_config.rewards", [[{"model": "job:x"}]]),
            "hyperparam_search_config.parameters.algorithm_config.rewards",
        ),
        (
            searched("training_config.data_config", [{"dataset_id": "job:x"}]),
            "hyperparam_search_config.parameters.training_config.data_config",
        ),
    ],
)
def test_every_field_that_names_a_job_names_one_of_the_file(given: Json, field: str) -> None:
    """It is a job before that one, is sent under its name on the service, and must be there."""
    pipeline = {"jobs": {"y": given, "x": job()}}
    before = json.dumps(pipeline)
    first, second = steps_of(pipeline)
    assert (first.name, second.name, second.after) == ("x", "y", ("x",))
    sent = json.dumps({key: value for key, value in resolved(second, "y-1", {"x": "x-1"}).items() if key != "job_uuid"})
    expected = dict(given)
    if given.get("kind") == "generate":
        expected["output"] = {"dataset_id": "y-1"}
    assert sent == json.dumps(expected).replace("job:x", "job:x-1")
    assert json.dumps(pipeline) == before
    del pipeline["jobs"]["x"]
    with pytest.raises(InvalidRequest) as caught:
        steps_of(pipeline)
    assert caught.value.field == f"jobs.y.{field}"


def test_no_value_is_put_into_as_many_objects_as_a_long_path_has_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 400 kB, of 200,000 parts and 15,000 values, held the thread of a token for hours."""
    read = list[Json]()
    plain = pipeline_steps._fields

    def counted(request: Json) -> Any:
        read.append(request)
        return plain(request)

    monkeypatch.setattr(pipeline_steps, "_fields", counted)
    (step,) = steps_of({"jobs": {"a": searched("a." * 100 + "model", ["job:gone"] * 1000)}})
    assert step.after == ()
    assert len(read) < 10


def test_a_search_over_names_of_the_result_names_no_job() -> None:
    (step,) = steps_of({"jobs": {"y": searched("finetuned_model", ["job:x"])}})
    assert step.after == ()


def test_the_evaluation_at_the_end_of_a_job_is_known_while_the_service_has_it() -> None:
    service = Service()
    pipeline = {"jobs": {"tune": job(provider_options={"evaluate": {"dataset_id": "exam"}})}}
    with pytest.raises(
        InvalidRequest, match=r"jobs\.tune\.dataset_id='exam' is not supported: no dataset of this name"
    ):
        service.run(pipeline)
    service.rows["exam"] = "c" * 64
    (tune,) = service.run(pipeline)
    assert tune.evaluation is None
    evaluation = f"{tune.job_uuid}-evaluation"
    service.states[evaluation], service.bodies[evaluation] = "scheduled", {}
    assert [(one.job_uuid, one.is_new, one.evaluation) for one in service.run(pipeline)] == [
        (tune.job_uuid, False, evaluation)
    ]
    service.rows["exam"] = "d" * 64
    assert service.run(pipeline)[0].is_new, "it is evaluated on other rows"


def test_the_client_sends_the_whole_file_in_one_request() -> None:
    sent: list[tuple[str, Json]] = []

    row = {"name": "a", "job_uuid": "a-1", "is_new": True, "state": "scheduled", "evaluation": None}

    class Client:
        async def submit(self, path: str, body: Json) -> Any:
            sent.append((path, body))
            return {"data": [row]}

    client: Any = Client()
    assert asyncio.run(place(client, PIPELINE)) == [row]
    assert sent == [("/v1/post-training/pipelines", PIPELINE)]
