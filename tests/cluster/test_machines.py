"""A service and its worker nodes on machines of their own, started by the shipped scripts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llama_stack_provider_trl_remote.cli.main import main
from tests.cluster.bed import NODE_TOKEN, TOKEN, Bed
from tests.cluster.jobs import dpo, has_saved, machines_of, prepared, resources_of, submit, trains
from tests.contract.stack import Json
from tests.required import IN_FULL, in_full
from tests.tiny import REPOSITORY, tiny_model
from tests.tutorials import TWO_MACHINES, commands, job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


@IN_FULL  # CI: numbers and files of two nodes in tests/process/test_nodes.py; two machines train below
def test_two_machines_train_what_two_ranks_of_one_do(bed: Bed) -> None:
    prepared(bed, "a", "b")
    head, a, b = bed.machines
    submit(bed, dpo("pair", 8, resources={"nodes": 2, "labels": {"rack": "7"}}))
    status = bed.wait_for_end("pair")
    assert status["status"] == "completed", (status, a.log_tail(), b.log_tail())
    placed = status["resources_allocated"]["device"].split(",")
    assert sorted(placed) == ["a/cpu", "b/cpu"]  # rank 0 is not on the service's machine
    assert status["resources_allocated"]["attempt"] == 1
    submit(bed, dpo("single", 8, nproc_per_node=2))
    assert bed.wait_for_end("single")["status"] == "completed"
    expected, found = bed.losses("single"), bed.losses("pair")
    assert sorted(found) == sorted(expected) == list(range(1, 9))
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-3), step
    exported = head.data_dir / "checkpoints" / "pair" / "pair" / "final"
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(exported).config.num_hidden_layers == 2
    saved = [event["path"] for event in bed.events("pair") if event["type"] == "checkpoint"]
    assert saved == [str(exported.with_name(name)) for name in ("checkpoint-4", "final")]
    assert not list(a.root.rglob("*.safetensors")) + list(b.root.rglob("*.safetensors"))  # nothing stays on the workers
    assert (head.data_dir / "jobs" / "pair" / "attempts" / "1" / "rank-1.log").exists()
    bed.nothing_is_left()


@IN_FULL  # CI: the commands in tests/unit/test_tutorials.py, such a training above
def test_the_commands_of_the_tutorial_train_on_two_machines(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(bed, "a")
    (tmp_path / "job.json").write_text(json.dumps(job(TWO_MACHINES) | {"model": str(tiny_model())}))
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRL_SERVICE_URL", bed.url.removesuffix("/v1"))
    monkeypatch.setenv("TRL_SERVICE_TOKEN", TOKEN)
    *steps, chat = commands(TWO_MACHINES)
    assert chat[:2] == ["chat", "sft-1"]  # tests/contract/test_chats.py asks results, whose process stays for a while
    for words in steps:
        assert main(words) == 0, (words, [machine.log_tail() for machine in bed.machines])
    assert sorted(resources_of(bed, "sft-1")["device"].split(",")) == ["a/cpu", "cpu"]
    assert (tmp_path / "my-model" / "adapter_model.safetensors").is_file()
    bed.nothing_is_left()


@IN_FULL
def test_the_makefile_joins_a_machine_and_trains_on_both(bed: Bed, tmp_path: Path) -> None:
    prepared(bed)
    head, a = bed.machines[0], bed.machine("a")
    make = ["make", "--no-print-directory", "-C", str(REPOSITORY), f"PYTHON={sys.executable}", "train-multi-node"]
    make += ["NUM_NODES=2", f"MASTER_ADDR={head.address}"]
    arguments = f"ARGS=--data-dir {a.data_dir} --device cpu"
    a.run(*make, "NODE_RANK=1", arguments, TRL_SERVICE_NODE_TOKEN=NODE_TOKEN)
    bed.wait_for_nodes("a")
    config = tmp_path / "job.json"
    config.write_text(json.dumps(dpo("pair", 8)))
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TRL_")}
    done = subprocess.run(
        [*make, "NODE_RANK=0", f"CONFIG={config}"],
        env={**variables, "TRL_SERVICE_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, (done.stdout, done.stderr, a.log_tail())
    assert sorted(resources_of(bed, "pair")["device"].split(",")) == ["a/cpu", "cpu"]
    bed.nothing_is_left()


def test_a_blocked_port_is_named_before_anything_is_imported(bed: Bed) -> None:
    prepared(bed, "a", "b")
    _, a, b = bed.machines
    a.block("29500-29599")
    submit(bed, dpo("pair", 4, resources={"nodes": 2, "labels": {"rack": "7"}}, retries=0))
    status = bed.wait_for_end("pair", 240)
    assert status["status"] == "failed"
    error = status["resources_allocated"]["error"]
    assert error["reason"] == "launch_failed"
    pair = rf"node a cannot reach node b at {re.escape(b.address)} port 29\d\d\d .*: open TCP ports 29500-29599"
    assert re.search(pair, error["message"]), error
    assert not [path for machine in (a, b) for path in machine.root.rglob("rank-*.log")]
    bed.nothing_is_left()


def test_what_cannot_be_placed_waits_and_a_port_range_in_use_is_named(bed: Bed) -> None:
    prepared(bed, "a")
    bed.wait_for_nodes("head", "a")
    a = bed.machines[1]
    cases: tuple[tuple[Json, str], ...] = (
        ({"nodes": 3}, "waiting for 3 nodes: 2 of 2 can serve it"),
        ({"nodes": 2, "cpus": 4096}, r"waiting for 2 nodes: 0 of 2 .*; head has \d+ CPUs, a has \d+ CPUs"),
        ({"labels": {"rack": "8"}}, "waiting for a node: 0 of 2 .*; head lacks the label rack=8, a lacks"),
    )
    for number, (requested, message) in enumerate(cases):
        name = submit(bed, dpo(f"waits-{number}", 4, resources=requested))
        bed.wait(lambda name=name, message=message: re.search(message, resources_of(bed, name)["detail"]), message, 120)
    with a.ports_in_use(29500, 29599):
        submit(bed, dpo("pair", 4, resources={"nodes": 2}, retries=0))
        status = bed.wait_for_end("pair", 240)
    error = status["resources_allocated"]["error"]
    assert error["reason"] == "launch_failed"
    assert re.match(rf"node a: .*every port from 29500 to 29599 is in use at {re.escape(a.address)}", error["message"])
    for number in range(len(cases)):
        assert resources_of(bed, f"waits-{number}")["state"] == "scheduled"
    bed.nothing_is_left()


def test_a_worker_that_is_not_taken_ends_with_a_sentence(bed: Bed, tmp_path: Path) -> None:
    prepared(bed, "a")
    other = bed.machine("other")
    cases: tuple[tuple[dict[str, str], str], ...] = (
        ({"TRL_SERVICE_NODE_TOKEN": "wrong"}, "answered 401"),
        *in_full(  # tests/unit/test_remote_cli.py, test_node_routes.py, tests/contract/test_remote_script.py
            ({"TRL_SERVICE_NODE_TOKEN": ""}, "a worker needs a token of the service"),
            ({"TRL_NODE_NAME": "a"}, "the node 'a' is there already"),
            ({"MASTER_ADDR": "127.0.0.1"}, "where no other machine reaches it"),
            ({"MASTER_ADDR": ""}, "set MASTER_ADDR to the address"),
        ),
        ({"TRL_NODE_ADDRESS": "127.0.0.1"}, "other machines cannot reach this one there"),
        ({"PYTHONPATH": str(_other_torch(tmp_path))}, "node 'other' has torch 9.9.9, the service has"),
    )
    for environ, message in cases:
        other.log.write_text("")
        other.join(bed.machines[0], **{"TRL_NODE_WARM_START": "off", **environ})
        assert other.process is not None
        assert other.process.wait(240) in (1, 2), environ
        assert message in other.log.read_text()
        assert "Traceback" not in other.log.read_text()
    bed.nothing_is_left()


def test_a_machine_that_dies_is_replaced_by_a_spare(bed: Bed) -> None:
    """The spare is the service's own machine, or rank 0's partner was: whichever is left over."""
    prepared(bed, "a", "b")
    bed.wait_for_nodes("head", "a", "b")
    bed.hold("step-10")  # until it dies there
    submit(bed, dpo("pair", 16, resources={"nodes": 2}))
    resources = bed.wait(lambda: has_saved(bed, "pair", 8), "the job has a checkpoint", 420)
    victim = next(machine for machine in machines_of(bed, resources) if machine.name != "head")
    release = bed.hold("step-14")  # so that it is seen to train again
    victim.turn_off()
    resources = bed.wait(lambda: trains(bed, "pair", attempt=2), "it trains again", 420)
    release()
    assert f"{victim.name}/" not in resources["device"]
    status = bed.wait_for_end("pair")
    assert status["status"] == "completed", status
    first, second = status["resources_allocated"]["attempts"]
    assert victim.name in first["message"]
    assert second["start_step"] == 8
    assert first["step"] in (9, 10)  # it waits between the step and its metrics, on one of the ranks
    assert sorted(bed.losses("pair")) == list(range(1, 17))
    bed.nothing_is_left()


@IN_FULL  # CI: tests/unit/test_cluster.py, by the same name, with a clock of its own
@pytest.mark.parametrize(("how", "rank"), [("link", 1), ("link", 0), ("power", 1)])
def test_without_a_spare_it_waits_names_the_node_and_continues_when_it_is_back(bed: Bed, how: str, rank: int) -> None:
    """Of the head and the other rank's node, both see each other, and neither the one that is gone."""
    prepared(bed, "a", "b")
    head = bed.machines[0]
    bed.hold("step-12")
    submit(bed, dpo("pair", 20, resources={"nodes": 2, "labels": {"rack": "7"}}, save_steps=10))
    resources = bed.wait(lambda: has_saved(bed, "pair", 10), "the job has a checkpoint", 420)
    lost = machines_of(bed, resources)[rank]
    began = time.monotonic()
    if how == "link":
        lost.link(up=False)
    else:
        lost.turn_off()
    waits = re.compile(rf"waiting for 2 nodes; {lost.name} is silent since \d\d:\d\d:\d\d UTC")
    bed.wait(lambda: waits.match(resources_of(bed, "pair")["detail"]), "it names the job that it waits for", 60)
    if how == "link":
        time.sleep(max(0.0, began + 40 - time.monotonic()))
        lost.link(up=True)
    else:
        lost.join(head, "--label", "rack=7")
    status = bed.wait_for_end("pair")
    assert status["status"] == "completed", status
    first, second = status["resources_allocated"]["attempts"]
    assert (first["reason"], second["reason"]) == ("node_lost", None)
    assert f"node {lost.name} is silent since" in first["message"]
    assert second["start_step"] == 10
    assert sorted(bed.losses("pair")) == list(range(1, 21))
    bed.nothing_is_left()


