"""A service that makes machines of an inventory its nodes while jobs need them. Run by command: real SSH servers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.bed import NODE_TOKEN, Bed, Machine
from tests.cluster.jobs import dpo, ready, resources_of, submit, trains
from tests.cluster.ssh_host import _key, host, nothing_but_sshd
from tests.required import IN_FULL, lacking
from tests.tiny import tiny_model

pytest.importorskip("asyncssh")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), IN_FULL]
TWO = {"nodes": 2, "labels": {"rack": "7"}}


class Rack:
    """A service, and machines with nothing but an SSH server."""

    def __init__(self, bed: Bed, directory: Path) -> None:
        self.bed, self.directory = bed, directory
        self.inventory = directory / "operator" / "nodes.yaml"
        self.inventory.parent.mkdir()
        _key(self.inventory.parent / "id")
        self.head, *self.machines = (bed.machine(name) for name in ("head", "a", "b"))
        for machine in self.machines:
            keys = machine.root / "authorized_keys"
            shutil.copy(self.inventory.parent / "id.pub", keys)
            machine.serve_ssh(keys)
        self.write()

    def write(self, **changes: Any) -> None:
        nodes = [{**host(self.directory, machine), **changes} for machine in self.machines]
        for node in nodes:
            node["environment"] |= {"TRL_NODE_WARM_START": "off"}
        self.inventory.write_text(yaml.safe_dump({"nodes": nodes}))

    def serve(self, **changes: Any) -> None:
        pool = {
            **{"name": "rack", "kind": "ssh", "max_nodes": 2, "idle_seconds": 5, "inventory": str(self.inventory)},
            **{"service_url": f"http://{self.head.address}:8322", "offline": True, "site_packages": True},
            **{"node": {"cpus": 1, "labels": {"rack": "7"}}, **changes},
        }
        self.head.serve({"pools": [pool]})
        ready(self.bed)

    def pool(self) -> dict[str, Any]:
        (found,) = self.bed.get("/pools")["data"]
        return dict(found)

    def all_is_given_back(self) -> None:
        bed = self.bed
        bed.wait(lambda: self.pool()["nodes"] == 0, "the pool has its nodes back", 120)
        bed.wait(lambda: [one["node"] for one in bed.get("/nodes")["data"]] == ["head"], "the nodes are removed", 60)
        for machine in self.machines:
            nothing_but_sshd(bed, machine)
            assert not (machine.data_dir / "ssh" / "token").exists()


@pytest.fixture
def rack(bed: Bed, tmp_path: Path) -> Rack:
    if shutil.which("sshd", path="/usr/sbin") is None:
        lacking("there is no sshd: scripts/install-debian-packages.sh installs it")
    tiny_model()
    return Rack(bed, tmp_path)


def agents(machines: list[Machine]) -> list[str]:
    found = [
        machine.name for machine in machines if (machine.data_dir / "credential.json").exists() and machine.pids()[1:]
    ]
    return found


def test_machines_are_nodes_while_a_job_needs_them(bed: Bed, rack: Rack) -> None:
    rack.serve()
    assert all(len(machine.pids()) == 1 for machine in rack.machines)
    submit(bed, dpo("pair", 8, resources=TWO))
    detail = re.compile(r"waiting for 2 nodes: .*; requested 2 x 1 core from rack at \d\d:\d\d:\d\d UTC")
    bed.wait(lambda: detail.match(resources_of(bed, "pair")["detail"]), "the job has the reason", 60)
    status = bed.wait_for_end("pair")
    assert status["status"] == "completed", (status, [machine.log_tail() for machine in rack.machines])
    assert re.fullmatch(r"rack-\w+-[01]/cpu,rack-\w+-[01]/cpu", status["resources_allocated"]["device"])
    assert sorted(bed.losses("pair")) == list(range(1, 9))
    assert NODE_TOKEN not in str(rack.pool())
    rack.all_is_given_back()


def test_a_service_that_is_killed_finds_the_machines_that_it_had_requested(bed: Bed, rack: Rack) -> None:
    rack.serve()
    release = bed.hold("step-4")
    submit(bed, dpo("pair", 8, resources=TWO))
    bed.wait(lambda: agents(rack.machines), "an agent runs", 240)
    rack.head.kill_agent()
    rack.serve()
    bed.wait(lambda: trains(bed, "pair", beyond=2), "the job trains", 240)
    assert [one["state"] for one in rack.pool()["allocations"]] == ["granted"]
    rack.head.kill_agent()
    rack.serve()
    release()
    assert bed.wait_for_end("pair")["status"] == "completed"
    rack.all_is_given_back()


def test_a_wrong_host_key_is_one_sentence_and_the_job_waits_with_it(bed: Bed, rack: Rack) -> None:
    rack.write(host_key=(rack.inventory.parent / "id.pub").read_text().strip())
    rack.serve()
    submit(bed, dpo("pair", 8, resources=TWO))
    sentence = re.compile(r"a \(\S+\): its host key ssh-ed25519 SHA256:\S+ is not the one in `host_key`")
    bed.wait(lambda: sentence.search(resources_of(bed, "pair")["detail"]), "the job has the sentence", 60)
    assert not any(machine.data_dir.exists() for machine in rack.machines)
    rack.write()
    assert bed.wait_for_end("pair")["status"] == "completed"
    rack.all_is_given_back()


def test_a_job_without_a_device_waits_for_the_gpus_of_the_pool_with_the_reason(bed: Bed, rack: Rack) -> None:
    """Machines of the bed have no GPUs: the job waits on."""
    rack.serve(node={"cpus": 1, "gpus": 2, "labels": {"rack": "7"}})
    submit(bed, dpo("default", 4, resources={"nodes": 1}))
    sentence = re.compile(
        r"waiting for a node: 0 of \d can serve it; head has no cuda.*; device auto waits for pool rack: "
        r"send device cpu to train without it"
    )
    bed.wait(lambda: sentence.match(resources_of(bed, "default")["detail"]), "the job has the reason", 60)
    requested = "requested 1 x 2 GPUs from rack at"
    bed.wait(lambda: requested in resources_of(bed, "default")["detail"], "a node is requested", 60)
    submit(bed, dpo("on-cpu", 4, device="cpu", resources={"nodes": 1}))
    assert bed.wait_for_end("on-cpu")["status"] == "completed"
    assert resources_of(bed, "on-cpu")["device"] == "cpu"
    assert resources_of(bed, "default")["attempt"] == 0
    assert bed.post("/post-training/jobs/default/cancel", {}).ok
    rack.all_is_given_back()


def test_the_service_s_own_machine_is_one_of_the_nodes_of_a_job(bed: Bed, rack: Rack) -> None:
    rack.serve(max_nodes=1)
    submit(bed, dpo("pair", 8, resources={"nodes": 2}))
    requested = "requested 1 x 1 core from rack at"
    bed.wait(lambda: requested in resources_of(bed, "pair")["detail"], "one node is requested", 60)
    status = bed.wait_for_end("pair")
    assert status["status"] == "completed", (status, [machine.log_tail() for machine in rack.machines])
    assert re.fullmatch(r"cpu,rack-\w+-0/cpu", status["resources_allocated"]["device"])
    assert [len(one["nodes"]) for one in rack.pool()["allocations"]] == [1]
    rack.all_is_given_back()
