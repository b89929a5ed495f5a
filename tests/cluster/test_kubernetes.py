"""A service that requests pods through a real `kubectl`; their processes run on machines of a bed. Run by command."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.system.files import RunDir
from tests.cluster.bed import NODE_TOKEN, Bed
from tests.cluster.jobs import dpo, ready, resources_of, submit
from tests.cluster.kubelet import Kubelet
from tests.required import IN_FULL
from tests.tiny import tiny_model

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    IN_FULL,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl here"),
]
TWO = {"nodes": 2, "labels": {"rack": "7"}}


@pytest.fixture
def cluster(bed: Bed, tmp_path: Path) -> Iterator[Kubelet]:
    head, *machines = (bed.machine(name) for name in ("head", "p1", "p2"))
    tiny_model()
    kubelet = Kubelet(bed, tmp_path, machines)
    pool = {
        **{"name": "k8s", "kind": "kubernetes", "max_nodes": 2, "idle_seconds": 5, "namespace": "training"},
        **{"image": "trl:1", "kubeconfig": str(kubelet.kubeconfig), "service_url": f"http://{head.address}:8322"},
        "node": {"cpus": 1, "labels": {"rack": "7"}},
    }
    shutil.copy(kubelet.kubeconfig, head.root / "kubeconfig")  # its other directories are hidden there
    head.serve({"pools": [{**pool, "kubeconfig": str(head.root / "kubeconfig")}]}, HOME=str(head.root))
    ready(bed)
    yield kubelet
    kubelet.stop()


def all_is_given_back(bed: Bed, cluster: Kubelet) -> None:
    bed.wait(lambda: not cluster.namespace.jobs and not cluster.namespace.pods, "no Job and no pod is left", 120)
    bed.wait(lambda: bed.get("/pools")["data"][0]["nodes"] == 0, "the pool has its nodes back", 60)
    bed.wait(lambda: [one["node"] for one in bed.get("/nodes")["data"]] == ["head"], "the nodes are removed", 60)
    assert not [pid for machine in cluster.machines for pid in machine.pids()]


def logs(cluster: Kubelet) -> Any:
    return [machine.log_tail() for machine in cluster.bed.machines]


def test_two_pods_train_and_are_given_back(bed: Bed, cluster: Kubelet) -> None:
    submit(bed, dpo("pair", 8, resources=TWO))
    detail = re.compile(r"waiting for 2 nodes: .*; requested 2 x 1 core from k8s at \d\d:\d\d:\d\d UTC")
    bed.wait(lambda: detail.match(resources_of(bed, "pair")["detail"]), "the job has the reason", 60)
    status = bed.wait_for_end("pair")
    assert status["status"] == "completed", (status, logs(cluster))
    assert re.fullmatch(r"k8s-\w+-[01]/cpu,k8s-\w+-[01]/cpu", status["resources_allocated"]["device"])
    assert sorted(bed.losses("pair")) == list(range(1, 9))
    assert NODE_TOKEN not in str(cluster.namespace.jobs)
    all_is_given_back(bed, cluster)


def test_a_pod_that_is_evicted_saves_its_job_which_continues_in_another_one(bed: Bed, cluster: Kubelet) -> None:
    release = bed.hold("step-12")
    submit(bed, dpo("one", 20, save_steps=100, resources={"labels": {"rack": "7"}}))
    bed.wait(lambda: (bed.faults / "step-12.taken").exists(), "it trains", 240)
    (pod,) = cluster.placed
    name = next(node["node"] for node in bed.get("/nodes")["data"] if node["node"] != "head")
    cluster.evict(pod)
    bed.wait(lambda: bed.get(f"/nodes/{name}")["state"] == "draining", "the agent has left", 60)
    # Its last 8 steps take less time than the order to save needs, on a machine with other work.
    directory = cluster.placed[pod].root
    bed.wait(lambda: any(directory.rglob(RunDir(directory).control.name)), "the training is to save", 60)
    release()
    status = bed.wait_for_end("one")
    assert status["status"] == "completed", (status, logs(cluster))
    assert sorted(bed.losses("one")) == list(range(1, 21))
    before, after = status["resources_allocated"]["attempts"]
    assert "its node is being drained" in before["message"]
    assert after["start_step"] == before["step"] >= 12  # nothing is done twice
    assert len(cluster.placed) == 2
    all_is_given_back(bed, cluster)