@IN_FULL  # CI: tests/contract/test_service_nodes.py; what agents do meanwhile, in tests/unit/test_agent.py
def test_a_service_that_is_killed_and_started_again_stops_no_training(bed: Bed) -> None:
    """Its own machine is one of the two."""
    prepared(bed, "a")
    bed.wait_for_nodes("head", "a")
    head, a = bed.machines
    trains_on = bed.hold("step-4")
    release = bed.hold("step-12")  # so that it does not end before the service is back
    submit(bed, dpo("pair", 20, resources={"nodes": 2}, save_steps=10))
    bed.wait(lambda: trains(bed, "pair", beyond=2), "the job trains", 420)
    trainings = head.trainings() + a.trainings()
    head.kill_agent()
    trains_on()
    time.sleep(20)  # longer than a node may be silent
    assert set(head.trainings() + a.trainings()) == set(trainings)
    bed.wait(lambda: (bed.faults / "step-12.taken").exists(), "it trains on meanwhile", 60)
    head.serve()
    bed.wait_for_nodes("head", "a")
    release()
    status = bed.wait_for_end("pair")
    assert status["status"] == "completed", status
    assert [attempt["reason"] for attempt in status["resources_allocated"]["attempts"]] == [None]
    assert sorted(bed.losses("pair")) == list(range(1, 21))
    bed.nothing_is_left()


