"""Jobs that reserve cores of a CPU: how they are requested, placed beside each other, explained, and started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.decisions.cores import Held, slot_of
from llama_stack_provider_trl.jobs.decisions.demands import Demand, Queued
from llama_stack_provider_trl.jobs.decisions.placement import PATIENCE, Node, kind_of, place
from llama_stack_provider_trl.jobs.decisions.prediction import PredictedStart, RunningJob, StepPace, WaitingJob, predict
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.decisions.waits import why_waits
from llama_stack_provider_trl.launch.base import TaskSpec
from llama_stack_provider_trl.launch.devices import core_numbers
from llama_stack_provider_trl.launch.runner import Limits
from llama_stack_provider_trl.launch.torchrun import common_threads, configured_threads, training_environment
from llama_stack_provider_trl.requests.bodies import SupervisedFineTuneRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.job import ResourcesSpec, ShardingSpec
from tests.fakes import job_spec

NOW = 10_000.0


def machine(name: str = "head", cpus: int = 4, **more: Any) -> Node:
    return Node(name, ("cpu",), head=name == "head", cpus=cpus, **more)


def job(name: str, cores: int | None, age: int = 1, **more: Any) -> Queued:
    """A job of one node; None: it gets a whole CPU."""
    nodes, memory = more.pop("nodes", 1), more.pop("memory", None)
    resources = ResourcesSpec(reserve_cpus=cores, nodes=nodes, min_nodes=nodes, memory_gb=memory)
    return Queued(name, "cpu", age, demand=Demand(resources=resources).text(), scheduled_at=NOW, **more)


def test_two_jobs_that_reserve_cores_share_a_cpu_and_no_core() -> None:
    assert place([job("a", 1), job("b", 2, 2)], [machine()], [], NOW) == {"a": ("cpu:0",), "b": ("cpu:1", "cpu:2")}


def test_a_job_finds_the_cores_that_running_jobs_leave() -> None:
    assert place([job("a", 2)], [machine()], ["cpu:0", "cpu:2"], NOW) == {"a": ("cpu:1", "cpu:3")}
    assert place([job("a", 2)], [machine()], ["cpu:0", "cpu:1", "cpu:2"], NOW) == {}


def test_jobs_that_reserve_cores_never_reserve_more_memory_together_than_a_machine_has() -> None:
    node = machine(memory_bytes=16 << 30)
    assert place([job("a", 2, memory=8), job("b", 2, 2, memory=8)], [node], [], NOW) == {
        "a": ("cpu:0", "cpu:1"),
        "b": ("cpu:2", "cpu:3"),
    }
    larger = job("a", 2, memory=8.5)
    assert place([larger], [node], [], NOW) == {}
    assert why_waits(larger, {}, [node]).endswith(
        "head has 4.0 GiB of memory for each of its cores: 8.5 GiB go with 3 reserved cores"
    )
    assert place([job("a", 3, memory=8.5)], [node], [], NOW) == {"a": ("cpu:0", "cpu:1", "cpu:2")}
    assert place([job("a", None, memory=16)], [node], [], NOW) == {"a": ("cpu",)}
    assert why_waits(job("a", 4, memory=17), {}, [node]).endswith("head has 16 GiB of memory")


def test_a_limit_of_the_operator_holds_where_a_job_reserves_more() -> None:
    assert Limits(4 << 30).reserving(None) == Limits(4 << 30)
    assert Limits(4 << 30).reserving(8) == Limits(4 << 30)
    assert Limits(4 << 30, 20).reserving(2) == Limits(2 << 30, 20, "its reserved resources.memory_gb")
    assert Limits().reserving(2).memory_bytes == 2 << 30


def test_a_whole_cpu_and_its_cores_are_never_given_away_together() -> None:
    assert place([job("a", 1)], [machine()], ["cpu"], NOW) == {}
    assert place([job("a", None)], [machine()], ["cpu:3"], NOW) == {}
    assert place([job("a", None), job("b", 1, 2)], [machine()], [], NOW) == {"a": ("cpu",)}
    assert place([job("a", 1), job("b", None, 2)], [machine()], [], NOW) == {"a": ("cpu:0",)}


def test_two_agents_on_one_machine_have_its_cores_together() -> None:
    nodes = [machine(cpus=2), machine("x", 2, machine="m"), machine("y", 2, machine="m")]
    held = ["cpu:0", "cpu:1", "x/cpu:0"]
    assert place([job("a", 1), job("b", 1, 2)], nodes, held, NOW) == {"a": ("x/cpu:1",)}
    assert place([job("a", None)], nodes, held, NOW) == {}


def test_of_the_nodes_that_would_do_the_one_with_the_fewest_free_cores_comes_first() -> None:
    nodes = [machine(cpus=1), machine("x", 8), machine("y", 8)]
    assert place([job("a", 2)], nodes, ["y/cpu:0"], NOW) == {"a": ("y/cpu:1", "y/cpu:2")}


def test_a_job_over_nodes_reserves_its_cores_on_each() -> None:
    nodes = [machine(), machine("x")]
    assert place([job("a", 2, nodes=2, ranks=4)], [machine(joins=True), nodes[1]], [], NOW) == {
        "a": ("cpu:0", "cpu:1", "x/cpu:0", "x/cpu:1")
    }


@pytest.mark.parametrize("cores", [None, 4, 3])
def test_cores_are_kept_for_an_old_job_that_needs_more_than_are_free(cores: int | None) -> None:
    """Else small jobs that never end coming would starve it."""
    old, small = job("old", cores), job("small", 1, 2)
    held = ["cpu:0", "cpu:1"]
    assert place([old, small], [machine()], held, NOW) == {"small": ("cpu:2",)}
    later = NOW + PATIENCE + 1
    assert place([old, small], [machine()], held, later) == {}
    places = ("cpu",) if cores is None else tuple(f"cpu:{core}" for core in range(cores))
    assert place([old, small], [machine()], [], later)["old"] == places


def test_cores_are_kept_on_one_node_and_young_jobs_run_on_the_others() -> None:
    nodes = [machine(), machine("x")]
    held = ["cpu:0", "x/cpu:0"]
    assert place([job("old", None), job("small", 1, 2)], nodes, held, NOW + PATIENCE + 1) == {"small": ("x/cpu:1",)}


def test_a_job_that_waits_for_cores_names_how_many_are_free_and_who_has_the_others() -> None:
    assert why_waits(job("a", 2), {"cpu:0": "x", "cpu:1": "x", "cpu:2": "y"}, [machine()]) == (
        "waiting for cores: needs 2 of 4 cores, free: 1 (held by x, y)"
    )
    assert why_waits(job("a", 2), {"cpu": "x"}, [machine()]) == (
        "waiting for cores: needs 2 of 4 cores, free: 0 (held by x)"
    )
    assert why_waits(job("a", 2), {"cpu:0": "x"}, [machine()]) == (
        "waiting for cores: needs 2 of 4 cores, free: 3 (held by x), older jobs come first"
    )
    assert why_waits(job("a", 2), {"cpu:0": "x", "w/cpu": "y"}, [machine(cpus=2), machine("w", 8)]) == (
        "waiting for a node; head: needs 2 of 2 cores, free: 1 (held by x), w: needs 2 of 8 cores, free: 0 (held by y)"
    )


def test_a_job_that_waits_for_a_whole_cpu_names_all_jobs_that_have_cores_of_it() -> None:
    held = {"cpu:0": "x", "cpu:1": "y"}
    assert why_waits(Queued("a", "cpu", 1), held, [machine()]) == "waiting for cpu (held by x, y)"
    assert why_waits(job("a", None), held, [machine(), machine("w", 4, why_closed="cordoned")]) == (
        "waiting for a node; w is cordoned; cpu (held by x, y)"
    )


def test_a_job_that_no_machine_has_the_cores_for_waits_and_names_them() -> None:
    gpus = Node("w", ("cuda:0",), cpus=64)
    assert place([job("a", 8)], [machine(), gpus], [], NOW) == {}
    assert why_waits(job("a", 8), {}, [machine(), gpus]) == (
        "waiting for a node: 0 of 2 can serve it; head has 4 of 8 cores to reserve, w has no cpu"
    )
    assert why_waits(job("a", 8), {}, [machine()]).endswith("head has 4 of 8 cores to reserve")


def test_the_start_of_a_job_is_predicted_from_the_jobs_that_have_the_cores() -> None:
    held = {"cpu:0": "x", "cpu:1": "y"}
    at_work = [
        RunningJob("x", JobState.in_progress, StepPace(10, 2.0, NOW)),
        RunningJob("y", JobState.in_progress, StepPace(20, 2.0, NOW)),
    ]
    jobs = [WaitingJob(job("one", 1), 0.0, StepPace()), WaitingJob(job("both", 2, 2), 0.0, StepPace())]
    found = predict(jobs, [machine(cpus=2)], held, at_work, NOW)
    assert found["one"] == PredictedStart(NOW + 20)
    assert found["both"] == PredictedStart(None, "one starts before it and has not trained yet")
    unknown = [RunningJob("x", JobState.in_progress, StepPace())]
    assert predict(jobs[1:], [machine(cpus=2)], {"cpu": "x"}, unknown, NOW)["both"].why == "x has done no step yet"


def test_a_core_is_a_place_on_the_cpu() -> None:
    assert list(map(slot_of, ("cpu:3", "w/cpu:3", "cpu", "w/cuda:1"))) == ["cpu", "w/cpu", "cpu", "w/cuda:1"]
    assert (kind_of("w/cpu:3"), job_spec().on("cpu:3").device) == ("cpu", "cpu")
    taken = Held({"cpu:0": "a", "cpu:1": "a", "w/cpu": "b"})
    assert (taken.of("cpu"), taken.of("cpu:1"), taken.of("cpu:2"), taken.of("w/cpu:0")) == (["a"], ["a"], [], ["b"])
    assert [taken.is_full(slot, 2) for slot in ("cpu", "w/cpu", "x/cpu")] == [True, True, False]
    assert not taken.is_full("cpu", 3)


# Requests


def resolved(options: dict[str, Any], **changes: Any) -> Any:
    """The specification of a job's placement."""
    settings = Settings(
        data_dir=Path("/data"), devices=("cpu",), max_ranks=8, sharding=ShardingSpec(strategy="FULL_SHARD")
    ).model_copy(update=changes)
    body = {
        "job_uuid": "job",
        "model": "org/tiny",
        "training_config": {"n_epochs": 1, "data_config": {"dataset_id": "rows", "batch_size": 1, "shuffle": True}},
    }
    request = SupervisedFineTuneRequest.model_validate(body)
    return resolve(request, ProviderOptions.parse(options), settings).fields


