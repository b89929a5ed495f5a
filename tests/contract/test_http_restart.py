"""Llama Stack is stopped and started again while a job trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.system.files import RunDir
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.stack import SFT, Json, LlamaStack, poll, serving
from tests.required import IN_FULL

pytestmark = pytest.mark.contract

STEPS, HELD = 40, "step-10"


@IN_FULL  # CI: kills in test_http_recovery.py, a restart in test_releases.py and test_external_api.py
def test_a_job_trains_through_a_restart_of_llama_stack_and_every_step_is_counted_once(tmp_path: Path) -> None:
    with serving(LlamaStack(tmp_path)) as stack:
        rows = stack.register("rows", QUESTIONS)
        body = sft("survivor", rows)
        body["training_config"]["n_epochs"] = STEPS // 4
        options = {"save_steps": 20}
        stack.arm(HELD, "hold")
        job = stack.submit(SFT, body, options=options)
        stack.wait_taken(HELD)
        before = poll(lambda: _trains(stack.status(job)), "the job trains", timeout=60)
        assert before is not None

        trainers = stack.processes(job)
        stack.stop()
        assert all(process.is_running() for process in trainers), "the training ended with Llama Stack"
        stack.go(HELD)  # it trains while there is no server
        stack.start()

        assert stack.submit(SFT, body, options=options) == job  # sent again by a client that saw its connection die
        after = stack.wait(job, "completed", timeout=60)
        assert stack.jobs() == [job]
        assert after["resources_allocated"]["attempt"] == 1
        assert after["started_at"] == before["started_at"]
        assert after["resources_allocated"]["progress"]["step"] == STEPS
        assert [c["identifier"] for c in after["checkpoints"]] == ["survivor-checkpoint-20", "survivor-final"]

        points = [point.step for point in Store(stack.data_dir / "jobs.sqlite3").points(job)]
        assert points == list(range(1, STEPS + 1))
        events = RunDir(stack.data_dir / "jobs" / job / "attempts" / "1").events.read_text().splitlines()
        progress = [event["step"] for event in map(json.loads, events) if event["type"] == "progress"]
        assert progress == points


def _trains(status: Json) -> Json | None:
    progress = status["resources_allocated"]["progress"]
    return status if status["status"] == "in_progress" and progress["step"] >= 5 else None
