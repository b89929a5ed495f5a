"""Requests for jobs that generate, and their answers."""

from __future__ import annotations

import json
from pathlib import Path

from llama_stack_provider_trl.system.files import sha256_of
from tests.contract.service import TrainingService
from tests.contract.stack import Json
from tests.tiny import tiny_model

GENERATE = "/post-training/generate"


def request(job_uuid: str, output: str, **changes: object) -> Json:
    body: Json = {
        "job_uuid": job_uuid,
        "model": str(tiny_model()),
        "dataset_id": "rows",
        "output": {"dataset_id": output},
        "max_new_tokens": 12,
        "samples_per_prompt": 2,
        "batch_size": 4,
        "seed": 7,
    }
    return {**body, **changes}


def answers_of(service: TrainingService, job_uuid: str) -> tuple[str, list[Json]]:
    """The digest and the lines of a job's answers."""
    directory = Path(service.status(job_uuid)["resources_allocated"]["effective_config"]["checkpoint_dir"])
    answers = directory / "answers.jsonl"
    return sha256_of(answers), [json.loads(line) for line in answers.read_text().splitlines()]
