"""Jobs that measure tasks of lm-evaluation-harness on a service, with the library, in the extra `harness`.

tests/process/test_harness.py names how it is installed.
"""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl_remote.trl_client import TrlClient
from tests.census import census
from tests.contract.crashing import CrashingService
from tests.contract.payloads import LORA, QUESTIONS, sft
from tests.contract.service import running
from tests.contract.stack import SFT, Json
from tests.tiny import REPOSITORY, tiny_model

pytestmark = [
    pytest.mark.contract,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="the extra harness is not installed"),
]
HARNESS: Json = {"tasks": ["basics", "sums"], "limit": 6}


def request(job_uuid: str, **changes: Any) -> Json:
    return {"job_uuid": job_uuid, "model": str(tiny_model()), "harness": HARNESS, "batch_size": 3, **changes}


def result_of(server: CrashingService, job_uuid: str) -> Json:
    found: Json = server.status(job_uuid)["resources_allocated"]["result"]
    return found


def test_tasks_are_measured_before_and_after_a_training_whatever_was_killed_in_between(tmp_path: Path) -> None:
    """The trainer dies while it writes the first line; its runner dies with all its processes, and the service, after
    it."""
    server = CrashingService(tmp_path, harness_roots=[str(tmp_path / "tasks")])
    shutil.copytree(REPOSITORY / "examples" / "harness", tmp_path / "tasks")
    with closing(server.store), running(server):
        server.register("rows", QUESTIONS)
        client = TrlClient(server.url)
        assert client.evaluate(request("before")) == "before"
        server.submit(
            SFT, {**sft("tune", "rows"), "algorithm_config": LORA}, options={"evaluate": {"harness": HARNESS}}
        )
        server.wait("before", "completed", timeout=server.patience)
        server.wait("tune-evaluation", "completed", timeout=server.patience)
        server.arm("measuring-0", "kill")
        server.arm("step-1", "hold")
        client.evaluate(request("killed", model="job:tune", provider_options={"retries": 3}))
        server.wait_taken("step-1", server.patience)
        assert server.taken("measuring-0")
        server.kill()
        for process in census(server.data_dir).running:
            os.kill(process.pid, signal.SIGKILL)
        server.launch()
        server.wait_until_it_answers()
        server.wait("killed", "completed", timeout=server.patience)
        before, after = result_of(server, "before"), result_of(server, "tune-evaluation")
        client.evaluate(request("undisturbed", model="job:tune"))
        server.wait("undisturbed", "completed", timeout=server.patience)
        assert result_of(server, "killed") == result_of(server, "undisturbed")
        assert after["tasks"].keys() == {"capitals", "opposites", "sums"}
        assert (before["rows"], before["groups"].keys(), before["details"]) == (18, {"basics"}, after["details"])
        (point,) = client.metrics("killed")[-1:]
        expected = result_of(server, "killed")["tasks"]["capitals"]["acc"]
        assert (point["kind"], point["metrics"]["eval_capitals_acc"]) == ("validation", expected)
        assert "tasks.capitals.acc" in server.get("/jobs/killed", prefix="").text
        status = server.status("killed")["resources_allocated"]
        assert (status["progress"]["step"], status["progress"]["total_steps"]) == (2, 2)
        for changes, sentence in (
            (
                {"harness": {"tasks": ["mmlu"]}},
                "harness.tasks=['mmlu'] is not supported: no task file has 'mmlu'; there",
            ),
            ({"harness": {**HARNESS, "gen_kwargs": {}}}, "harness.gen_kwargs"),
            ({"harness": {"tasks": ["/etc/passwd"]}}, "harness.tasks.0"),
            ({"dataset_id": "rows"}, "dataset_id='rows' is not supported: tasks of a harness have rows"),
            ({"harness": None}, "dataset_id=None is not supported: name the registered dataset"),
            ({"provider_options": {"nproc_per_node": 2}}, "nproc_per_node=2 is not supported: the tasks of a harness"),
            ({"provider_options": {"resources": {"cpus": 1}}}, "resources={'cpus': 1} is not supported: answers, ens"),
        ):
            answer = server.post("/post-training/evaluate", request("bad", **changes))
            assert answer.status_code == 400, answer.text
            assert sentence in answer.json()["detail"], answer.text
        shutil.rmtree(tmp_path / "tasks")
        answer = server.post("/post-training/evaluate", request("bad"))
        assert "there is none in the configured harness_roots" in answer.json()["detail"], answer.text
        assert client.evaluate(request("before")) == "before"  # a repetition needs no task files
