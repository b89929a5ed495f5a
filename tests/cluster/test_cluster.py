"""A service and its worker nodes on machines of their own, started by the shipped scripts."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from tests.cluster.bed import Bed
from tests.contract.payloads import PAIRS, Json
from tests.contract.stack import DPO
from tests.tiny import tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


def dpo(job_uuid: str, steps: int, **options: Any) -> Json:
    """A job of two ranks, fp32, one pair per rank and step."""
    return {
        "job_uuid": job_uuid,
        "model": str(tiny_model()),
        "finetuned_model": "tuned",
        "checkpoint_dir": job_uuid,
        "algorithm_config": {"type": "dpo", "reward_scale": 1.0, "reward_clip": 5.0},
        "training_config": {
            "n_epochs": (steps + 3) // 4,
            "max_steps_per_epoch": 4,
            "learning_rate": 1e-3,
            "dtype": "fp32",
            "data_config": {"dataset_id": "pairs", "batch_size": 1, "shuffle": True},
        },
        "provider_options": {"save_steps": 4, "preflight": "off", **options},
    }


def prepared(bed: Bed, *workers: str) -> None:
    """A service on `head` with the pairs, and these nodes."""
    head = bed.machine("head")
    tiny_model()
    head.serve()
    for name in workers:
        bed.machine(name).join(head, "--label", "rack=7")
    bed.wait(lambda: bed.session.get(f"{bed.url}/health", timeout=5).ok, "the service answers", 60)
    body = {"dataset_id": "pairs", "purpose": "post-training/messages", "source": {"type": "rows", "rows": PAIRS}}
    assert bed.post("/datasets", body).ok
    bed.wait_for_nodes(*workers)


def submit(bed: Bed, body: Json) -> str:
    answer = bed.post(DPO, body)
    assert answer.status_code == 200, answer.text
    return str(body["job_uuid"])


def test_two_machines_train_what_two_ranks_of_one_do(bed: Bed) -> None:
    prepared(bed, "a", "b")
    head, a, b = bed.machines
    submit(bed, dpo("pair", 20, resources={"nodes": 2, "labels": {"rack": "7"}}))
    status = bed.wait_for_end("pair")
    assert status["status"] == "completed", (status, a.log_tail(), b.log_tail())
    placed = status["resources_allocated"]["device"].split(",")
    assert sorted(placed) == ["a/cpu", "b/cpu"]  # rank 0 is not on the service's machine
    assert status["resources_allocated"]["attempt"] == 1
    submit(bed, dpo("single", 20, nproc_per_node=2))
    assert bed.wait_for_end("single")["status"] == "completed"
    expected, found = bed.losses("single"), bed.losses("pair")
    assert sorted(found) == sorted(expected) == list(range(1, 21))
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-3), step
    exported = head.data_dir / "pair" / "pair" / "final"
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(exported).config.num_hidden_layers == 2
    saved = [event["path"] for event in bed.events("pair") if event["type"] == "checkpoint"]
    assert saved == [str(exported.with_name(name)) for name in (*(f"checkpoint-{n}" for n in (4, 8, 12, 16)), "final")]
    assert not list(a.root.rglob("*.safetensors")) + list(b.root.rglob("*.safetensors"))  # nothing stays on the workers
    assert (head.data_dir / "jobs" / "pair" / "attempts" / "1" / "rank-1.log").exists()
    bed.nothing_trains()


def test_a_blocked_port_is_named_before_anything_is_imported(bed: Bed) -> None:
    prepared(bed, "a", "b")
    _, a, b = bed.machines
    a.block("29500-29599")
    submit(bed, dpo("pair", 4, resources={"nodes": 2, "labels": {"rack": "7"}}, retries=0))
    status = bed.wait_for_end("pair", 60)
    assert status["status"] == "failed"
    error = status["resources_allocated"]["error"]
    assert error["reason"] == "launch_failed"
    pair = rf"node a cannot reach node b at {re.escape(b.address)} port 29\d\d\d .*: open TCP ports 29500-29599"
    assert re.search(pair, error["message"]), error
    assert not [path for machine in (a, b) for path in machine.root.rglob("rank-*.log")]
    bed.nothing_trains()


def test_a_worker_that_is_not_taken_ends_with_a_sentence(bed: Bed) -> None:
    prepared(bed, "a")
    other = bed.machine("other")
    cases: tuple[tuple[dict[str, str], str], ...] = (
        ({"TRL_SERVICE_NODE_TOKEN": "wrong"}, "answered 401"),
        ({"TRL_SERVICE_NODE_TOKEN": ""}, "a worker needs a token of the service"),
        ({"TRL_NODE_NAME": "a"}, "the node 'a' is there already"),
        ({"TRL_NODE_ADDRESS": "127.0.0.1"}, "other machines cannot reach this one there"),
        ({"MASTER_ADDR": "127.0.0.1"}, "where no other machine reaches it"),
        ({"MASTER_ADDR": ""}, "set MASTER_ADDR to the address"),
    )
    for environ, said in cases:
        other.log.write_text("")
        other.join(bed.machines[0], **environ)
        assert other.process is not None
        assert other.process.wait(60) in (1, 2), environ
        assert said in other.log.read_text()
        assert "Traceback" not in other.log.read_text()


def test_a_machine_that_dies_is_replaced_by_a_spare(bed: Bed) -> None:
    """The spare is the service's own machine, or rank 0's partner was: whichever is left over."""
    prepared(bed, "a", "b")
    bed.wait_for_nodes("head", "a", "b")
    submit(bed, dpo("pair", 40, resources={"nodes": 2}))
    resources = bed.wait(lambda: _trains(bed, "pair", beyond=5), "the job has a checkpoint", 420)
    placed = [place.rpartition("/")[0] for place in resources["device"].split(",")]
    victim = next(machine for machine in bed.machines if machine.name in placed and machine.name != "head")
    victim.turn_off()
    resources = bed.wait(lambda: _trains(bed, "pair", attempt=2), "it trains again", 420)
    assert f"{victim.name}/" not in resources["device"]
    status = bed.wait_for_end("pair")
    assert status["status"] == "completed", status
    first, second = status["resources_allocated"]["attempts"]
    assert victim.name in first["message"]
    assert second["start_step"] >= 4
    assert first["step"] - second["start_step"] < 8  # a checkpoint every 4 steps, and the last one may be on its way
    assert sorted(bed.losses("pair")) == list(range(1, 41))
    bed.nothing_trains()


@pytest.mark.parametrize("how", ["link", "power"])
def test_without_a_spare_it_waits_says_for_whom_and_goes_on_when_the_machine_is_back(bed: Bed, how: str) -> None:
    prepared(bed, "a", "b")
    head, _, b = bed.machines
    submit(bed, dpo("pair", 200, resources={"nodes": 2, "labels": {"rack": "7"}}, save_steps=20))
    bed.wait(lambda: _trains(bed, "pair", beyond=21), "the job has a checkpoint", 420)
    began = time.monotonic()
    if how == "link":
        b.link(up=False)
    else:
        b.turn_off()
    waits = re.compile(r"waiting for 2 nodes; b is silent since \d\d:\d\d:\d\d UTC")
    bed.wait(lambda: waits.match(_resources(bed, "pair")["detail"]), "it says for whom it waits", 60)
    if how == "link":
        time.sleep(max(0.0, began + 40 - time.monotonic()))
        b.link(up=True)
    else:
        b.join(head, "--label", "rack=7")
    status = bed.wait_for_end("pair")
    assert status["status"] == "completed", status
    first, second = status["resources_allocated"]["attempts"]
    assert (first["reason"], second["reason"]) == ("node_lost", None)
    assert "node b is silent since" in first["message"]
    assert second["start_step"] >= 20
    assert sorted(bed.losses("pair")) == list(range(1, 201))
    bed.nothing_trains()


def test_a_service_that_is_killed_and_started_again_stops_no_training(bed: Bed) -> None:
    """Its own machine is one of the two."""
    prepared(bed, "a")
    bed.wait_for_nodes("head", "a")
    head, a = bed.machines
    submit(bed, dpo("pair", 600, resources={"nodes": 2}, save_steps=100))
    bed.wait(lambda: _trains(bed, "pair", beyond=5), "the job trains", 420)
    trainings = head.trainings() + a.trainings()
    head.kill_agent()
    time.sleep(20)  # longer than a node may be silent
    assert set(head.trainings() + a.trainings()) == set(trainings)
    head.serve()
    status = bed.wait_for_end("pair")
    assert status["status"] == "completed", status
    assert [attempt["reason"] for attempt in status["resources_allocated"]["attempts"]] == [None]
    assert sorted(bed.losses("pair")) == list(range(1, 601))
    bed.nothing_trains()


def test_what_a_node_sends_that_was_replaced_while_it_was_cut_off_is_refused(bed: Bed) -> None:
    """One rank on one machine: it trains on while nobody hears of it, and comes back with events and checkpoints."""
    prepared(bed, "a", "b")
    submit(bed, dpo("late", 600, resources={"labels": {"rack": "7"}}, save_steps=50))
    resources = bed.wait(lambda: _trains(bed, "late", beyond=5), "the job trains", 420)
    lost = next(machine for machine in bed.machines if resources["device"] == f"{machine.name}/cpu")
    lost.link(up=False)
    theirs = lost.data_dir / "jobs" / "late" / "attempts" / "1" / "events.jsonl"
    bed.wait(lambda: b'"type":"finished"' in theirs.read_bytes(), "it trains to its end where nobody hears it", 300)
    bed.wait(lambda: _resources(bed, "late")["attempt"] == 2, "it is given to the other node", 60)
    lost.link(up=True)
    bed.wait(lambda: not theirs.exists(), "the agent ends the old task", 60)
    status = bed.wait_for_end("late")
    assert status["status"] == "completed", status
    assert f"{lost.name}/" not in status["resources_allocated"]["device"]
    first, second = status["resources_allocated"]["attempts"]
    assert (first["reason"], second["reason"]) == ("node_lost", None)
    taken = (bed.machines[0].data_dir / "jobs" / "late" / "attempts" / "1" / "events.jsonl").read_text()
    assert '"finished"' not in taken
    assert sorted(bed.losses("late")) == list(range(1, 601))
    saved = [(event["step"], event["path"]) for event in bed.events("late") if event["type"] == "checkpoint"]
    assert len(set(saved)) == len(saved)
    bed.nothing_trains()


def _resources(bed: Bed, job_uuid: str) -> Json:
    return dict(bed.status(job_uuid)["resources_allocated"])


def _trains(bed: Bed, job_uuid: str, attempt: int = 1, beyond: int = 0) -> Json | None:
    resources = _resources(bed, job_uuid)
    step = (resources.get("progress") or {}).get("step") or 0
    return (
        resources if resources["state"] == "in_progress" and resources["attempt"] == attempt and step > beyond else None
    )
