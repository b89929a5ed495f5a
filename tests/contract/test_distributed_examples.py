"""The programs of examples/distributed, run as a user runs them, against one service on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.payloads import QUESTIONS
from tests.contract.service import TrainingService, ndjson, running_service
from tests.contract.stack import Json
from tests.required import IN_FULL
from tests.tiny import REPOSITORY, tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]
PROGRAMS = REPOSITORY / "examples" / "distributed"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    root = tmp_path_factory.mktemp("examples")
    (root / "rows.jsonl").write_bytes(ndjson(QUESTIONS))
    with running_service(root) as service:
        yield service


def output_of(service: TrainingService, program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / program), "--url", service.url, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=service.root,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}\n{service.log_tail()}"
    return done.stdout


@IN_FULL  # CI: tests/process/test_averaging.py, tests/unit/test_teacher_student.py; the other programs below
def test_students_learn_shards_of_the_answers_and_are_averaged_once(service: TrainingService) -> None:
    model, rows = str(tiny_model()), ("--prompts", "rows.jsonl", "--held-out", "rows.jsonl")
    arguments = ("teacher_student_example.py", "--teacher", model, "--student", model, *rows)
    arguments += ("--max-new-tokens", "12", "--temperature", "1")
    printed = output_of(service, *arguments)
    names = {line.split()[0]: line.split()[1] for line in printed.splitlines() if line.endswith("completed")}
    assert {*names} == {
        *("answers", "student-1", "student-2", "merged"),
        *(f"score-{one}" for one in ("teacher", "student-1", "student-2", "merged")),
    }
    answers = rows_of(service, service.get(f"/datasets/{names['answers']}").json()["metadata"]["sha256"])
    for index, student in enumerate(("student-1", "student-2")):
        spec = json.loads((service.data_dir / "jobs" / names[student] / "attempts" / "1" / "spec.json").read_text())
        assert rows_of(service, spec["job"]["data"]["dataset"]["sha256"]) == answers[index::2]
        assert spec["job"]["data"]["dataset"]["num_rows"] == len(answers[index::2])
    losses = {
        name: service.status(job_uuid)["resources_allocated"]["result"]["loss"]
        for name, job_uuid in names.items()
        if name.startswith("score-")
    }
    assert len(set(losses.values())) == 4
    assert output_of(service, *arguments) == printed
    body = {"job_uuid": "more", "model": model, "training_config": {"n_epochs": 1}}
    body["training_config"]["data_config"] = {"dataset_id": f"job:{names['answers']}", "batch_size": 1}
    for count, status in ((len(QUESTIONS), 200), (len(QUESTIONS) + 1, 400)):
        options = {"shard": {"index": 0, "count": count}, "after": [names["merged"]]}
        answer = service.post("/post-training/supervised-fine-tune", body, options=options)
        assert answer.status_code == status, answer.text
        body["job_uuid"] = "too-many"
    assert "provider_options.shard.count=9" in answer.json()["detail"]


def rows_of(service: TrainingService, sha256: str) -> list[Json]:
    path: Path = service.data_dir / "datasets" / f"{sha256}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_two_processes_train_one_model(service: TrainingService) -> None:
    arguments = ("--model", str(tiny_model()), "--rows", "rows.jsonl", "--batch-size", "4", "--steps", "2")
    printed = output_of(service, "data_parallel_example.py", *arguments).splitlines()
    assert [line.split()[1] for line in printed[:-1]] == ["1", "2"]
    assert printed[-1].endswith("FULL_SHARD")


def test_several_models_train_side_by_side(service: TrainingService) -> None:
    models = (tiny_model(), tiny_model(tied=False))
    named = [word for model in models for word in ("--model", str(model))]
    rows = ("--rows", "rows.jsonl", "--held-out", "rows.jsonl")
    printed = output_of(service, "multi_model_training.py", *named, *rows, "--cores", "1").splitlines()
    assert [line.split()[:2] for line in printed[1:]] == [[model.name, "completed"] for model in models]
    assert all(line.split()[-1].startswith("cpu:") for line in printed[1:])
