"""Answers that nodes give: whatever is killed in between, and wherever a job continues, the bytes of an undisturbed one
on the service's machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_stack_provider_trl.system.files import sha256_of
from tests.cluster.asking import WORKERS, ask, with_questions
from tests.cluster.bed import Bed, Machine
from tests.cluster.jobs import completed, machines_of, prepared, ready, resources_of
from tests.required import IN_FULL

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

CHECKS = [{"type": "regex", "pattern": "[aeiou].*e"}, {"type": "exact"}]


def answers_of(bed: Bed, job_uuid: str) -> Path:
    """The file on the service's machine."""
    return bed.machines[0].data_dir / "checkpoints" / job_uuid / job_uuid / "answers.jsonl"


def count(bed: Bed, job_uuid: str) -> int:
    """Answers that the service has."""
    file = answers_of(bed, job_uuid)
    return file.read_bytes().count(b"\n") if file.exists() else 0


def held(bed: Bed, point: str) -> None:
    bed.wait(lambda: (bed.faults / f"{point}.taken").exists(), f"the job waits at {point}", 300)


def machine_of(bed: Bed, job_uuid: str) -> Machine:
    return machines_of(bed, resources_of(bed, job_uuid))[0]


@IN_FULL  # CI: tests/contract/test_node_answers.py with agents that a test plays, test_replicas.py with real ranks
def test_answers_of_a_node_are_those_of_the_head_whatever_was_killed(bed: Bed) -> None:
    """16 answers of two ranks, in batches of 2. Rank 0 dies while it writes the fourth batch, which is half written
    then; an agent and the service after the fifth; and the machine after the seventh: the other one continues."""
    prepared(bed, "a", "b")
    with_questions(bed)
    head = bed.machines[0]
    ask(bed, "generate", "plain", {}, samples_per_prompt=2, output={"dataset_id": "of-the-head"})
    expected = completed(bed, "plain")["result"]
    (bed.faults / "answering-6").write_text("kill")
    release, stay = bed.hold("step-10"), bed.hold("step-14")  # rank 1 has reached 8 when rank 0 dies
    options = {"resources": WORKERS, "retries": 3, "nproc_per_node": 2}
    ask(bed, "generate", "moved", options, samples_per_prompt=2, output={"dataset_id": "of-nodes"})
    held(bed, "step-10")
    assert (bed.faults / "answering-6.taken").exists()
    assert resources_of(bed, "moved")["attempt"] == 2
    bed.wait(lambda: count(bed, "moved") == 10, "the service has 10 answers", 60)
    machine = machine_of(bed, "moved")
    assert machine.name in ("a", "b")
    machine.kill_agent()
    head.kill_agent()
    release()
    held(bed, "step-14")
    assert count(bed, "moved") == 10
    machine.join(head, "--label", "rack=7")
    # A service that has started counts a node as lost after 15 s: an agent may take as long to start.
    bed.wait(lambda: "task moved-2: restored" in machine.log.read_text(), "the agent calls the service", 240)
    head.serve()
    ready(bed, "a", "b")
    bed.wait(lambda: count(bed, "moved") == 14, "the service has 14 answers", 120)
    machine.turn_off()
    found = completed(bed, "moved")
    assert [attempt["reason"] for attempt in found["attempts"]] == ["rank_failed", "node_lost", None]
    assert [attempt["start_step"] for attempt in found["attempts"]] == [0, 6, 14]
    assert machine_of(bed, "moved") not in (machine, head)
    assert found["result"] == expected
    assert sha256_of(answers_of(bed, "moved")) == sha256_of(answers_of(bed, "plain"))
    made, plain = (bed.get(f"/datasets/{name}")["metadata"]["sha256"] for name in ("of-nodes", "of-the-head"))
    assert made == plain
    stay()
    bed.nothing_is_left()


@IN_FULL
def test_a_checked_evaluation_moves_from_node_to_node_and_to_the_head(bed: Bed) -> None:
    """Its trainer is killed, its node is drained, and the next one is lost."""
    prepared(bed, "a", "b")
    with_questions(bed)
    bed.wait_for_nodes("head")
    head = bed.machines[0]
    ask(bed, "evaluate", "plain", {}, checks=CHECKS)
    expected = completed(bed, "plain")["result"]
    assert bed.session.post(f"{bed.url}/nodes/head/cordon", timeout=30).ok
    (bed.faults / "answering-2").write_text("kill")
    drained, lost = bed.hold("step-4"), bed.hold("step-6")
    ask(bed, "evaluate", "moved", {"resources": {"nodes": 1}, "retries": 3}, checks=CHECKS)
    held(bed, "step-4")
    first = machine_of(bed, "moved")
    assert bed.session.post(f"{bed.url}/nodes/{first.name}/drain", timeout=30).ok
    pauses = first.data_dir / "jobs" / "moved" / "attempts" / "2" / "control.json"
    bed.wait(pauses.exists, "the job is ordered to pause", 60)
    drained()
    held(bed, "step-6")
    second = machine_of(bed, "moved")
    assert {first.name, second.name} == {"a", "b"}
    bed.wait(lambda: count(bed, "moved") == 6, "the service has 6 answers", 60)
    assert bed.session.post(f"{bed.url}/nodes/head/uncordon", timeout=30).ok
    second.turn_off()
    found = completed(bed, "moved")
    assert machine_of(bed, "moved") is head
    assert [attempt["start_step"] for attempt in found["attempts"]] == [0, 2, 4, 6]
    assert (bed.faults / "answering-2.taken").exists()
    answers = {**expected.pop("answers"), "path": str(answers_of(bed, "moved"))}
    assert found["result"].pop("answers") == answers
    assert found["result"] == expected
    lost()
    bed.nothing_is_left()


@IN_FULL
def test_answers_wait_on_their_node_while_the_disk_of_the_service_is_full(bed: Bed) -> None:
    prepared(bed, "a", disk_mb=64)
    with_questions(bed)
    head, a = bed.machines
    ask(bed, "evaluate", "plain", {}, checks=CHECKS)
    completed(bed, "plain")
    release = bed.hold("step-2")
    ask(bed, "evaluate", "late", {"resources": WORKERS, "retries": 0}, checks=CHECKS)
    held(bed, "step-2")
    with head.full_disk():
        release()
        bed.wait(lambda: "where checkpoints of late go" in a.log.read_text(), "its answers wait, with the reason", 120)
    assert [attempt["reason"] for attempt in completed(bed, "late")["attempts"]] == [None]
    found, expected = (
        bed.session.get(f"{bed.url}/post-training/jobs/{name}/answers", timeout=30) for name in ("late", "plain")
    )
    assert (found.ok, found.content) == (True, expected.content)
    bed.nothing_is_left()
