"""A service that requests its machines from a real Slurm cluster. Run by command: needs Debian's Slurm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cluster import slurm as clusters
from tests.cluster.bed import Bed
from tests.cluster.jobs import dpo, has_saved, ready, resources_of, submit
from tests.cluster.slurm import SlurmCluster
from tests.contract.payloads import PAIRS
from tests.required import IN_FULL
from tests.tiny import tiny_model

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    IN_FULL,
    pytest.mark.skipif(bool(clusters.why_not()), reason=clusters.why_not()),
]
TWO = {"nodes": 2, "labels": {"rack": "7"}}


@pytest.fixture
def slurm(bed: Bed, tmp_path: Path) -> Iterator[SlurmCluster]:
    head, *workers = (bed.machine(name) for name in ("head", "n1", "n2"))
    tiny_model()
    cluster = SlurmCluster(bed, tmp_path / "slurm", head, workers)
    yield cluster
    print(cluster.logs())  # shown where the test fails
    cluster.stop()


def serve(bed: Bed, cluster: SlurmCluster, **changes: object) -> None:
    cluster.head.serve({"pools": [cluster.pool(**changes)]}, **cluster.variables)
    ready(bed)


def pool_of(bed: Bed) -> dict[str, object]:
    (pool,) = bed.get("/pools")["data"]
    return dict(pool)


def all_is_given_back(bed: Bed, cluster: SlurmCluster) -> None:
    bed.wait(lambda: not cluster.jobs(), "no batch job is left", 60)
    bed.wait(lambda: pool_of(bed)["nodes"] == 0, "the pool has its nodes back", 60)
    bed.wait(lambda: [node["node"] for node in bed.get("/nodes")["data"]] == ["head"], "their nodes are removed", 60)
    assert not [pid for machine in bed.machines[1:] for pid in machine.trainings()]
    assert not list((cluster.root / "agents").glob("*"))


def test_two_nodes_of_slurm_train_what_two_ranks_of_one_machine_do_and_go_back(bed: Bed, slurm: SlurmCluster) -> None:
    serve(bed, slurm)
    submit(bed, dpo("pair", 20, resources=TWO))
    requested = re.compile(r"waiting for 2 nodes: .*; requested 2 x 1 core from slurm at \d\d:\d\d:\d\d UTC")
    bed.wait(lambda: requested.match(resources_of(bed, "pair")["detail"]), "the job has the reason", 60)
    status = bed.wait_for_end("pair")
    assert status["status"] == "completed", (status, slurm.logs())
    assert re.fullmatch(r"slurm-\w+-[01]/cpu,slurm-\w+-[01]/cpu", status["resources_allocated"]["device"])
    all_is_given_back(bed, slurm)
    submit(bed, dpo("single", 20, nproc_per_node=2))
    assert bed.wait_for_end("single")["status"] == "completed"
    expected, found = bed.losses("single"), bed.losses("pair")
    assert sorted(found) == sorted(expected) == list(range(1, 21))
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-3), step
    assert "TOKEN" not in slurm.run("scontrol", "show", "job")


def test_a_time_limit_is_survived_by_a_checkpoint_and_another_allocation(bed: Bed, slurm: SlurmCluster) -> None:
    """Slurm may send the signal up to a minute before `warning_seconds`, so that it comes at once here."""
    options = [*slurm.pool()["options"], "--time=2"]  # type: ignore[misc]
    serve(bed, slurm, options=options, warning_seconds=60)
    release = bed.hold("step-30")
    submit(bed, dpo("pair", 60, resources=TWO, save_steps=100))
    bed.wait(lambda: (bed.faults / "step-30.taken").exists(), "it trains", 240)
    nodes = [node["node"] for node in bed.get("/nodes")["data"][1:]]

    def draining() -> bool:
        return {bed.get(f"/nodes/{name}")["state"] for name in nodes} == {"draining"}

    bed.wait(draining, "Slurm has warned both agents", 150)
    release()
    status = bed.wait_for_end("pair", 600)
    assert status["status"] == "completed", (status, slurm.logs())
    assert sorted(bed.losses("pair")) == list(range(1, 61))
    attempts = status["resources_allocated"]["attempts"]
    assert len(attempts) > 1  # more than 2 where others load the machine: the next allocation ends in 2 minutes, too
    for before, after in pairwise(attempts):
        assert "its node is being drained" in before["message"]
        assert after["start_step"] == before["step"] >= 30  # nothing is done twice
        assert before["device"] != after["device"]
    all_is_given_back(bed, slurm)


def test_an_allocation_that_is_cancelled_is_a_lost_node(bed: Bed, slurm: SlurmCluster) -> None:
    serve(bed, slurm)
    release = bed.hold("step-12")
    submit(bed, dpo("pair", 20, resources=TWO))
    bed.wait(lambda: has_saved(bed, "pair", 8), "the job has a checkpoint", 240)
    (first,) = slurm.jobs()
    slurm.run("scancel", first)
    release()
    status = bed.wait_for_end("pair", 600)
    assert status["status"] == "completed", (status, slurm.logs())
    before, after = status["resources_allocated"]["attempts"]
    assert before["reason"] == "node_lost"
    assert after["start_step"] == 8
    ended, _ = pool_of(bed)["allocations"]  # type: ignore[misc]
    assert f"Slurm job {first}" in ended["message"]
    all_is_given_back(bed, slurm)


def test_a_job_of_jobspec_trains_on_two_nodes_and_leaves_its_result_only(bed: Bed, slurm: SlurmCluster) -> None:
    slurm.pool()  # writes `trl-remote`, which is on the PATH of batch jobs
    (slurm.root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    words = ["jobspec", "slurm", "--model", str(tiny_model()), "--dataset", "rows.jsonl", "--nodes", "2"]
    words.append("--options=--max-steps 2 --batch-size 1 --nproc-per-node 1")
    written = subprocess.run(
        [sys.executable, "-m", "llama_stack_provider_trl_remote", *words], capture_output=True, text=True, check=True
    )
    (slurm.root / "job.sh").write_text(written.stdout)
    (work := slurm.root / "work").mkdir()
    slurm.run("sbatch", f"--chdir={slurm.root}", f"--export=ALL,TMPDIR={work}", str(slurm.root / "job.sh"))
    (number,) = slurm.jobs()
    log_file = slurm.root / f"trl-job-{number}.log"
    # As when a node fails, or a job with a higher priority takes its nodes.
    bed.wait(lambda: log_file.exists() and "node-1 (" in log_file.read_text(), "the agent has joined", 120)
    slurm.run("scontrol", "requeue", number)
    bed.wait(lambda: "JobState=PENDING" in slurm.run("scontrol", "show", "job", number), "the job is requeued", 60)
    slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now")  # Slurm would wait for two minutes
    bed.wait(lambda: not slurm.jobs(), "the batch job ends", 240)
    log = log_file.read_text()
    assert "JobState=COMPLETED" in slurm.run("scontrol", "show", "job", number), log
    assert (slurm.root / "result" / "model.safetensors").is_file(), log
    assert log.count("node-1 (") > 1, "has joined twice, in one log"
    assert "Terminating" not in log, "no task was killed after --wait"
    assert not list(work.glob("trl-*"))
    assert not list(slurm.root.glob(".trl-*"))
    assert not any(machine.trainings() for machine in bed.machines)


def test_what_slurm_refuses_is_one_sentence_and_the_job_waits_with_it(bed: Bed, slurm: SlurmCluster) -> None:
    serve(bed, slurm, options=["--partition=gpu"])
    submit(bed, dpo("pair", 4, resources=TWO))
    refused = re.compile(r".*no pool serves it: slurm: sbatch: .*invalid partition.*; requested again after .* UTC")
    bed.wait(lambda: refused.match(resources_of(bed, "pair")["detail"]), "the job has the reason", 60)
    assert resources_of(bed, "pair")["state"] == "scheduled"
