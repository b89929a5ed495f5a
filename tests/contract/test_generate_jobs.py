"""Jobs that answer the prompts of a dataset, on a service that is killed with its trainers in between."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from llama_stack_provider_trl.specs.rows import check_rows
from llama_stack_provider_trl.system.files import sha256_of
from llama_stack_provider_trl_remote.cli.main import main
from llama_stack_provider_trl_remote.trl_client import TrlClient
from tests.census import census
from tests.contract.crashing import CrashingService
from tests.contract.payloads import LORA, PAIRS, QUESTIONS, sft
from tests.contract.service import JOBS, TrainingService, running, running_service
from tests.contract.stack import DPO, SFT, Json
from tests.tiny import tiny_model

pytestmark = [pytest.mark.contract, pytest.mark.timeout(400)]
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


def made(service: TrainingService, job_uuid: str) -> tuple[str, list[Json]]:
    """The digest and the lines of a job's answers."""
    directory = Path(service.status(job_uuid)["resources_allocated"]["effective_config"]["checkpoint_dir"])
    answers = directory / "answers.jsonl"
    return sha256_of(answers), [json.loads(line) for line in answers.read_text().splitlines()]


def test_answers_are_the_same_bytes_whatever_was_killed_in_between(tmp_path: Path) -> None:
    """16 answers in batches of 4. The trainer dies while it writes the second batch, which is half written then; its
    runner dies with all its processes, and the service, after the third; the service dies again once the dataset is
    registered, before the job is completed."""
    server = CrashingService(tmp_path)
    with closing(server.store), running(server):
        server.register("rows", QUESTIONS)
        server.submit(GENERATE, request("undisturbed", "plain"))
        server.wait("undisturbed", "completed", timeout=server.patience)
        server.arm("answering-4", "kill")
        server.arm("step-12", "hold")
        server.submit(GENERATE, request("killed", "answers"), options={"retries": 3})
        server.wait_taken("step-12", server.patience)
        progress = server.status("killed")["resources_allocated"]["progress"]
        assert (progress["total_steps"], progress["percent"] is not None) == (16, True)
        assert server.store.get("killed").attempt == 2
        server.kill()
        for process in census(server.data_dir).running:
            os.kill(process.pid, signal.SIGKILL)
        server.arm("supervisor-result-kept", "kill")
        server.launch()
        server.wait_killed()
        assert server.recorded("killed") == "in_progress"
        server.launch()
        server.wait_until_it_answers()
        server.wait("killed", "completed", timeout=server.patience)
        digest, lines = made(server, "killed")
        assert digest == made(server, "undisturbed")[0]
        assert [(line["row"], line["sample"]) for line in lines] == [(row, n) for row in range(8) for n in range(2)]
        found = server.get("/datasets/answers").json()
        assert found["metadata"]["job_uuid"] == "killed"
        assert found["metadata"]["sha256"] == server.get("/datasets/plain").json()["metadata"]["sha256"]
        result = server.status("killed")["resources_allocated"]["result"]
        assert result["answers"]["count"] == 16
        assert result["dataset"]["num_rows"] == found["metadata"]["num_rows"] > 0
