"""Distillation on the service: its teacher is a job's result, which it waits for, and with which it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.payloads import LORA, QUESTIONS, sft
from tests.contract.service import TrainingService, running_service
from tests.contract.stack import DPO, SFT, Json
from tests.tiny import tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(400)]


def student(job_uuid: str, teacher: object, **config: object) -> Json:
    body = sft(job_uuid, "rows")
    training = {**body["training_config"], "data_config": {"dataset_id": "rows", "batch_size": 4}}
    algorithm = {"type": "distillation", "teacher": teacher, "max_completion_length": 8, **config}
    return {**body, "model": str(tiny_model()), "training_config": training, "algorithm_config": algorithm}


def refusal(service: TrainingService, body: Json, **options: object) -> str:
    answer = service.post(DPO, body, options=options)
    assert answer.status_code == 400, answer.text
    detail: str = answer.json()["detail"]
    return detail


def test_a_student_waits_for_the_job_that_is_its_teacher_and_another_one_fails_with_it(tmp_path: Path) -> None:
    options = {"retries": 0}
    with running_service(tmp_path) as service:
        service.register("rows", QUESTIONS)
        service.arm("step-1", "hold")
        service.submit(SFT, sft("large", "rows"), options=options)
        service.wait_taken("step-1", 60)
        service.submit(SFT, sft("cut", "rows"), options=options)
        service.submit(SFT, {**sft("adapter", "rows"), "algorithm_config": LORA}, options=options)
        service.submit(DPO, student("small", "job:large", beta=0.5), options=options)
        service.submit(DPO, student("orphan", "job:cut"), options=options)
        assert service.status("small")["resources_allocated"]["after"] == [
            {"job_uuid": "large", "state": "in_progress"}
        ]
        for teacher, words in {
            "job:absent": "there is no such job here",
            "job:adapter": "job 'adapter' trains an adapter, and a teacher is a whole model",
            "job:wrong": "a job cannot begin with its own result",
            "/nowhere": "there is no such directory",
            None: "name the teacher",
        }.items():
            found = refusal(service, student("wrong", teacher))
            assert found.startswith("algorithm_config.teacher=")
            assert words in found
        assert refusal(service, student("wrong", "job:large", lmbda=0.5)).startswith("algorithm_config.lmbda=0.5")
        assert refusal(service, student("wrong", "job:large", beta=2)).startswith("algorithm_config.beta=2")
        service.cancel("cut")
        service.wait_state("orphan", "failed")
        error = service.status("orphan")["resources_allocated"]["error"]
        assert error["reason"] == "predecessor_failed"
        assert error["message"].startswith("job 'cut', which it waited for, was cancelled")
        service.go("step-1")
        service.wait("small", "completed", timeout=200)
        found = service.status("small")["resources_allocated"]["effective_config"]
        (teacher,) = (one["path"] for one in service.status("large")["checkpoints"] if one["path"].endswith("final"))
        assert found["method"]["reference"]["source"]["model"] == teacher
        assert found["recipe"]["effective"]["memory"]["reference_bytes"] > 0
