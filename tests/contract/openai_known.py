"""A file and a job of OpenAI's API under names that tests know: both are what the engine's own calls make."""

from __future__ import annotations

from llama_stack_provider_trl_remote.openai.names import Called
from tests.contract.payloads import QUESTIONS, Json, sft
from tests.contract.service import TrainingService
from tests.contract.stack import SFT

FILE, JOB = "file-known", "ftjob-known"


def add_known(service: TrainingService, headers: Json | None = None) -> None:
    """A file is a dataset, and a job has in its metadata what it was called with."""
    mark = {"filename": "known.jsonl", "bytes": 1, "purpose": "fine-tune"}
    body = {"dataset_id": FILE, "source": {"type": "rows", "rows": QUESTIONS}, "metadata": {"openai": mark}}
    assert service.post("/datasets", body, headers=headers).ok
    called = Called("known", "known", "", {"type": "supervised", "supervised": {"hyperparameters": {}}})
    options = {"metadata": {"openai": called.text()}}
    assert service.post(SFT, sft(JOB, FILE), options=options, headers=headers).ok
