"""A service that requests its machines from a real Ray cluster. Run by command: needs ray[default]."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import ray_cluster as clusters
from tests.cluster.bed import Bed, Machine
from tests.cluster.jobs import dpo, has_saved, ready, resources_of, submit
from tests.cluster.ray_cluster import RayCluster
from tests.required import FULL, IN_FULL
from tests.tiny import tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), IN_FULL]
if FULL:
    pytestmark.append(pytest.mark.skipif(bool(clusters.why_not()), reason=clusters.why_not()))
TWO = {"nodes": 2, "labels": {"rack": "7"}}


@pytest.fixture
def ray(bed: Bed, tmp_path: Path) -> Iterator[RayCluster]:
    head, *workers = (bed.machine(name) for name in ("head", "n1", "n2", "n3"))
    tiny_model()
    cluster = RayCluster(bed, tmp_path / "ray", head, workers)
    yield cluster
    print(cluster.logs())  # shown where the test fails
    cluster.stop()


def serve(bed: Bed, cluster: RayCluster, **changes: object) -> None:
    cluster.head.serve({"pools": [cluster.pool(**changes)]})
    ready(bed)


def allocations(bed: Bed) -> list[dict[str, object]]:
    (pool,) = bed.get("/pools")["data"]
    return list(pool["allocations"])


def all_is_given_back(bed: Bed, cluster: RayCluster) -> None:
    bed.wait(lambda: not cluster.jobs(), "no Ray job is left", 60)
    bed.wait(lambda: bed.get("/pools")["data"][0]["nodes"] == 0, "the pool has its nodes back", 60)
    bed.wait(lambda: [node["node"] for node in bed.get("/nodes")["data"]] == ["head"], "their nodes are removed", 60)
    bed.wait(lambda: not any(machine.trainings() for machine in cluster.workers), "nothing trains", 20)
    bed.wait(lambda: not list((cluster.root / "agents").glob("*")), "no file is left", 20)


def machine_of(bed: Bed, cluster: RayCluster, rank: int) -> Machine:
    """The machine on which a node of the running job is."""
    devices = resources_of(bed, "pair")["device"].split(",")
    name = devices[rank].split("/")[0]
    address = bed.get(f"/nodes/{name}")["address"]
    return next(machine for machine in cluster.workers if machine.address == address)


def test_two_nodes_of_ray_train_what_two_ranks_of_one_machine_do_and_go_back(bed: Bed, ray: RayCluster) -> None:
    serve(bed, ray)
    submit(bed, dpo("pair", 20, resources=TWO))
    requested = re.compile(r"waiting for 2 nodes: .*; requested 2 x 1 core from ray at \d\d:\d\d:\d\d UTC")
    bed.wait(lambda: requested.match(resources_of(bed, "pair")["detail"]), "the job has the reason", 60)
    status = bed.wait_for_end("pair")
    assert status["status"] == "completed", (status, ray.logs())
    assert re.fullmatch(r"ray-\w+-[01]/cpu,ray-\w+-[01]/cpu", status["resources_allocated"]["device"])
    all_is_given_back(bed, ray)
    submit(bed, dpo("single", 20, nproc_per_node=2))
    assert bed.wait_for_end("single")["status"] == "completed"
    expected, found = bed.losses("single"), bed.losses("pair")
    assert sorted(found) == sorted(expected) == list(range(1, 21))
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-3), step


def test_a_raylet_that_is_killed_takes_its_trainings_along_and_the_job_continues_on_the_third(
    bed: Bed, ray: RayCluster
) -> None:
    serve(bed, ray)
    release = bed.hold("step-12")
    submit(bed, dpo("pair", 20, resources=TWO))
    bed.wait(lambda: has_saved(bed, "pair", 8), "the job has a checkpoint", 240)
    bed.wait(lambda: (bed.faults / "step-12.taken").exists(), "it holds", 60)
    lost = machine_of(bed, ray, 1)
    assert lost.trainings()
    ray.kill(lost, "raylet")
    killed = time.monotonic()
    bed.wait(lambda: not lost.pids(), "nothing is left on the machine", 20)
    assert time.monotonic() - killed < 20
    release()
    status = bed.wait_for_end("pair", 600)
    assert status["status"] == "completed", (status, ray.logs())
    before, after = status["resources_allocated"]["attempts"][0], status["resources_allocated"]["attempts"][-1]
    assert before["reason"] == "node_lost"
    assert after["start_step"] >= 8
    assert sorted(bed.losses("pair")) == list(range(1, 21))
    assert "its machine or its process is gone" in str(allocations(bed)[0]["message"])
    all_is_given_back(bed, ray)


def test_after_the_gcs_is_killed_the_job_finishes_or_nothing_is_left(bed: Bed, ray: RayCluster) -> None:
    serve(bed, ray)
    bed.hold("step-12")
    submit(bed, dpo("pair", 20, resources=TWO))
    bed.wait(lambda: (bed.faults / "step-12.taken").exists(), "it trains", 240)
    ray.kill(ray.head, "gcs_server")
    bed.wait(lambda: not any(machine.trainings() for machine in ray.workers), "nothing trains", 90)
    bed.wait(lambda: not list((ray.root / "agents").glob("*")), "no file is left", 20)
    bed.wait(lambda: "cannot be reached" in str(allocations(bed)[0]["message"]), "the request has the reason", 60)
    bed.wait(lambda: "silent since" in resources_of(bed, "pair")["detail"], "and so has the job", 60)


def test_a_service_that_is_away_for_a_minute_loses_no_bundle(bed: Bed, ray: RayCluster) -> None:
    serve(bed, ray)
    release = bed.hold("step-12")
    submit(bed, dpo("pair", 20, resources=TWO))
    bed.wait(lambda: (bed.faults / "step-12.taken").exists(), "it trains", 240)
    jobs, (before,) = ray.jobs(), allocations(bed)
    assert ray.head.process is not None
    ray.head.process.kill()
    ray.head.reap()
    time.sleep(60)
    assert ray.jobs() == jobs
    serve(bed, ray)
    release()
    status = bed.wait_for_end("pair", 300)
    assert status["status"] == "completed", (status, ray.logs())
    assert len(status["resources_allocated"]["attempts"]) == 1
    assert [one["request_id"] for one in allocations(bed)] == [before["request_id"]]
    all_is_given_back(bed, ray)


def test_what_ray_refuses_is_one_sentence_and_the_job_waits_with_it(bed: Bed, ray: RayCluster) -> None:
    wrong = ray.root / "wrong"
    wrong.write_text("f" * 32)
    serve(bed, ray, auth_token_file=str(wrong))
    submit(bed, dpo("pair", 4, resources=TWO))
    refused = re.compile(r".*Ray at http://[\d.:]+ refuses the token \(40[13]\): set or correct auth_token_file")
    bed.wait(lambda: refused.match(resources_of(bed, "pair")["detail"]), "the job has the reason", 60)
    assert resources_of(bed, "pair")["state"] == "scheduled"