@IN_FULL  # CI: events and checkpoints of replaced attempts in tests/unit/test_cluster.py
def test_what_a_node_sends_that_was_replaced_while_it_was_cut_off_is_refused(bed: Bed) -> None:
    """One rank on one machine: it trains on while it is cut off, and comes back with events and checkpoints."""
    prepared(bed, "a", "b")
    release = bed.hold("step-15")
    submit(bed, dpo("late", 20, resources={"labels": {"rack": "7"}}, save_steps=10))
    bed.wait(lambda: (bed.faults / "step-15.taken").exists(), "the job waits there", 420)
    (lost,) = machines_of(bed, resources_of(bed, "late"))
    second_continues = bed.hold("step-14")  # the first is beyond that
    lost.link(up=False)
    release()
    theirs = lost.data_dir / "jobs" / "late" / "attempts" / "1" / "events.jsonl"
    bed.wait(lambda: b'"type":"finished"' in theirs.read_bytes(), "it trains to its end while it is cut off", 300)
    bed.wait(lambda: trains(bed, "late", attempt=2), "it is given to the other node", 240)
    lost.link(up=True)
    bed.wait(lambda: not theirs.exists(), "the agent ends the old task", 120)
    second_continues()
    status = bed.wait_for_end("late")
    assert status["status"] == "completed", status
    assert f"{lost.name}/" not in status["resources_allocated"]["device"]
    first, second = status["resources_allocated"]["attempts"]
    assert (first["reason"], second["reason"]) == ("node_lost", None)
    taken = (bed.machines[0].data_dir / "jobs" / "late" / "attempts" / "1" / "events.jsonl").read_text()
    assert '"finished"' not in taken
    assert sorted(bed.losses("late")) == list(range(1, 21))
    saved = [(event["step"], event["path"]) for event in bed.events("late") if event["type"] == "checkpoint"]
    assert len(set(saved)) == len(saved)
    bed.nothing_is_left()


def _other_torch(directory: Path) -> Path:
    """A directory that, on the path, makes torch another version, as far as one asks for it."""
    metadata = directory / "path" / "torch-9.9.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    return metadata.parent.parent
