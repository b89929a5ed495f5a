"""The section `teacher_student` of a pipeline: the jobs that it becomes, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.requests.work import EvaluateRequest, GenerateRequest, MergeRequest
from llama_stack_provider_trl_remote.service.jobs.pipeline_steps import steps_of
from llama_stack_provider_trl_remote.service.jobs.teacher_student import OPTIONAL, REQUIRED, expanded
from llama_stack_provider_trl_remote.submitting import is_pipeline
from tests.tiny import REPOSITORY
from tests.unit.pipeline_service import Service

Json = dict[str, Any]


def section(**changes: Any) -> Json:
    base = {"teacher": "org/large", "prompts": "rows", "held_out": "pairs", "students": 2}
    return {**base, "student": {"model": "org/small"}, **changes}


def test_students_of_a_number_learn_all_answers_with_seeds_of_their_own_and_are_averaged() -> None:
    jobs = expanded(section(student={"model": "org/small", "provider_options": {"seed": 7, "retries": 1}}))
    answers = {"kind": "generate", "model": "org/large", "dataset_id": "rows"}
    assert jobs["answers"] == answers
    first, second = jobs["student-1"], jobs["student-2"]
    assert first == {
        "model": "org/small",
        "algorithm_config": {"type": "LoRA"},
        "training_config": {
            "n_epochs": 1,
            "data_config": {"dataset_id": "job:answers", "batch_size": 4, "shuffle": True},
        },
        "provider_options": {"seed": 7, "retries": 1, "merge_adapter": True},
    }
    assert second == {**first, "provider_options": {"seed": 8, "retries": 1, "merge_adapter": True}}
    models = [{"model": "job:student-1", "weight": 0.5}, {"model": "job:student-2", "weight": 0.5}]
    assert jobs["merged"] == {"kind": "merge", "models": models}
    scores = {name: job["model"] for name, job in jobs.items() if job.get("kind") == "evaluate"}
    assert scores == {
        "score-teacher": "org/large",
        "score-student-1": "job:student-1",
        "score-student-2": "job:student-2",
        "score-merged": "job:merged",
    }
    assert {job["dataset_id"] for job in jobs.values() if job.get("kind") == "evaluate"} == {"pairs"}


def test_each_student_of_a_list_has_its_changes_and_its_shard() -> None:
    students = [{"training_config": {"n_epochs": 3}}, {"algorithm_config": None}, {"provider_options": {"seed": 1}}]
    jobs = expanded(section(students=students, data="shards", weights=[1, 0, 3]))
    found = [jobs[f"student-{number}"] for number in (1, 2, 3)]
    assert [one["training_config"]["n_epochs"] for one in found] == [3, 1, 1]
    assert [one["training_config"]["data_config"]["batch_size"] for one in found] == [4, 4, 4]
    assert [one["algorithm_config"] for one in found] == [{"type": "LoRA"}, None, {"type": "LoRA"}]
    assert [one["provider_options"] for one in found] == [
        {"shard": {"index": 0, "count": 3}, "merge_adapter": True},
        {"shard": {"index": 1, "count": 3}},
        {"seed": 1, "shard": {"index": 2, "count": 3}, "merge_adapter": True},
    ]
    assert [one["weight"] for one in jobs["merged"]["models"]] == [0.25, 0.0, 0.75]


def test_kept_students_may_have_other_models_and_adapters_only() -> None:
    students = [{"model": "org/a"}, {"model": "org/b"}]
    jobs = expanded(section(students=students, result="students", evaluate={"batch_size": 2}))
    assert "merged" not in jobs
    assert "merge_adapter" not in jobs["student-1"]["provider_options"]
    assert jobs["score-student-2"] == {
        "kind": "evaluate",
        "model": "job:student-2",
        "dataset_id": "pairs",
        "batch_size": 2,
    }


def test_an_ensemble_of_students_is_evaluated_in_place_of_their_merge() -> None:
    students = [{"model": "org/a"}, {"model": "org/b"}]
    jobs = expanded(section(students=students, result="ensemble", weights=[1, 3], evaluate={"batch_size": 2}))
    assert [name for name in jobs if "kind" in jobs[name]] == [
        *("answers", "score-teacher", "score-student-1", "score-student-2", "score-ensemble"),
    ]
    assert "merge_adapter" not in jobs["student-1"]["provider_options"]
    assert jobs["score-ensemble"] == {
        **{"kind": "evaluate", "dataset_id": "pairs", "batch_size": 2},
        "models": [{"model": "job:student-1", "weight": 0.25}, {"model": "job:student-2", "weight": 0.75}],
    }
    steps = {step.name: step.after for step in steps_of({"teacher_student": section(result="ensemble")})}
    assert steps["score-ensemble"] == ("student-1", "student-2")


def test_every_job_is_a_request_of_its_kind_once_it_has_names() -> None:
    jobs = expanded(section(generate={"max_new_tokens": 8, "temperature": 0}, evaluate={"max_seq_length": 64}))
    models = {"generate": GenerateRequest, "evaluate": EvaluateRequest, "merge": MergeRequest}
    for name, job in jobs.items():
        if "kind" in job:
            own = {"job_uuid": name, **({"output": {"dataset_id": name}} if job["kind"] == "generate" else {})}
            given = {**job, **own}
            models[given.pop("kind")].model_validate(given)


def test_the_same_section_is_the_same_jobs_and_what_changes_is_all_that_is_new() -> None:
    service = Service()
    training = {"model": "org/large", "training_config": {"n_epochs": 1, "data_config": {"dataset_id": "rows"}}}

    def run(**changes: Any) -> set[str]:
        pipeline = {"teacher_student": section(teacher="job:big", **changes), "jobs": {"big": training}}
        placed = service.run(pipeline)
        assert [one.name for one in placed][:2] == ["big", "answers"]
        service.states = dict.fromkeys(service.states, "completed")
        return {one.name for one in placed if one.is_new}

    assert len(run()) == 9
    assert run() == set()
    assert run(weights=[1, 2]) == {"merged", "score-merged"}
    scored = ("teacher", "student-1", "student-2", "merged")
    assert run(evaluate={"batch_size": 1}) == {f"score-{one}" for one in scored}
    # Students of an ensemble write no merged model, and so are other jobs than those of a merge.
    kept = {"student": {"model": "org/small", "algorithm_config": None}}
    assert "merged" in run(**kept)
    assert run(**kept, result="ensemble") == {"score-ensemble"}
    assert run(**kept, result="ensemble") == set()
    student = next(body for name, body in service.bodies.items() if name.startswith("student-1-"))
    assert student["training_config"]["data_config"]["dataset_id"].startswith("job:answers-")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"teacher": None}, r"teacher_student\.teacher=None.*name who answers"),
        ({"prompts": 3}, r"teacher_student\.prompts=3.*registered dataset with the prompts"),
        ({"held_out": ""}, r"teacher_student\.held_out=''.*on whose rows"),
        ({"student": {}}, r"teacher_student\.student\.model=None.*name the model that learns"),
        ({"students": 0}, r"teacher_student\.students=0.*1 to 64"),
        ({"students": []}, r"teacher_student\.students=\[\].*1 to 64"),
        ({"students": True}, r"teacher_student\.students=True.*1 to 64"),
        ({"students": [{"model": "a"}, {"model": "b"}]}, "='a, b'.*other weights or vocabularies"),
        ({"students": [{}, 3]}, r"teacher_student\.students\.1=3.*expected an object"),
        ({"weights": [1]}, r"teacher_student\.weights=\[1\].*expected 2 numbers"),
        ({"weights": [1, -1]}, r"teacher_student\.weights=-1.*from 0"),
        ({"weights": [1, float("nan")]}, r"teacher_student\.weights=nan"),
        ({"weights": [1, 10**400]}, r"teacher_student\.weights=1000.*to 1e\+06"),
        ({"weights": [0, 0]}, r"teacher_student\.weights=\[0, 0\].*one is more"),
        ({"weights": [1, 1], "result": "students"}, "students that are kept are not averaged"),
        ({"result": "ensemble", "evaluate": {"checks": [{}]}}, r"teacher_student\.evaluate\.checks=.*one model"),
        ({"result": "ensemble", "weights": [1]}, r"teacher_student\.weights=\[1\].*expected 2 numbers"),
        ({"evaluate": {"models": []}}, r"teacher_student\.evaluate\.models=.*follows from the section"),
        ({"result": "best"}, "expected one of merge, ensemble, students"),
        ({"data": "half"}, r"teacher_student\.data='half'.*full, shards"),
        ({"judge": "x"}, r"teacher_student\.judge='x'.*there is no such field"),
        ({"generate": {"model": "x"}}, r"teacher_student\.generate\.model='x'.*follows from the section"),
        ({"evaluate": {"top_k": 1}}, r"teacher_student\.evaluate\.top_k=1"),
        ({"evaluate": 3}, r"teacher_student\.evaluate=3.*expected an object"),
        ({"student": {"model": "m", "algorithm_config": {"type": "dpo"}}}, "by SFT"),
        ({"student": {"model": "m", "kind": "merge"}}, "by SFT"),
        ({"student": {"model": "m", "training_config": {"data_config": {"dataset_id": "d"}}}}, "leave it out"),
        ({"student": {"model": "m", "training_config": {"data_config": 3}}}, r"data_config=3.*an object"),
        ({"student": {"model": "m", "provider_options": {"merge_adapter": False}}}, "whole models are averaged"),
        ({"student": {"model": "m", "provider_options": {"seed": "x"}}}, "expected an integer"),
        ({"student": {"model": "m", "provider_options": {"shard": {}}}, "data": "shards"}, "gives each student"),
        ({"teacher": "job:typo"}, r"jobs\.answers\.model='job:typo'.*the jobs of this file are"),
    ],
)
def test_a_section_that_cannot_be_honoured_is_refused_by_name(changes: Json, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        steps_of({"teacher_student": section(**changes)})


def test_a_section_may_stand_alone_and_its_names_are_taken() -> None:
    assert is_pipeline({"teacher_student": section()})
    with pytest.raises(InvalidRequest, match="expected an object with teacher"):
        steps_of({"teacher_student": []})
    with pytest.raises(InvalidRequest, match=r"jobs\.student-1=.*has a job of this name"):
        steps_of({"teacher_student": section(), "jobs": {"student-1": {"model": "m"}}})


def test_the_documented_fields_are_those_of_the_section() -> None:
    text = (REPOSITORY / "docs" / "how-to" / "distillation.md").read_text()
    table = text.split("<!-- teacher_student -->")[1].split("<!-- /teacher_student -->")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == REQUIRED + OPTIONAL
