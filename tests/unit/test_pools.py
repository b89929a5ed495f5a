"""The service's pools: what is recorded, requested and given back, over crashes at every step."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.jobs.decisions.pools import AllocationState, node_names
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.placing import Placing
from llama_stack_provider_trl.specs.events import Reason
from llama_stack_provider_trl.specs.job import ResourcesSpec
from llama_stack_provider_trl_remote.nodes.pools.base import PoolRefusal, PoolUnavailable
from llama_stack_provider_trl_remote.service.cluster.pools import FIRST_WAIT, Pools
from tests.fakes import FakeClock, job_spec
from tests.unit.pool_world import World

POINTS = ("pool-recorded", "pool-requested", "pool-returning", "pool-released")


@pytest.fixture
def world(store: Store, clock: FakeClock) -> World:
    return World(store, clock)


def test_machines_are_recorded_requested_given_used_and_given_back(world: World) -> None:
    world.submit()
    world.joins = False
    world.pools.tend(world.nodes)
    assert (world.states(), world.pool.requests) == (["wanted"], [])
    assert "requested 2 x 2 GPUs from ray at" in world.note()
    world.pool.pending = "no machine is free"
    for _ in range(3):
        world.round()
    assert world.states() == ["requested"]
    assert world.note().endswith("UTC: no machine is free")
    world.pool.pending = ""
    world.round()
    assert world.states() == ["granted"]
    world.joins = True
    world.round()
    world.round()
    assert not world.pools.pooled.notes
    (one,) = world.store.allocations.all()
    assert (one.handle, one.requested_for, [record.name for record in world.store.nodes.all()]) == (
        *("handle-0", "job"),
        node_names(one),
    )
    # The job has ended: after a minute all of it goes back.
    world.store.transition("job", 0, JobState.scheduled, JobState.cancelled)
    world.round()
    world.round(50)
    assert world.states() == ["granted"]
    world.round(10)
    assert world.states() == ["ended"]
    world.round()
    assert (world.pool.given, world.store.nodes.all(), len(world.pool.requests)) == ({}, [], 1)


def test_some_machines_of_a_request_wait_for_the_others_for_a_time_only(world: World) -> None:
    world.limits = replace(world.limits, partial_seconds=60)
    world.joins = False
    world.restart()
    world.submit()
    world.pool.pending = "no machine is free"
    for _ in range(30):  # nothing is held meanwhile: there is no limit
        world.round()
    assert world.states() == ["requested"]
    world.pool.partly = True
    for _ in range(12):
        world.round()
    assert world.states() == ["requested"]
    assert world.note().endswith("UTC: 1 of 2 pods start")
    for _ in range(3):
        world.round()
    assert world.states()[0] == "ended"
    assert not world.pool.given
    (one, *_) = world.store.allocations.all(since=0.0)
    assert one.message == "some of its 2 machines waited 60 s for the others: 1 of 2 pods start"
    assert "some of its 2 machines waited 60 s" in world.note()
    assert "requested again after" in world.note()


@pytest.mark.parametrize("interruption", ["all", "none", "unreachable"])
def test_the_limit_counts_from_the_last_time_that_machines_began_to_wait(world: World, interruption: str) -> None:
    world.limits = replace(world.limits, partial_seconds=60, join_seconds=1000)
    world.joins = False
    world.restart()
    world.submit()
    world.pool.partly = True
    for _ in range(8):
        world.round()
    if interruption == "all":
        world.pool.partly = False
    elif interruption == "none":
        world.pool.partly, world.pool.pending = False, "its pod was evicted"
    else:
        world.pool.unreachable = PoolUnavailable("it does not answer")
    world.round()
    world.pool.partly, world.pool.unreachable = True, None
    for _ in range(8):
        world.round()
    # Once all were given none is missing any more; a cluster that is away has reported nothing.
    expected = {"all": "granted", "none": "requested", "unreachable": "ended"}[interruption]
    assert world.states()[0] == expected


@pytest.mark.parametrize("point", POINTS)
def test_after_a_crash_at_any_step_nothing_is_requested_twice_and_nothing_is_left(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setenv(faults.VARIABLE, str(tmp_path))
    (tmp_path / point).write_text("error")
    world.submit()
    crashed = False
    for _ in range(12):
        if len(world.store.nodes.all()) == 2:
            world.store.transition("job", 0, JobState.scheduled, JobState.cancelled)
        with suppress(RuntimeError):  # the fault
            world.round(31)
        if not crashed and (crashed := (tmp_path / f"{point}.taken").exists()):
            world.restart()
    assert (tmp_path / f"{point}.taken").exists()
    assert (world.states(), world.pool.given, list(world.store.nodes.all())) == (["ended"], {}, [])
    assert len(set(world.pool.requests)) == 1  # where it was requested again, then with the same id


def test_a_default_job_waits_with_the_reason_for_a_pool_of_gpus_and_starts_there(world: World) -> None:
    placing = Placing(world.store, world.nodes, lambda: world.pools.pooled)

    def placed() -> dict[str, tuple[str, ...]]:
        with placing.placed(world.clock.now) as found:
            return dict(found)

    world.store.add_job(job_spec(device="auto", resources=ResourcesSpec()), "digest")
    world.joins = False
    assert placed() == {}, "before the first decision, too"
    world.pool.error = PoolUnavailable("10.0.0.1:8265 does not answer")
    for _ in range(2):
        world.round()
        assert placed() == {}
    there = "waiting for a node: 0 of 1 can serve it; head has no cuda; device auto waits for pool ray"
    assert world.store.get("job-1").detail.startswith(there)
    assert world.store.get("job-1").detail.endswith("10.0.0.1:8265 does not answer")
    world.pool.error = PoolRefusal("partition gpu does not exist")
    world.round()
    world.round()
    assert placed() == {}
    assert "no pool serves it: ray: partition gpu does not exist" in world.store.get("job-1").detail
    world.pool.error, world.joins = None, True
    for _ in range(3):
        world.round(FIRST_WAIT)
    (one,) = world.store.allocations.all()
    assert placed() == {"job-1": (f"{node_names(one)[0]}/cuda:0",)}


def test_a_service_that_is_started_again_knows_before_its_first_decision_what_is_expected(world: World) -> None:
    world.submit()
    world.joins = False
    for _ in range(3):
        world.round()
    before = world.pools.pooled
    assert [node.expected for node in before.expected] == ["granted"] * 2
    world.restart()
    world.pools.start()
    world.pools.stop()
    assert world.pools.pooled == before._replace(notes={})
    assert [one.nodes for one in before.obtainable] == [1]


def test_nodes_get_no_jobs_while_they_are_given_back(world: World) -> None:
    world.submit()
    for _ in range(3):
        world.round()
    (one,) = world.store.allocations.all()
    assert world.store.allocations.move(one, AllocationState.returning)
    world.restart()
    world.pools._closed = {}
    world.pools.tend(world.nodes)
    assert [node.why_closed for node in world.nodes()[1:]] == ["being given back to ray"] * 2


def test_a_pool_that_refuses_is_named_and_tried_again_later_and_later(world: World) -> None:
    world.submit()
    world.pool.error = PoolRefusal("partition gpu does not exist")
    world.round()
    assert world.states() == ["ended"]
    for _ in range(5):
        world.round()
    assert world.states() == ["ended"]
    assert "no pool serves it: ray: partition gpu does not exist; requested again after" in world.note()
    world.round(FIRST_WAIT)
    assert world.states() == ["ended", "ended"]
    world.round(FIRST_WAIT)
    assert len(world.states()) == 2  # the second wait is twice as long
    world.pool.error = None
    world.round(FIRST_WAIT)
    assert world.states()[2:] == ["requested"]


def test_a_pool_that_does_not_answer_gets_the_same_request_again(world: World) -> None:
    world.submit()
    world.pool.error = PoolUnavailable("10.0.0.1:8265 does not answer")
    for _ in range(3):
        world.round()
    assert world.states() == ["wanted"]
    assert world.note().endswith("10.0.0.1:8265 does not answer")
    world.pool.error = None
    world.round()
    assert (world.states(), len(world.pool.requests)) == (["requested"], 1)


def test_a_job_waits_with_the_reason_while_the_pool_that_has_its_nodes_does_not_answer(world: World) -> None:
    world.submit()
    for _ in range(4):
        world.round()
    assert (world.states(), world.pools.pooled.notes) == (["granted"], {})
    world.pool.unreachable = PoolUnavailable("10.0.0.1:8265 does not answer")
    world.round()
    world.round()
    assert (world.states(), world.note()) == (["granted"], "ray: 10.0.0.1:8265 does not answer")
    world.pool.unreachable = None
    world.round()
    world.round()
    assert world.pools.pooled.notes == {}


def test_machines_that_a_pool_takes_away_are_forgotten_and_requested_again(world: World) -> None:
    world.submit()
    for _ in range(3):
        world.round()
    world.pool.given.clear()
    world.round()
    assert world.states() == ["ended"]
    (one,) = world.store.allocations.all(since=0.0)
    assert one.message == "it was cancelled"
    world.round()
    assert world.states() == ["ended", "requested"]
    assert len(world.pool.requests) == 2
    assert not {record.name for record in world.store.nodes.all()} & set(node_names(one))


def test_an_allocation_whose_agents_do_not_join_is_given_back(world: World) -> None:
    world.submit()
    world.joins = False
    for _ in range(4):
        world.round()
    assert "whose agents have not all joined yet" in world.note()
    world.round(100)
    world.round()
    world.round()
    (one,) = world.store.allocations.all(since=0.0)
    assert (one.state, world.pool.given) == ("ended", {})
    assert "did not join within 100 s" in one.message


def test_agents_that_end_before_they_join_are_a_failure_of_the_pool(world: World) -> None:
    world.submit()
    world.joins = False
    for _ in range(3):
        world.round()
    assert world.states() == ["granted"]
    world.pool.given.clear()  # as where the service refuses their token
    world.round()
    (one,) = world.store.allocations.all(since=0.0)
    assert one.message.startswith(f"{one.pool}-{one.request_id}-0, ")
    assert "did not join: it was cancelled; see the agent's output there" in one.message
    for _ in range(3):
        world.round()
    assert world.states() == ["ended"]
    world.round(FIRST_WAIT)
    assert world.states() == ["ended", "requested"]


def test_nodes_of_a_pool_that_is_no_longer_configured_are_a_warning(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.submit()
    for _ in range(3):
        world.round()
    Pools(world.store, [], world.remove, world.wake, world.clock).start()
    assert "pool ray is no longer configured, and has nodes: configure it, with max_nodes 0" in caplog.text


def test_a_budget_that_is_used_up_empties_the_nodes(world: World) -> None:
    world.limits = replace(world.limits, node_hours=1.0)
    world.restart()
    world.submit()
    for _ in range(4):
        world.round()
    (one,) = world.store.allocations.all()
    assert world.store.launch("job", 1, ",".join(f"{name}/cuda:0" for name in node_names(one)), Path("/runs/1"))
    world.round(1700)
    assert {record.mode for record in world.store.nodes.all()} == {"open"}
    world.round(200)
    assert {record.mode for record in world.store.nodes.all()} == {"draining"}
    assert world.states() == ["granted"]
    world.store.transition("job", 1, JobState.launching, JobState.failed, Reason.internal)
    world.submit("next")
    world.round()
    world.round()
    assert (world.states(), world.pool.given) == (["ended"], {})
    assert "its 1 node-hours of 30 days are used up" in world.note()