def test_a_job_that_reserves_cores_trains_on_the_cpu_in_as_many_processes_as_fit() -> None:
    both = {"devices": ("cuda:0",), "max_nodes": 9}
    found = resolved({"resources": {"reserve_cpus": 3}}, ranks=8, **both)
    assert (found["device"], found["dtype"], found["dtype_by_device"], found["ranks"]) == ("cpu", "fp32", False, 3)
    assert found["resources"] == ResourcesSpec(reserve_cpus=3)
    assert resolved({"resources": {"reserve_cpus": 3}, "nproc_per_node": 2})["ranks"] == 2
    assert resolved({"resources": {"reserve_cpus": 3, "nodes": 2}}, **both)["ranks"] == 2


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"device": "cuda", "resources": {"reserve_cpus": 2}}, {"max_nodes": 2}, "a job on cuda reserves no cores"),
        ({"resources": {"reserve_cpus": 2, "gpu_memory_gb": 8}}, {}, "leave it or gpu_memory_gb out"),
        ({"resources": {"reserve_cpus": 2}}, {"devices": ("cuda:0",)}, "jobs train on cuda:0 here"),
        ({"resources": {"reserve_cpus": 2}, "nproc_per_node": 3}, {}, "each of the 3 processes"),
        ({"resources": {"reserve_cpus": 0}}, {}, "greater than 0"),
    ],
)
def test_cores_that_cannot_be_reserved_are_refused(options: Any, changes: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"provider_options\.resources\.reserve_cpus.*{message}"):
        resolved(options, **changes)


