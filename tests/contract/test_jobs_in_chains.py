"""Jobs that come after others, on both providers, whose servers are killed in between."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from tests.contract.crashing import Crashing, CrashingService, CrashingStack, crashing_stack
from tests.contract.payloads import LORA, PAIRS, QUESTIONS, sft
from tests.contract.service import JOBS, TrainingService, running, running_service
from tests.contract.stack import DPO, SFT, Json, poll
from tests.required import IN_FULL

pytestmark = [pytest.mark.contract, pytest.mark.timeout(400)]


def request(job_uuid: str, **options: object) -> tuple[Json, Json]:
    return sft(job_uuid, "rows"), {"retries": 0, **options}


def submit(server: Crashing | TrainingService, job_uuid: str, **options: object) -> None:
    body, given = request(job_uuid, **options)
    server.submit(SFT, body, options=given)


def chain_over_kills(server: Crashing) -> None:
    """Three jobs, one after the other, whose server is killed while one trains, and while the next is released."""
    server.arm("step-1", "hold")
    submit(server, "a")
    submit(server, "b", after=["a"])
    submit(server, "c", after=["a", "b"])
    server.wait_taken("step-1", server.patience)
    waits = "waits for job a (in_progress, step 0 of "
    poll(
        lambda: server.status("b")["resources_allocated"]["detail"].startswith(waits),
        f"b {waits}...",
        timeout=server.patience,
    )
    server.kill()
    server.restart()
    assert [server.recorded(name) for name in "abc"] == ["in_progress", "scheduled", "scheduled"]
    server.arm("supervisor-chain-decided", "kill")
    server.go("step-1")
    server.wait_killed()
    assert [server.recorded(name) for name in "abc"] == ["completed", "scheduled", "scheduled"]
    server.arm("supervisor-job-unblocked", "kill")
    server.launch()
    server.wait_killed()
    server.launch()
    server.wait_until_it_answers()
    for name in "bc":
        server.wait(name, "completed", timeout=server.patience)
    jobs = [server.store.get(name) for name in "abc"]
    assert [job.attempt for job in jobs] == [1, 1, 1]
    for before, after in pairwise(jobs):
        assert before.completed_at is not None
        assert after.started_at is not None
        assert before.completed_at <= after.started_at
    assert server.status("c")["resources_allocated"]["after"] == [
        {"job_uuid": name, "state": "completed"} for name in "ab"
    ]


def test_a_chain_on_the_service_survives_kills(tmp_path: Path) -> None:
    server = CrashingService(tmp_path)
    with closing(server.store), running(server):
        server.register("rows", QUESTIONS)
        chain_over_kills(server)


@IN_FULL
def test_a_chain_inside_llama_stack_survives_kills(tmp_path: Path) -> None:
    with crashing_stack(tmp_path) as server:
        server.launch()
        server.wait_until_it_answers()
        server.register("rows", CrashingStack.rows)
        chain_over_kills(server)


def test_the_service_refuses_by_name_and_passes_failures_on(tmp_path: Path) -> None:
    with running_service(tmp_path) as service:
        service.register("rows", QUESTIONS)
        body, options = request("b", after=["typo"])
        answer = service.post(SFT, body, options=options)
        assert (answer.status_code, answer.json()["detail"]) == (
            400,
            "provider_options.after=['typo'] is not supported: there is no job 'typo' here: submit it first, or "
            "correct its name",
        )
        service.arm("step-1", "hold")
        submit(service, "a")
        service.wait_taken("step-1", 60)
        submit(service, "b", after=["a"])
        submit(service, "c", after=["b"])
        submit(service, "d", after=["a"], cancel_with=True)
        submit(service, "d", after=["a"], cancel_with=True)
        assert service.delete(f"{JOBS}/a").status_code == 409
        page = service.get("/post-training/queue").json()["data"]
        assert {row["job_uuid"]: row["unpredicted"] for row in page if row["job_uuid"] in "bc"} == {
            "b": "it waits for job a, which has done no step yet",
            "c": "it waits for job b",
        }
        html = service.get("/jobs/a", prefix="").text
        assert '<a href="/jobs/b">b</a> (waiting)' in html
        service.cancel("a")
        service.go("step-1")
        for name, state in (("a", "cancelled"), ("b", "failed"), ("c", "failed"), ("d", "cancelled")):
            service.wait_state(name, state)
        error = service.status("c")["resources_allocated"]["error"]
        assert error["reason"] == "predecessor_failed"
        assert error["message"].startswith(
            "job 'b', which it waited for, failed (predecessor_failed).\nCorrect the job"
        )
        assert service.delete(f"{JOBS}/a").status_code == 204


def test_dpo_continues_the_adapter_of_a_job_that_has_not_begun(tmp_path: Path) -> None:
    """Both are submitted at once; a third begins with a whole model. Two processes that shard the model continue an
    adapter in tests/process/test_adapter_bases.py."""
    with running_service(tmp_path) as service:
        service.register("rows", QUESTIONS)
        service.register("pairs", PAIRS, dataset_type="preference")
        body, options = request("tune")
        service.submit(SFT, {**body, "algorithm_config": LORA}, options={**options, "merge_adapter": True})
        training = {**body["training_config"], "data_config": {"dataset_id": "pairs", "batch_size": 2}}
        preferring = {**body, "job_uuid": "prefer", "model": "job:tune", "training_config": training}
        preferring["algorithm_config"] = {"type": "dpo", "beta": 0.1}
        service.submit(DPO, preferring, options={"adapter": "continue", "retries": 0})
        submit_on(service, "whole", "job:tune/tune-merged")
        found = service.status("prefer")["resources_allocated"]
        assert found["after"] == [{"job_uuid": "tune", "state": found["after"][0]["state"]}]
        for name in ("tune", "prefer", "whole"):
            service.wait(name, "completed", timeout=150)
        config = service.status("prefer")["resources_allocated"]["effective_config"]
        assert config["recipe"]["effective"]["adapters"] == {"default": "trained", "reference": "frozen"}
        final = Path(config["checkpoint_dir"]) / "final"
        assert sorted(path.name for path in final.glob("*.safetensors")) == ["adapter_model.safetensors"]
        (tuned,) = (one["path"] for one in service.status("tune")["checkpoints"] if one["path"].endswith("merged"))
        assert service.status("whole")["resources_allocated"]["effective_config"]["model"] == tuned


def submit_on(service: TrainingService, job_uuid: str, model: str) -> None:
    body, options = request(job_uuid)
    service.submit(SFT, {**body, "model": model}, options=options)
