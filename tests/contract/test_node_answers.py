"""Answers of worker nodes on the training service, over its restart and from node to node, with agents that run
nothing."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from llama_stack_provider_trl.specs.events import Finished, Paused, Prepared
from llama_stack_provider_trl_remote.nodes.calls import NodeClient, Pace
from tests.contract.fake_agent import FakeAgent, exited
from tests.contract.payloads import QUESTIONS
from tests.contract.service import JOBS, TrainingService, refusal
from tests.contract.service_agents import STARTED, WORKER, lines
from tests.contract.service_agents import agents as agents
from tests.contract.service_agents import service as service
from tests.contract.stack import Json
from tests.tiny import tiny_model

pytestmark = pytest.mark.contract

ANSWERS = [json.dumps({"row": row, "sample": 0, "prompt": [], "text": "a"}).encode() + b"\n" for row in range(8)]
FIRST, ALL = b"".join(ANSWERS[:4]), b"".join(ANSWERS)
ROWS = b'{"prompt": "a", "completion": "b"}\n'
BEGUN = lines(STARTED, Prepared(total_steps=8, num_rows=8, trainable_parameters=0, total_parameters=1))


def submit(service: TrainingService, kind: str, job_uuid: str, **fields: Any) -> str:
    """8 answers in batches of 4."""
    options = {"resources": WORKER, "retries": 0}
    body = {"job_uuid": job_uuid, "model": str(tiny_model()), "dataset_id": "questions", "batch_size": 4}
    return service.submit(f"/post-training/{kind}", {**body, **fields}, options=options)


async def fetched_and_sent(agent: FakeAgent, task_id: str, more: bytes) -> tuple[bytes, int]:
    """As a real agent calls: the answers with which its task begins, and the bytes that are there after a further
    one, whose offset is not known at first."""
    client = NodeClient(agent.service.url, agent.credential, agent.name, Pace(None, time.monotonic))
    with TemporaryDirectory() as directory:
        file = Path(directory, "answers")
        await client.answers(task_id, "answers.jsonl", file)
        have = await client.put_answers(task_id, "answers.jsonl", 0, b"")
        return file.read_bytes(), await client.put_answers(task_id, "answers.jsonl", have, more)


def finished(result: Json) -> bytes:
    return lines(Finished(step=8, result=result))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_answers_of_a_node_become_a_dataset_over_a_restart_of_the_service(
    service: TrainingService, agents: list[FakeAgent]
) -> None:
    a, _ = agents
    submit(service, "generate", "ask", output={"dataset_id": "made"})
    order = a.run("ask-1")
    assert order["spec"]["job"]["data"]["dataset"]["num_rows"] == len(QUESTIONS) == 8
    assert a.begin_answers("ask-1").json() == {"size": 0, "sha256": sha256(b"")}
    empty = a.answers("ask-1")
    assert (empty.status_code, empty.content) == (200, b"")
    assert a.send_events("ask-1", 0, BEGUN).ok
    assert a.send_answers("ask-1", 0, FIRST).headers["Upload-Offset"] == str(len(FIRST))
    again = a.send_answers("ask-1", 0, FIRST)
    assert (again.status_code, again.headers["Upload-Offset"]) == (409, str(len(FIRST)))
    service.kill()
    service.start()
    part = a.answers("ask-1", Range="bytes=3-")
    assert (part.status_code, part.content, part.headers["ETag"]) == (206, FIRST[3:], f'"{sha256(FIRST)}"')
    assert a.send_answers("ask-1", len(FIRST), ALL[len(FIRST) :]).ok
    made = finished({"dataset": {"sha256": sha256(ROWS), "num_rows": 1}, "answers": {"count": 8}})
    assert "rows.jsonl has the sha256 none" in refusal(a.send_events("ask-1", len(BEGUN), made), 400)
    assert a.send_answers("ask-1", 0, ROWS[:5], "rows.jsonl").ok
    assert f"has the sha256 {sha256(ROWS[:5])}" in refusal(a.send_events("ask-1", len(BEGUN), made), 400)
    assert a.send_answers("ask-1", 5, ROWS[5:], "rows.jsonl").ok
    assert "has no file 'final' of answers" in refusal(a.send_answers("ask-1", 0, b"x", "final"), 404)
    assert a.send_events("ask-1", len(BEGUN), made).ok
    a.report_task("ask-1", "run", observation=exited(0), shipped=True)
    status = service.wait_state("ask", "completed")["resources_allocated"]
    assert (status["device"], status["result"]["answers"]) == ("a/cpu", {"count": 8})
    assert service.get(f"{JOBS}/ask/answers").content == ALL
    assert service.get("/datasets/made").json()["metadata"]["sha256"] == sha256(ROWS)
    a.wait_for("ask-1", "stop")
    refusal(a.send_answers("ask-1", len(ALL), b"late\n"), 410)


def test_another_node_continues_with_what_was_sent(service: TrainingService, agents: list[FakeAgent]) -> None:
    a, b = agents
    checks = [{"type": "regex", "pattern": "a"}]
    submit(service, "evaluate", "measure", checks=checks, max_new_tokens=4)
    a.run("measure-1")
    assert a.send_events("measure-1", 0, BEGUN).ok
    assert a.send_answers("measure-1", 0, FIRST + ANSWERS[4][:5]).ok  # such a part of a line only an attacker sends
    refusal(b.begin_answers("measure-1"), 410)
    refusal(b.answers("measure-1"), 410)
    refusal(b.send_answers("measure-1", len(FIRST), b"x\n"), 410)
    refusal(b.call("PUT", "/nodes/a/tasks/measure-1/answers/answers.jsonl", data=b"x", params={"offset": 0}), 403)
    service.wait_state("measure", "in_progress")
    assert service.post("/nodes/a/drain").status_code == 204
    a.wait_for("measure-1", "pause")
    assert a.send_events("measure-1", len(BEGUN), lines(Paused(step=4))).ok
    a.report_task("measure-1", "pause", observation=exited(0), shipped=True)
    b.run("measure-2")
    assert b.begin_answers("measure-2").json() == {"size": len(FIRST), "sha256": sha256(FIRST)}
    assert b.answers("measure-2").content == FIRST
    assert asyncio.run(fetched_and_sent(b, "measure-2", ANSWERS[4])) == (FIRST, len(FIRST + ANSWERS[4]))
    a.wait_for("measure-1", "stop")
    refusal(a.send_answers("measure-1", len(FIRST), ANSWERS[4]), 410)
    a.forget("measure-1")
    assert b.send_events("measure-2", 0, BEGUN).ok
    assert b.send_answers("measure-2", len(FIRST + ANSWERS[4]), b"".join(ANSWERS[5:])).ok
    place = Path(service.status("measure")["resources_allocated"]["effective_config"]["checkpoint_dir"])
    for path, digest in (("/etc/passwd", sha256(ALL)), (str(place / "answers.jsonl"), sha256(FIRST))):
        wrong = finished({"rows": 8, "answers": {"path": path, "sha256": digest}})
        assert "result" in refusal(b.send_events("measure-2", len(BEGUN), wrong), 400)
    answers = {"path": str(place / "answers.jsonl"), "sha256": sha256(ALL)}
    assert b.send_events("measure-2", len(BEGUN), finished({"rows": 8, "answers": answers})).ok
    b.report_task("measure-2", "run", observation=exited(0), shipped=True)
    status = service.wait_state("measure", "completed")["resources_allocated"]
    assert status["result"] == {"rows": 8, "answers": answers}
    assert service.get(f"{JOBS}/measure/answers").content == ALL
    b.wait_for("measure-2", "stop")
    b.report_task("measure-2", "stop")


def test_further_nodes_of_answers_are_refused_by_name(service: TrainingService) -> None:
    for kind, fields, options, sentence in (
        ("generate", {"output": {"dataset_id": "x"}}, {"nodes": 2}, "provider_options.resources.nodes=2 is not"),
    ):
        body = {"job_uuid": "refused", "model": str(tiny_model()), "dataset_id": "questions", **fields}
        answer = service.post(f"/post-training/{kind}", {**body, "provider_options": {"resources": WORKER | options}})
        assert sentence in refusal(answer, 400)
