"""Worker nodes on the training service: what their agents say and are told, with agents that run nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from llama_stack_provider_trl.files import write_manifest
from llama_stack_provider_trl.recipes.events import CheckpointSaved, Finished, Prepared, Started
from tests.contract.fake_agent import FakeAgent, exited
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import JOBS, TrainingService, refusal, running
from tests.contract.stack import SFT, poll

pytestmark = pytest.mark.contract

TOKEN, NODE_TOKEN = "operator", "agents"
WORKER = {"labels": {"kind": "worker"}}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    root = tmp_path_factory.mktemp("service")
    tokens = [{"token": "users", "role": "submit"}]
    service = TrainingService(
        root, host="0.0.0.0", insecure=True, api_token=TOKEN, node_token=NODE_TOKEN, tokens=tokens, node_name="head"
    )
    service.session.headers["Authorization"] = f"Bearer {TOKEN}"
    with running(service):
        service.register("questions", QUESTIONS)
        yield service


@pytest.fixture
def agents(service: TrainingService) -> Iterator[list[FakeAgent]]:
    """Two workers, which are gone after the test."""
    found = [agent(service, "a", 2), agent(service, "b", 3)]
    yield found
    for one in found:
        forget(service, one)


def agent(service: TrainingService, name: str, number: int, **report: Any) -> FakeAgent:
    one = FakeAgent(service, name, address=f"10.0.0.{number}", **{**WORKER, **report})
    answer = one.join()
    assert answer.json() == {"node": name, "head": "head", "version": answer.json()["version"]}
    return one


def forget(service: TrainingService, one: FakeAgent) -> None:
    """Whatever it was told is over."""
    for job in service.get("/nodes").json()["data"]:
        for name in job["jobs"].values() if job["node"] == one.name else ():
            service.post(f"{JOBS}/{name}/cancel")
    one.reports.clear()
    one.seen = 0
    while one.poll().ok and one.orders:
        pass
    assert service.delete(f"/nodes/{one.name}").status_code == 204


def lines(*events: BaseModel) -> bytes:
    return b"".join(event.model_dump_json().encode() + b"\n" for event in events)


STARTED = Started(pid=1, device="cpu", versions={})
PREPARED = Prepared(total_steps=4, num_rows=8, trainable_parameters=1, total_parameters=1)


def submit(service: TrainingService, name: str, **resources: Any) -> str:
    options = {"resources": {**WORKER, **resources}, "retries": 0}
    return service.submit(SFT, sft(name, "questions"), provider_options=options)


def detail(service: TrainingService, job: str) -> str:
    return str(service.status(job)["resources_allocated"]["detail"])


def checkpoint(directory: Path, name: str = "checkpoint-2", size: int = 1000) -> Path:
    path = directory / name
    (path / "shards").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"x" * size)
    (path / "shards" / "0.distcp").write_bytes(b"y" * 10)
    write_manifest(path)
    return path


def test_a_job_goes_to_a_worker_and_comes_back_with_all_that_it_made(
    service: TrainingService, agents: list[FakeAgent], tmp_path: Path
) -> None:
    a, _ = agents
    submit(service, "alone", nodes=1)
    order = a.wait_for("alone-1", "prepare")
    assert (order["node_rank"], order["nodes"], order["devices"], order["ranks"]) == (0, 1, ["cpu"], 1)
    assert Path(order["shared_mark"]).read_text() == "alone-1"
    blob = service.get(f"/blobs/{order['spec']['job']['dataset']['sha256']}")
    assert [json.loads(line) for line in blob.text.splitlines()] == QUESTIONS
    a.run("alone-1")
    events = lines(STARTED, PREPARED)
    assert a.send_events("alone-1", 0, events).headers["Upload-Offset"] == str(len(events))
    service.wait_state("alone", "in_progress")
    a.send_log("alone-1", "rank-0.log", 0, b"step 1\n")
    assert service.get(f"{JOBS}/alone/logs").text == "step 1\n"
    place = a.ship("alone-1", checkpoint(tmp_path))
    assert place == service.data_dir.resolve() / "checkpoints" / "alone" / "checkpoint-2"
    final = a.ship("alone-1", checkpoint(tmp_path, "final"), "final")
    rest = lines(
        CheckpointSaved(kind="step", step=2, epoch=1, path=place, train_loss=2.0),
        CheckpointSaved(kind="final", step=4, epoch=1, path=final, train_loss=1.0),
        Finished(step=4),
    )
    assert a.send_events("alone-1", len(events), rest).ok
    a.say("alone-1", "run", "working", observation=exited(0))
    assert service.state("alone") == "in_progress"  # something may still come
    a.say("alone-1", "run", observation=exited(0), shipped=True)
    status = service.wait_state("alone", "completed")
    assert status["resources_allocated"]["device"] == "a/cpu"
    assert [Path(c["path"]).name for c in status["checkpoints"]] == ["checkpoint-2", "final"]
    assert (place.parent / "latest").read_text() == "checkpoint-2\n"
    assert a.wait_for("alone-1", "stop")
    refusal(a.send_events("alone-1", len(events) + len(rest), lines(STARTED)), 410)
    node = service.get("/nodes").json()["data"][1]
    assert (node["node"], node["jobs"], node["state"]) == ("a", {"cpu": "alone"}, "open")
    a.say("alone-1", "stop")
    assert service.get("/nodes").json()["data"][1]["jobs"] == {}


def test_two_nodes_move_on_together_and_hear_of_each_other(service: TrainingService, agents: list[FakeAgent]) -> None:
    a, b = agents
    submit(service, "pair", nodes=2)
    assert [one.wait_for("pair-1", "prepare")["node_rank"] for one in agents] == [0, 1]
    a.say("pair-1", "prepare", port=29501)
    b.say("pair-1", "prepare", "working", detail="fetches rows")
    assert a.orders[0]["stage"] == "prepare"
    poll(lambda: "b: fetches rows" in detail(service, "pair"), "the job says what it waits for", timeout=20)
    b.say("pair-1", "prepare", port=29502)
    at_a, at_b = (
        {"node": "a", "address": "10.0.0.2", "port": 29501},
        {"node": "b", "address": "10.0.0.3", "port": 29502},
    )
    order = a.wait_for("pair-1", "probe")
    assert (order["master"], order["peers"]) == (at_a, [at_b])
    order = b.wait_for("pair-1", "probe")
    assert (order["master"], order["peers"], order["spec"]["world_size"]) == (at_a, [at_a], 2)
    sentence = "node b cannot reach node a at 10.0.0.2 port 29501: open TCP ports 29500-29599"
    b.say("pair-1", "probe", "failed", error=sentence)
    for one in agents:
        assert one.wait_for("pair-1", "stop")
        one.say("pair-1", "stop")
    error = service.wait_state("pair", "failed")["resources_allocated"]["error"]
    assert error["reason"] == "launch_failed"
    assert sentence in error["message"]
