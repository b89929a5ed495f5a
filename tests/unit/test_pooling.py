"""What is requested of pools, and what is given back."""

from __future__ import annotations

from dataclasses import replace

from llama_stack_provider_trl.jobs.demands import Demand, Queued
from llama_stack_provider_trl.jobs.placement import Node
from llama_stack_provider_trl.jobs.pooling import Allocation, AllocationState, Ask, Plan, PoolState, decide, node_names
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
    assert (gang.asks, gang.refused) == ([], {"job-1": "ray: 5 more nodes would be more than max_nodes 4"})
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
