"""Placement beside pools: what jobs wait for, and what is kept for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llama_stack_provider_trl.jobs.decisions.placement import PATIENCE, Node, Obtainable, auto_kind, place
from llama_stack_provider_trl.jobs.decisions.prediction import PredictedStart, StepPace, WaitingJob, predict
from llama_stack_provider_trl.jobs.decisions.waits import why_waits
from tests.unit.placed_nodes import GIB, GPUS, HEAD, node, wants

SHAPE = Node("", GPUS, cpus=16, memory_bytes=64 * GIB, memory=dict.fromkeys(GPUS, 80 * GIB), labels={"zone": "a"})
GPU_POOL = Obtainable("gpu", SHAPE, 2)
CPU_POOL = Obtainable("cpu", node("", "cpu", cpus=8), 4)
MPS = node("head", "mps", head=True)
BIG_HEAD = node("head", head=True, machine="m", cpus=8)


@pytest.mark.parametrize("head", [HEAD, MPS, BIG_HEAD, node("head", head=True, joins=False)])
@pytest.mark.parametrize(
    "wanted",
    [{}, {"nodes": 2}, {"per_node": 2}, {"labels": {"zone": "a"}}, {"memory_gb": 64}, {"prefers": "org/model"}],
)
@pytest.mark.parametrize("pools", [(GPU_POOL,), (CPU_POOL, GPU_POOL)])
def test_a_job_on_auto_waits_for_the_gpus_of_a_pool_and_takes_no_local_cpu(
    head: Node, wanted: dict[str, Any], pools: tuple[Obtainable, ...]
) -> None:
    job = wants(**wanted)
    assert auto_kind(job, [head], pools) == "cuda"
    for now in (0.0, PATIENCE + 1, 1e9):
        assert place([job], [head], [], now, pools) == {}
    assert "device auto waits for pool gpu: send device" in why_waits(job, {}, [head], pools)
    assert predict([WaitingJob(job, 0.0, StepPace())], [head], {}, [], 0.0, pools) == {
        "job-1": PredictedStart(None, "no machine that takes jobs now can serve it")
    }


def test_the_job_names_the_pool_and_how_to_train_without_it() -> None:
    there = "waiting for a node: 0 of 1 can serve it; head has no cuda"
    assert why_waits(wants(), {}, [HEAD], (GPU_POOL,)) == (
        f"{there}; device auto waits for pool gpu: send device cpu to train without it"
    )
    assert why_waits(wants(device="cuda"), {}, [HEAD], (GPU_POOL,)) == there


@pytest.mark.parametrize(
    ("wanted", "pools"),
    [
        ({}, (CPU_POOL,)),
        ({}, (GPU_POOL._replace(nodes=0),)),
        ({"device": "cpu"}, (GPU_POOL,)),
        ({"home": True}, (GPU_POOL,)),
        ({"labels": {"zone": "b"}}, (GPU_POOL,)),
        ({"memory_gb": 100}, (GPU_POOL,)),
        ({"per_node": 3}, (GPU_POOL,)),
        ({"model": "org/model"}, (GPU_POOL,)),
    ],
)
def test_a_local_cpu_is_taken_where_no_pool_has_a_gpu_for_the_job_or_the_job_asks_for_it(
    wanted: dict[str, Any], pools: tuple[Obtainable, ...]
) -> None:
    rich = {"cpus": 8, "memory_bytes": 200 * GIB, "labels": {"zone": "b"}, "models": frozenset({"org/model"})}
    assert place([wants(**wanted)], [node("head", head=True, **rich)], [], 0.0, pools) == {"job-1": ("cpu",)}


def test_more_nodes_than_pools_and_machines_have_with_gpus_train_on_cpus() -> None:
    nodes = [HEAD, node("b"), node("c")]
    assert place([wants(nodes=3)], nodes, [], 0.0, (GPU_POOL,)) == {"job-1": ("cpu", "b/cpu", "c/cpu")}
    gpus = node("d", *GPUS)
    assert place([wants(nodes=3)], [*nodes, gpus], [], 0.0, (GPU_POOL,)) == {}, "one is there, two come of the pool"


@pytest.mark.parametrize(
    ("expected", "pools"),
    [
        ([node("p-1", expected="requested")], ()),
        ([node("p-1", expected="granted")], ()),
        ([], (Obtainable("p", node(""), 1),)),
        ([node("p-1", expected="granted"), node("p-2", expected="granted")], (CPU_POOL,)),
    ],
)
def test_a_job_takes_no_fewer_machines_while_an_agent_of_a_pool_joins_late(
    expected: list[Node], pools: tuple[Obtainable, ...]
) -> None:
    """Of three nodes that are there two are on the service's machine."""
    nodes, job = [HEAD, node("p-0", machine="m"), node("b", machine="n")], wants(nodes=3, device="cpu")
    assert place([job], nodes, []) == {"job-1": ("cpu", "b/cpu")}
    assert place([job], [*nodes, *expected], [], 0.0, pools) == {}
    joined = [node(one.name, machine="o") for one in expected[:1]] or [node("p-1", machine="o")]
    assert place([job], [*nodes, *joined], []) == {"job-1": ("cpu", "b/cpu", f"{joined[0].name}/cpu")}


@pytest.mark.parametrize("young", [{}, {"nodes": 2}, {"device": "auto"}])
def test_once_a_pool_has_given_a_job_s_nodes_the_other_machines_are_kept_for_it(young: dict[str, Any]) -> None:
    pair = wants(1, nodes=3, device="cpu", scheduled_at=1000.0)
    later = wants(2, **{"device": "cpu", **young}, scheduled_at=1e4)
    there = [HEAD, node("b")]
    coming = node("p-0", expected="granted")
    assert place([pair, later], [*there, coming], [], 1001.0) == {}
    assert "job-2" in place([pair, later], [*there, replace(coming, expected="requested")], [], 1001.0)
    # Of one that is only requested for an hour, too.
    assert place([pair, later], [*there, replace(coming, expected="requested")], [], 1001.0 + PATIENCE) == {}
    assert place([pair, later], [*there, replace(coming, expected="")], [], 1001.0) == {
        "job-1": ("cpu", "b/cpu", "p-0/cpu")
    }


def test_machines_that_are_there_come_before_expected_ones_with_the_model() -> None:
    has_it = frozenset({"org/model"})
    job = wants(prefers="org/model", device="cpu")
    for state in ("requested", "granted"):
        coming = node("p-0", models=has_it, expected=state)
        assert place([job], [HEAD, coming], []) == {"job-1": ("cpu",)}
        assert place([job._replace(failed_on="cpu")], [HEAD, coming], []) == {"job-1": ("cpu",)}
