"""The service's paths and the node's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.specs.event_fields import UsablePath
from llama_stack_provider_trl.specs.events import CHECKPOINT_PATHS, Event
from llama_stack_provider_trl.specs.job import AttemptSpec, DpoSpec
from llama_stack_provider_trl.specs.model_source import ModelSource, ReferenceSpec
from llama_stack_provider_trl_remote.nodes.localize import PathMap, check_order
from tests.orders import AA, BB, order, spec

CC, DD = "c" * 64, "d" * 64

RESUMED = spec(
    resume_from="/service/checkpoints/job/checkpoint-6",
    fall_back_to=["/service/checkpoints/job/checkpoint-3", "/service/jobs/job/resume/3f/checkpoint-2"],
    job={
        "validation": {"dataset_id": "v", "path": f"/service/datasets/{BB}.jsonl", "sha256": BB, "num_rows": 1},
        "mixed_with": [
            {
                name: {"dataset_id": "w", "path": f"/service/datasets/{digest}.jsonl", "sha256": digest, "num_rows": 1}
                for name, digest in (("dataset", CC), ("validation", DD))
            }
        ],
        "resume_from": {"job_uuid": "other", "path": "/service/jobs/job/resume/3f/checkpoint-2"},
        "token_cache": "/service/tokens",
        "method": DpoSpec(
            reference=ReferenceSpec(
                source=ModelSource(model="/models/other", path=Path("/service/other")),
                precompute=True,
                cache=Path("/service/reference"),
            )
        ).model_dump(mode="json"),
        "path": "/service/model",
    },
)


def test_every_path_of_a_spec_becomes_the_nodes_own() -> None:
    places = PathMap(order(spec=RESUMED, shared_mark="/service/checkpoints/job/.shared"), Path("/node"))
    found = places.spec().model_dump(mode="json")
    assert found["turn"] is None  # a mark that is not seen here would end the attempt
    assert "/service" not in json.dumps(found)
    assert found["run_dir"] == str(places.run_dir) == "/node/jobs/job/attempts/1"
    assert found["job"]["checkpoint_dir"] == "/node/jobs/job/checkpoints"
    assert found["job"]["data"]["dataset"]["path"] == f"/node/datasets/{AA}.jsonl"
    assert found["job"]["data"]["validation"]["path"] == f"/node/datasets/{BB}.jsonl"
    (other,) = found["job"]["data"]["mixed_with"]
    assert other["dataset"]["path"] == f"/node/datasets/{CC}.jsonl"
    assert other["validation"]["path"] == f"/node/datasets/{DD}.jsonl"
    assert found["resume_from"] == "/node/jobs/job/checkpoints/checkpoint-6"
    borrowed = "/node/jobs/job/borrowed/checkpoint-2"
    assert found["fall_back_to"] == ["/node/jobs/job/checkpoints/checkpoint-3", borrowed]
    assert found["job"]["resume_from"]["path"] == borrowed
    assert found["job"]["data"]["token_cache"] == "/node/tokens"
    assert found["job"]["train"]["method"]["reference"]["cache"] == "/node/reference"
    fetched = {"org/model": Path("/node/models/0a"), "/models/other": Path("/node/models/0b")}
    found = places.spec(models=fetched).model_dump(mode="json")
    assert (found["job"]["source"]["model"], found["job"]["source"]["path"]) == ("org/model", "/node/models/0a")
    assert found["job"]["train"]["method"]["reference"]["source"]["path"] == "/node/models/0b"
    assert order(spec=RESUMED).spec == RESUMED  # the order itself is left alone


def test_the_spec_above_sets_every_path_that_a_spec_may_have() -> None:
    assert {".".join(names) for names in paths_of(AttemptSpec)} == {
        *("run_dir", "turn", "resume_from", "fall_back_to", "job.checkpoint_dir", "job.resume_from.path"),
        *("job.data.dataset.path", "job.data.validation.path", "job.data.token_cache"),
        *("job.data.mixed_with.dataset.path", "job.data.mixed_with.validation.path"),
        *("job.source.path", "job.train.method.reference.source.path", "job.train.method.reference.cache"),
        *("job.adapter.path", "job.train.method.rewards.model.source.path"),
        *("job.train.method.rewards.model.base.path", "job.work.merge.inputs.path", "job.work.merge.base.path"),
        *("job.train.method.rewards.grading.path", "job.train.method.rewards.grading.adapter.path"),
        *("job.work.members.path", "job.work.members.adapter.path"),
        *("job.work.answers.judges.path", "job.work.answers.judges.adapter.path"),
        "job.work.merge.output",  # which a job does not use: the name of a directory in its own
        # No order has these: the last tests.
        *("job.work.harness.roots", "job.work.vllm_python", "job.work.answers.vllm_python"),
        "job.train.method.vllm.python",
    }


def test_an_order_for_a_job_that_merges_an_adapter_first_is_refused() -> None:
    adapter = {"model": "/service/checkpoints/a/final", "use": "continue"}
    check_order(order(spec=spec(job={"adapter": adapter})))
    with pytest.raises(InvalidRequest, match="one that is merged is merged on the service's machine"):
        check_order(order(spec=spec(job={"adapter": {**adapter, "use": "merge"}})))


def test_an_order_for_a_job_that_reads_files_of_the_operator_is_refused() -> None:
    sampling = {"max_new_tokens": 4, "temperature": 1.0, "top_p": 1.0, "seed": 1, "samples_per_prompt": 1}
    checked = {**sampling, "checks": [{"type": "json"}]}
    generate = {"kind": "generate", "output_dataset_id": "d", **sampling}
    merge = {"inputs": [{"model": "a", "weight": 1.0}], "output": "merging"}
    allowed: list[dict[str, Any]] = [
        {"kind": "evaluate"},
        {"kind": "evaluate", "answers": checked},
        {"kind": "evaluate", "answers": {**checked, "judges": [{"model": "a"}]}},
        {"kind": "evaluate", "members": [{"model": "a", "weight": 1.0}]},
        {"kind": "merge", "of_adapters": False, "merge": merge},
        generate,
    ]
    for work in allowed:
        check_order(order(spec=spec(job={"work": work, "batch_size": 4})))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"kind": "evaluate", "harness": {"tasks": ["a"]}}, "tasks of a harness are on the service's machine"),
        ({"kind": "evaluate", "answers": {**checked, "vllm_python": "/bin/sh"}}, "vLLM answers on the service's"),
        ({**generate, "vllm_python": "/bin/sh"}, "vLLM answers on the service's machine"),
    ]
    for work, why in refused:
        with pytest.raises(InvalidRequest, match=why):
            check_order(order(spec=spec(job={"work": work})))
    for wrong in ({"kind": "evaluate", "from_jobs": ["/etc"]}, "evaluate"):
        with pytest.raises(InvalidRequest, match=r"spec\.job\.work"):
            check_order(order(spec=spec(job={"work": wrong})))


@pytest.mark.parametrize("wrong", [None, "some", 0, 1.5])
@pytest.mark.parametrize("kind", ["generate", "evaluate"])
def test_an_order_whose_batches_of_answers_have_no_size_is_refused_by_the_field(kind: str, wrong: Any) -> None:
    """Found later, it would be an error of the program that names no field."""
    answering = {"max_new_tokens": 4, "temperature": 1.0, "top_p": 1.0, "seed": 1, "samples_per_prompt": 2}
    checked = {"answers": {**answering, "checks": [{"type": "json"}]}}
    work = {"kind": kind, **({"output_dataset_id": "d", **answering} if kind == "generate" else checked)}
    job: dict[str, Any] = {"work": work, "batch_size": 4}
    check_order(order(spec=spec(job=job)))
    rows = {"dataset_id": "d", "path": f"/service/datasets/{AA}.jsonl", "sha256": AA, "num_rows": wrong}
    changed = {"batch_size": {"batch_size": wrong}, r"dataset\.num_rows": {"dataset": rows}}
    for field, changes in changed.items():
        with pytest.raises(InvalidRequest, match=rf"spec\.job\.data\.{field}="):
            check_order(order(spec=spec(job={**job, **changes})))
    (work if kind == "generate" else checked["answers"])["samples_per_prompt"] = wrong
    with pytest.raises(InvalidRequest, match=r"samples_per_prompt="):
        check_order(order(spec=spec(job=job)))


@pytest.mark.parametrize(
    "job",
    [
        {"method": ["grpo"]},
        {"method": {"rewards": [1]}},
        {"resume_from": "checkpoint-1"},
        {"work": {"kind": "evaluate", "answers": {"x": 1}}, "dataset": {"sha256": AA}, "batch_size": 1, "method": 1},
    ],
)
def test_an_order_with_a_part_of_another_form_is_refused_in_one_sentence(job: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"^spec.*the service that this node has joined sent an invalid order$"):
        check_order(order(spec=spec(job=job)))


def test_an_order_for_a_job_whose_answers_vllm_computes_is_refused() -> None:
    check: dict[str, Any] = {"name": "regex", "check": {"type": "regex", "pattern": "a"}}
    grpo = {"algorithm": "grpo", "rewards": [check]}
    check_order(order(spec=spec(job={"method": grpo})))
    with pytest.raises(InvalidRequest, match="vLLM answers on the service's machine"):
        check_order(order(spec=spec(job={"method": {**grpo, "vllm": {"python": "/bin/sh"}}})))
    judge = {"name": "judge", "model": {"job_uuid": "judge", "source": {"model": "/service/checkpoints/judge/final"}}}
    check_order(order(spec=spec(job={"method": {**grpo, "rewards": [check, judge]}})))


def paths_of(annotation: Any) -> Iterator[tuple[str, ...]]:
    """Names that lead to each path in a model."""
    if annotation is Path:
        yield ()
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from ((name, *names) for names in paths_of(field.annotation))
    else:
        for part in get_args(annotation):
            yield from paths_of(part)


def test_events_are_translated_in_every_field_that_holds_the_path_of_a_checkpoint() -> None:
    found = {
        kind.model_fields["type"].default: name
        for kind in get_args(get_args(Event)[0])
        for name, field in kind.model_fields.items()
        if Path in (field.annotation, *get_args(field.annotation)) or UsablePath in get_args(field.annotation)
    }
    assert found == CHECKPOINT_PATHS


def test_a_spec_continues_from_what_is_here_only() -> None:
    places = PathMap(order(spec={**RESUMED, "age": 7}), Path("/node"))
    found = places.spec(["/service/checkpoints/job/checkpoint-3"]).model_dump(mode="json")
    assert found["age"] == 7  # by which code that is compiled here is this job's alone
    assert (found["resume_from"], found["fall_back_to"]) == ("/node/jobs/job/checkpoints/checkpoint-3", [])
    found = places.spec([]).model_dump(mode="json")
    assert (found["resume_from"], found["fall_back_to"]) == (None, [])


def test_with_a_shared_file_system_checkpoints_stay_where_they_are() -> None:
    places = PathMap(order(spec=RESUMED), Path("/node"), shared=True)
    found = places.spec().model_dump(mode="json")
    assert found["job"]["checkpoint_dir"] == "/service/checkpoints/job"
    assert found["resume_from"] == "/service/checkpoints/job/checkpoint-6"
    assert found["job"]["data"]["dataset"]["path"] == f"/node/datasets/{AA}.jsonl"


@pytest.mark.parametrize(
    ("kind", "field", "here", "there"),
    [
        ("checkpoint", "path", "/node/jobs/job/checkpoints/final", "/service/checkpoints/job/final"),
        ("checkpoint_damaged", "path", "/node/jobs/job/checkpoints/checkpoint-6", RESUMED["resume_from"]),
        ("prepared", "resumed_from", "/node/jobs/job/borrowed/checkpoint-2", RESUMED["fall_back_to"][1]),
        ("checkpoint", "path", "/elsewhere/final", "/elsewhere/final"),
    ],
)
def test_the_path_in_an_event_becomes_the_services(kind: str, field: str, here: str, there: str) -> None:
    places = PathMap(order(spec=RESUMED), Path("/node"))
    line = json.dumps({"type": kind, field: here, "message": "größer"}).encode() + b"\n"
    found = places.event(line)
    assert json.loads(found) == {"type": kind, field: there, "message": "größer"}
    assert found.endswith(b"\n")


def test_the_path_of_answers_in_a_result_becomes_the_services() -> None:
    places = PathMap(order(), Path("/node"))
    result = {"rows": 2, "answers": {"path": "/node/jobs/job/checkpoints/answers.jsonl", "sha256": "a"}}
    found = json.loads(places.event(json.dumps({"type": "finished", "step": 1, "result": result}).encode() + b"\n"))
    there = {"path": "/service/checkpoints/job/answers.jsonl", "sha256": "a"}
    assert found == {"type": "finished", "step": 1, "result": {"rows": 2, "answers": there}}
    for other in (None, [], {"answers": []}, {"answers": {"path": 3}}, {"answers": {"count": 2}}):
        line = json.dumps({"type": "finished", "step": 1, "result": other}).encode() + b"\n"
        assert places.event(line) is line


def test_an_event_without_a_path_stays_as_it_is() -> None:
    places = PathMap(order(), Path("/node"))
    for line in (b'{"type":"progress", "path":"/node/jobs/job/checkpoints/x"}\n', b'{"type": "prepared"}\n'):
        assert places.event(line) is line


def test_a_job_cannot_leave_the_data_directory() -> None:
    with pytest.raises(InvalidRequest):
        _ = PathMap(order(job_uuid="../outside"), Path("/node")).run_dir
