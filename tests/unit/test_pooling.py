"""What is requested of pools, and what is given back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llama_stack_provider_trl.jobs.decisions.demands import Demand, Queued
from llama_stack_provider_trl.jobs.decisions.placement import Node, Obtainable
from llama_stack_provider_trl.jobs.decisions.pools import (
    Allocation,
    AllocationState,
    Ask,
    Plan,
    PoolState,
    decide,
    expected_nodes,
    node_names,
    obtainable_nodes,
)
from llama_stack_provider_trl.specs.job import ResourcesSpec

GIB = 1 << 30
HEAD = Node("head", ("cpu",), "m", head=True, cpus=2)
GPUS = tuple(f"cuda:{number}" for number in range(4))
SHAPE = Node("", GPUS, cpus=16, memory_bytes=64 * GIB, memory=dict.fromkeys(GPUS, 80 * GIB), labels={"zone": "a"})
RAY = PoolState("ray", SHAPE, max_nodes=4, idle_seconds=60)


def job(age: int = 1, gpus: int = 1, nodes: int = 1, device: str = "cuda", **changes: object) -> Queued:
    resources = ResourcesSpec(**{"nodes": nodes, "min_nodes": nodes, **changes.pop("resources", {})})  # type: ignore[dict-item]
    demand = Demand(resources=resources).text()
    return Queued(f"job-{age}", device, age, ranks=nodes * gpus, demand=demand)._replace(**changes)


def allocation(nodes: int = 1, state: str = "granted", name: str = "a", pool: str = "ray") -> Allocation:
    return Allocation(name, pool, nodes, AllocationState(state), "job-1", 0.0, granted_at=0.0)


def joined(one: Allocation) -> list[Node]:
    return [replace(SHAPE, name=name, machine=name) for name in node_names(one)]


def decided(
    queued: list[Queued],
    *allocations: Allocation,
    nodes: list[Node] | None = None,
    pools: tuple[PoolState, ...] = (RAY,),
    holders: dict[str, str] | None = None,
    unused_since: dict[str, float] | None = None,
    now: float = 100.0,
) -> Plan:
    return decide(queued, [HEAD, *(nodes or [])], holders or {}, allocations, pools, unused_since or {}, now)


def test_a_job_that_finds_no_place_has_as_many_nodes_requested_as_it_lacks() -> None:
    assert decided([job(gpus=4, nodes=2)]).asks == [Ask("ray", 2, "job-1")]
    # A free node that is there counts.
    there = allocation(1)
    assert decided([job(2, gpus=4, nodes=2)], there, nodes=joined(there)).asks == [Ask("ray", 1, "job-2")]


def test_small_jobs_share_a_node_and_nothing_is_requested_twice() -> None:
    jobs = [job(age, gpus=2) for age in (1, 2, 3)]
    asks = decided(jobs).asks
    assert [(ask.nodes, ask.job_uuid) for ask in asks] == [(1, "job-1"), (1, "job-3")]
    for state in ("wanted", "requested", "granted"):
        assert not decided(jobs, allocation(2, state)).asks
    assert decided(jobs, allocation(2, "returning")).asks == asks  # its nodes get no jobs


def test_jobs_that_are_placed_or_stay_on_the_services_machine_need_no_pool() -> None:
    plan = decided([Queued("home", "cuda", 1), job(2, device="cpu")])
    assert (plan.asks, plan.refused) == ([], {})


def test_no_more_than_its_limit_is_requested_of_a_pool_and_the_jobs_have_the_reason() -> None:
    jobs = [job(age, gpus=4) for age in range(1, 7)]
    plan = decided(jobs, allocation(1, "returning"))
    assert [ask.job_uuid for ask in plan.asks] == ["job-1", "job-2", "job-3"]
    assert plan.refused == dict.fromkeys(("job-4", "job-5", "job-6"), "ray: all of max_nodes 4 are requested")
    gang = decided([job(gpus=4, nodes=5)])
    assert (gang.asks, gang.refused) == (
        [],
        {"job-1": "ray: 4 more are left of max_nodes 4, too few for 5 nodes with those that are free"},
    )
    none = decided([job()], pools=(replace(RAY, max_nodes=0),))
    assert (none.asks, none.refused) == ([], {"job-1": "ray: its max_nodes is 0"})


def test_each_pool_that_cannot_serve_a_job_has_its_reason() -> None:
    slurm = replace(RAY, name="slurm", closed="partition gpu does not exist")
    plan = decided([job(resources={"labels": {"zone": "b"}})], pools=(RAY, slurm))
    assert plan.refused == {
        "job-1": "ray: a node of it lacks the label zone=b; slurm: partition gpu does not exist",
    }
    assert decided([job(gpus=8)]).refused == {"job-1": "ray: a node of it has 4 of 8 devices"}


def test_several_pools_serve_a_job_together_where_no_single_one_has_room() -> None:
    pools = (replace(RAY, max_nodes=1), replace(RAY, name="slurm", max_nodes=2))
    assert decided([job(gpus=4, nodes=3)], pools=pools).asks == [Ask("ray", 1, "job-1"), Ask("slurm", 2, "job-1")]
    assert not decided([job(gpus=4, nodes=4)], pools=pools).asks


def test_an_urgent_job_comes_first() -> None:
    jobs = [job(1, gpus=4), job(2, gpus=4, priority=1)]
    assert [ask.job_uuid for ask in decided(jobs, pools=(replace(RAY, max_nodes=1),)).asks] == ["job-2"]


def test_what_no_job_has_needed_for_a_while_is_given_back_as_a_whole() -> None:
    one = allocation(2)
    first = decided([], one, nodes=joined(one))
    assert (first.returns, first.unused_since) == ([], {"a": 100.0})
    assert not decided([], one, nodes=joined(one), unused_since={"a": 100.0}, now=159.0).returns
    assert decided([], one, nodes=joined(one), unused_since={"a": 100.0}, now=160.0).returns == ["a"]
    # One of its nodes trains, or would.
    busy = decided([], one, nodes=joined(one), holders={"ray-a-1/cuda:0": "x"}, unused_since={"a": 0.0})
    assert (busy.returns, busy.unused_since) == ([], {})
    assert not decided([job()], one, nodes=joined(one), unused_since={"a": 0.0}).returns
    # What was requested and is no longer needed, too.
    assert decided([], allocation(1, "requested"), unused_since={"a": 0.0}).returns == ["a"]


def test_a_pool_whose_budget_is_used_up_is_emptied_and_given_back_at_once() -> None:
    over = replace(RAY, closed="its 10 node-hours of 30 days are used up", overdrawn=True)
    one = allocation(2)
    plan = decided([job(2)], one, nodes=joined(one), holders={"ray-a-0/cuda:0": "x"}, pools=(over,))
    assert (plan.drains, plan.returns, plan.asks) == (["a"], [], [])
    assert decided([], one, nodes=joined(one), pools=(over,)).returns == ["a"]


def test_an_allocation_of_a_pool_that_was_taken_out_of_the_configuration_is_given_back() -> None:
    assert decided([], allocation(1, pool="gone")).returns == ["a"]


def test_seconds_count_for_a_budget_from_the_grant_to_the_end() -> None:
    one = allocation(3)._replace(granted_at=1000.0)
    assert one._replace(granted_at=None).seconds_used(0.0, 5000.0) == 0
    assert one.seconds_used(0.0, 5000.0) == 3 * 4000
    assert one._replace(ended_at=2000.0).seconds_used(1500.0, 5000.0) == 3 * 500
    assert one._replace(ended_at=2000.0).seconds_used(2500.0, 5000.0) == 0


# The service's own machine

CPU_POOL = PoolState("slurm", Node("", ("cpu",), cpus=4), max_nodes=4, idle_seconds=60)
FREE_HEAD = replace(HEAD, cpus=4)


@pytest.mark.parametrize(
    ("head", "wanted", "taken", "limit", "asks"),
    [
        (FREE_HEAD, 2, (), 4, 1),
        (FREE_HEAD, 2, (), 1, 1),  # the head and one node are enough
        (FREE_HEAD, 3, (), 4, 2),
        (FREE_HEAD, 5, (), 4, 4),
        (FREE_HEAD, 2, ("cpu",), 4, 2),
        (FREE_HEAD, 2, ("cpu",), 1, 0),
        (replace(FREE_HEAD, joins=False), 2, (), 4, 2),  # it has no agent
        (replace(FREE_HEAD, why_closed="cordoned"), 2, (), 4, 2),
        (replace(FREE_HEAD, labels={"zone": "a"}), 1, ("cpu",), 4, 1),
    ],
)
def test_a_free_machine_of_the_service_is_one_of_the_nodes_of_a_job(
    head: Node, wanted: int, taken: tuple[str, ...], limit: int, asks: int
) -> None:
    pools, holders = (replace(CPU_POOL, max_nodes=limit),), dict.fromkeys(taken, "x")
    plan = decide([job(nodes=wanted, device="cpu")], [head], holders, [], pools, {}, 100.0)
    assert [(ask.pool, ask.nodes) for ask in plan.asks] == ([("slurm", asks)] if asks else [])
    assert bool(plan.refused) == (asks == 0)


def test_free_gpus_of_the_service_s_machine_count_and_free_nodes_come_before_new_ones() -> None:
    large = replace(SHAPE, name="b", devices=tuple(f"cuda:{number}" for number in range(8)), memory=None)
    head = replace(SHAPE, name="head", head=True)
    for nodes, wanted, asks in (([head], 2, 1), ([head, large], 3, 1), ([HEAD, large], 2, 1)):
        plan = decide([job(gpus=4, nodes=wanted)], nodes, {}, [], (RAY,), {}, 100.0)
        assert [ask.nodes for ask in plan.asks] == [asks]


@pytest.mark.parametrize("state", ["wanted", "requested", "granted"])
def test_the_machines_of_a_job_are_decided_once(state: str) -> None:
    """A younger job that takes the head meanwhile does not have one more node requested."""
    one, pair = allocation(1, state, pool="slurm"), job(nodes=2, device="cpu")
    for holders in ({}, {"cpu": "young"}):
        plan = decide([pair], [FREE_HEAD], holders, [one], (CPU_POOL,), {}, 100.0)
        assert (plan.asks, plan.refused) == ([], {})
    # Once the node is there, it is a machine like any other.
    there = replace(CPU_POOL.shape, name=node_names(one)[0])
    assert decide([pair], [FREE_HEAD, there], {"cpu": "young"}, [one], (CPU_POOL,), {}, 100.0).asks == [
        Ask("slurm", 1, "job-1")
    ]


@pytest.mark.parametrize("order", [(CPU_POOL, RAY), (RAY, CPU_POOL)])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_job_on_auto_has_gpus_requested_though_the_service_s_cpu_is_free(
    order: tuple[PoolState, ...], nodes: int
) -> None:
    default = job(nodes=nodes, device="auto")
    plan = decide([default], [FREE_HEAD], {}, [], order, {}, 100.0)
    assert plan.asks == [Ask("ray", nodes, "job-1")]
    # While all GPUs are given to others, no CPU is requested for it in their place.
    full = allocation(4, "requested")
    others = [job(age, gpus=4, priority=1) for age in range(2, 6)]
    plan = decide([default, *others], [FREE_HEAD], {}, [full], order, {}, 100.0)
    assert (plan.asks, plan.refused["job-1"].count("all of max_nodes 4 are requested")) == ([], 1)


def test_what_pools_may_give_does_not_include_what_has_joined_or_is_expected() -> None:
    allocations = [allocation(2, "granted", "a"), allocation(1, "wanted", "b"), allocation(1, "returning", "c")]
    first = node_names(allocations[0])[0]
    assert [(one.name, one.expected) for one in expected_nodes([RAY], allocations, {first})] == [
        (node_names(allocations[0])[1], "granted"),
        (node_names(allocations[1])[0], "requested"),
    ]
    assert obtainable_nodes([RAY], allocations, {first}) == [Obtainable("ray", SHAPE, 1)]
    assert obtainable_nodes([RAY], allocations, {first, *node_names(allocations[2])}) == [Obtainable("ray", SHAPE, 0)]
    assert expected_nodes([replace(RAY, overdrawn=True)], allocations, set()) == []
