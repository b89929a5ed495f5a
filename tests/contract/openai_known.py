"""A file and a job of OpenAI's API under names that tests know: both are what the engine's own calls make."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

from llama_stack_provider_trl.system.data_dir import DATABASE
from llama_stack_provider_trl_remote.openai.names import Called
from tests.contract.payloads import QUESTIONS, Json, sft
from tests.contract.service import TrainingService
from tests.contract.stack import SFT

FILE, JOB = "file-known", "ftjob-known"


def add_known(service: TrainingService, headers: Json | None = None) -> None:
    """A file is a dataset, and a job has in its metadata what it was called with."""
    mark = {"filename": "known.jsonl", "bytes": 1, "purpose": "fine-tune"}
    body = {"dataset_id": FILE, "source": {"type": "rows", "rows": QUESTIONS}}
    refused = service.post("/datasets", {**body, "metadata": {"openai": mark}}, headers=headers)
    assert (refused.status_code, "reserved" in refused.text) == (400, True)
    assert service.post("/datasets", body, headers=headers).ok
    (document,) = (path for path in (service.data_dir / "datasets" / "registry").iterdir() if FILE in path.read_text())
    entry = json.loads(document.read_text())
    entry["dataset"]["metadata"]["openai"] = mark  # no request can set it
    document.write_text(json.dumps(entry))
    called = Called("known", "known", "", {"type": "supervised", "supervised": {"hyperparameters": {}}})
    refused = service.post(SFT, sft(JOB, FILE), options={"metadata": {"openai": called.text()}}, headers=headers)
    assert (refused.status_code, "reserved" in refused.text) == (400, True)
    assert service.post(SFT, sft(JOB, FILE), headers=headers).ok
    with closing(sqlite3.connect(service.data_dir / DATABASE)) as database, database:  # no request can set it
        database.execute(
            "UPDATE jobs SET spec = json_set(spec, '$.metadata', json(?)) WHERE job_uuid = ?",
            (json.dumps({"openai": called.text()}), JOB),
        )
