"""Questions that nodes answer."""

from __future__ import annotations

from typing import Any

from tests.cluster.bed import Bed
from tests.contract.payloads import QUESTIONS
from tests.contract.stack import Json
from tests.tiny import tiny_model

WORKERS = {"labels": {"rack": "7"}}


def ask(bed: Bed, kind: str, job_uuid: str, options: Json, **fields: Any) -> str:
    """Submit a job with 8 prompts, in batches of 2."""
    body = {"job_uuid": job_uuid, "model": str(tiny_model()), "dataset_id": "questions", "dtype": "fp32"}
    sampled = {"max_new_tokens": 12, "batch_size": 2, "seed": 7, "temperature": 0.9, "checkpoint_dir": job_uuid}
    answer = bed.post(f"/post-training/{kind}", {**body, **sampled, **fields, "provider_options": options})
    assert answer.status_code == 200, answer.text
    return job_uuid


def with_questions(bed: Bed) -> None:
    body = {"dataset_id": "questions", "purpose": "post-training/messages"}
    assert bed.post("/datasets", {**body, "source": {"type": "rows", "rows": QUESTIONS}}).ok