def test_the_inline_provider_reserves_no_cores() -> None:
    with pytest.raises(InvalidRequest, match=r"provider_options\.resources.*or use the service"):
        resolved({"resources": {"reserve_cpus": 1}}, sharding=None)


# Processes


@pytest.mark.parametrize(
    ("nodes", "ranks", "reserved", "threads"),
    [
        ([(8, None), (2, None)], 1, False, 2),  # the smaller machine's
        ([(64, None), (96, None), (64, None)], 8, False, 8),
        ([(64, 4), (64, None)], 1, False, 4),  # an operator's limit of one machine
        ([(2, 16), (2, 16)], 1, False, 16),  # more than cores, where the operator wants it
        ([(4, None), (4, 1)], 8, False, 1),
        ([(4, 16), (4, None)], 2, True, 2),  # reserved cores are all that there is
    ],
)
def test_all_nodes_of_a_job_have_as_many_threads(
    nodes: list[tuple[int, int | None]], ranks: int, reserved: bool, threads: int
) -> None:
    assert common_threads(nodes, ranks, reserved=reserved) == threads


@pytest.mark.parametrize(
    ("text", "threads"), [("4", 4), ("", None), ("0", None), ("4,2", None), ("-1", None), ("many", None)]
)
def test_threads_are_configured_by_a_single_number(text: str, threads: int | None) -> None:
    assert configured_threads({"OMP_NUM_THREADS": text}) == threads
    assert configured_threads({}) is None


@pytest.mark.parametrize(
    ("devices", "ranks", "configured", "threads"),
    [
        (("cpu:0", "cpu:1"), 1, {}, "2"),
        (("cpu:0", "cpu:1", "cpu:2"), 2, {}, "1"),
        (("cpu:0", "cpu:1"), 1, {"OMP_NUM_THREADS": "1"}, "1"),
        (("cpu:0", "cpu:1"), 1, {"OMP_NUM_THREADS": "64"}, "2"),
        (("cpu",), 1, {}, None),
    ],
)
def test_a_job_has_as_many_threads_as_reserved_cores(
    devices: tuple[str, ...], ranks: int, configured: dict[str, str], threads: str | None
) -> None:
    task = TaskSpec("a-1", Path("/r"), devices, ranks=ranks)
    assert training_environment(task, configured).get("OMP_NUM_THREADS") == threads


def test_a_core_is_one_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 3, 5}, raising=False)
    assert core_numbers(("cpu:0", "cpu:2")) == (3, 7)
    assert core_numbers(("cpu",)) == core_numbers(("cuda:0",)) == ()
    with pytest.raises(OSError, match="core 3 was reserved, and this process may use 3 cores"):
        core_numbers(("cpu:3",))
