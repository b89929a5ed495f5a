"""Jobs that come after others, in the store and through the supervisor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import InvalidRequest, JobConflict
from llama_stack_provider_trl.jobs.decisions.placement import Node
from llama_stack_provider_trl.jobs.decisions.prediction import predict
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.monitoring.totals import WAIT
from llama_stack_provider_trl.jobs.store.records import Chain, ChainedJob
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.specs.events import Failed, Finished, Progress, Reason, Started
from llama_stack_provider_trl.stack.responses import status_response
from tests.fakes import FakeClock, FakeLauncher, job_spec

CPU = [Node("head", ("cpu",), head=True)]


class World:
    """A data directory with a supervisor whose passes are made by hand."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = FakeClock()
        self.store, self.launcher = Store(root / "jobs.db", self.clock), FakeLauncher()
        self.store.chains._clock = self.clock
        self.restart()

    def restart(self) -> None:
        """Another process takes over: nothing but the store decides."""
        self.supervisor = Supervisor(self.store, self.launcher, ["cpu"], self.root)

    def add(self, name: str, *after: str, **changes: object) -> None:
        fields = {"checkpoint_dir": self.root / "checkpoints" / "out" / name, "after": after, **changes}
        self.store.add_job(job_spec(name, **fields), "digest")

    def tick(self) -> None:
        self.clock.advance(5)
        self.supervisor.tick()

    def start(self, name: str) -> None:
        self.tick()
        self.launcher.emit(f"{name}-1", Started(pid=1, device="cpu", versions={}))
        self.tick()

    def end(self, name: str, failure: Failed | None = None) -> None:
        self.launcher.emit(f"{name}-1", failure or Finished(step=4))
        self.launcher.exit(f"{name}-1", 1 if failure else 0)
        self.tick()

    def states(self) -> dict[str, str]:
        return {name: self.store.get(name).state.value for name in self.store.names()}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.store.close()


def test_a_job_waits_with_the_reason_and_starts_when_the_others_have_completed(world: World) -> None:
    world.add("a")
    world.add("b", "a")
    world.start("a")
    assert world.store.get("b").detail == "waits for job a (in_progress)"
    assert world.launcher.started == ["a-1"]
    world.end("a")
    world.tick()
    assert world.states() == {"a": "completed", "b": "launching"}
    assert world.store.chains.of_job("b") == Chain((ChainedJob("a", JobState.completed),), ())
    world.store.delete("a")
    assert world.store.chains.of_job("b").after == (ChainedJob("a", None),)
    world.tick()
    assert world.states() == {"b": "launching"}


def test_it_takes_no_device_from_younger_jobs_meanwhile(world: World) -> None:
    world.add("paused")
    world.store.request_pause("paused")
    world.add("b", "paused", priority=2)
    world.add("free")
    world.tick()
    assert world.states() == {"paused": "paused", "b": "scheduled", "free": "launching"}
    assert world.store.get("b").detail == "waits for job paused (paused)"
    world.store.request_resume("paused")
    world.end("free")
    world.start("paused")
    world.end("paused")
    world.tick()
    assert world.states()["b"] == "launching"


def test_its_patience_begins_when_the_others_have_completed(world: World) -> None:
    world.add("a")
    world.add("b", "a")
    world.start("a")
    world.clock.advance(7200)
    world.store.request_pause("b")
    world.end("a")
    world.store.request_resume("b")
    world.store.chains.advance(lambda *ended: pytest.fail(str(ended)))
    released = world.clock()
    world.clock.advance(60)
    (waiting,) = world.store.queue()
    assert (waiting.job_uuid, waiting.scheduled_at) == ("b", released)
    before = world.store.totals.all()[WAIT][("sum",)]
    world.tick()
    assert world.states()["b"] == "launching"
    assert world.store.totals.all()[WAIT][("sum",)] - before == world.clock() - released


@pytest.mark.parametrize("restarts", [False, True])
def test_a_failure_is_passed_on_by_name_to_the_end_of_the_chain(world: World, restarts: bool) -> None:
    world.add("a")
    world.add("b", "a")
    world.add("c", "b")
    world.start("a")
    if restarts:
        world.restart()
    world.end("a", Failed(reason=Reason.invalid_dataset, message="row 3"))
    assert world.states() == dict.fromkeys("abc", "failed")
    last = world.store.get("c")
    assert (last.reason, last.message) == (
        Reason.predecessor_failed,
        "job 'b', which it waited for, failed (predecessor_failed)",
    )
    assert "submit that one again" in last.advice


def test_a_cancel_fails_by_name_or_cascades(world: World) -> None:
    world.add("a")
    world.add("b", "a")
    world.add("c", "a", cancel_with=True)
    world.store.request_cancel("a")
    world.tick()
    assert world.states() == {"a": "cancelled", "b": "failed", "c": "cancelled"}
    assert world.store.get("b").message == "job 'a', which it waited for, was cancelled"


def test_a_paused_job_stays_paused_and_is_decided_on_when_it_resumes(world: World) -> None:
    world.add("a")
    world.add("b", "a")
    world.store.request_pause("b")
    world.store.request_cancel("a")
    world.tick()
    assert world.states()["b"] == "paused"
    world.store.request_resume("b")
    world.tick()
    assert world.states()["b"] == "failed"


def test_a_waiting_job_can_be_cancelled(world: World) -> None:
    world.add("a")
    world.add("b", "a")
    world.store.request_cancel("b")
    world.tick()
    assert world.states() == {"a": "launching", "b": "cancelled"}


def test_a_job_that_others_wait_for_is_not_deleted(world: World) -> None:
    world.add("a")
    world.add("b", "a")
    world.store.request_pause("b")
    world.store.request_cancel("a")
    with pytest.raises(JobConflict, match="cannot be deleted while b wait for it or use its checkpoint"):
        world.store.delete("a")
    world.store.request_cancel("b")
    world.store.delete("a")
    assert world.states() == {"b": "cancelled"}
    world.store.delete("b")


def test_an_unknown_job_and_one_that_can_never_complete_are_refused_by_name(world: World) -> None:
    with pytest.raises(InvalidRequest, match=r"after=.*there is no job 'typo' here"):
        world.add("b", "typo")
    world.add("a")
    world.store.request_cancel("a")
    with pytest.raises(InvalidRequest, match="job 'a' is cancelled, so this one could never start"):
        world.add("b", "a")
    assert world.states() == {"a": "cancelled"}


def test_the_same_request_again_is_the_same_job_whatever_became_of_the_others(world: World) -> None:
    world.add("a")
    world.add("b", "a")
    world.store.request_cancel("a")
    world.add("b", "a")
    with pytest.raises(JobConflict, match="exists already"):
        world.store.add_job(
            job_spec("a", checkpoint_dir=world.root / "checkpoints" / "out" / "a", after=("b",)), "another"
        )


def test_a_job_after_one_that_has_completed_starts_at_once(world: World) -> None:
    world.add("a")
    world.start("a")
    world.end("a")
    world.add("b", "a")
    world.tick()
    assert world.states()["b"] == "launching"


def test_a_retry_does_not_wait_again(world: World) -> None:
    world.add("a")
    world.start("a")
    world.end("a")
    world.add("b", "a", retries=1)
    world.tick()
    world.store.delete("a")
    world.end("b", Failed(reason=Reason.rank_failed, message="gone"))
    world.clock.advance(60)
    world.tick()
    assert (world.states(), world.launcher.started) == ({"b": "launching"}, ["a-1", "b-1", "b-2"])


def test_a_pass_over_a_thousand_waiting_jobs_is_one_query_and_writes_steps_seldom(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.add("a")
    for number in range(1000):
        world.add(f"b-{number}", "a")
    world.start("a")
    queries: list[str] = []
    database = world.store.database
    select, transaction = database.select, database.transaction
    monkeypatch.setattr(database, "select", lambda name, values: queries.append(name) or select(name, values))
    monkeypatch.setattr(database, "transaction", lambda: queries.append("write") or transaction())
    world.launcher.emit("a-1", Progress(step=1, epoch=0.1, metrics={"loss": 2.0}, peak_memory_bytes=1))
    world.store.chains.advance(lambda *job: None)  # 0 seconds after the last details
    assert queries == ["select_blocked"]
    plan = world.store.database._connection().execute(f"EXPLAIN QUERY PLAN {_query('select_blocked')}")
    assert not [row["detail"] for row in plan if row["detail"].startswith("SCAN")]


def _query(name: str) -> str:
    from llama_stack_provider_trl.jobs.store.database import _queries

    return _queries()[name]


def test_the_status_names_the_jobs_before_and_after(world: World) -> None:
    for name, *after in ("a",), ("b",), ("c", "b", "a"):
        world.add(name, *after)
    shown = {
        name: status_response(world.store.get(name), [], chain=world.store.chains.of_job(name)).resources_allocated
        for name in "abc"
    }
    assert shown["c"]["after"] == [{"job_uuid": name, "state": "scheduled"} for name in "ba"]
    assert shown["a"]["before"] == [{"job_uuid": "c", "state": "scheduled"}]
    assert (shown["a"]["after"], shown["c"]["before"]) == ([], [])


def test_starts_are_predicted_along_the_chain_as_far_as_they_are_known(world: World) -> None:
    for name, *after in ("a",), ("b", "a"), ("c", "b"):
        world.add(name, *after)
    now = world.clock()
    starts = predict(world.store.ahead.waiting(10), CPU, {}, [], now)
    assert {name: start.at for name, start in starts.items()} == {"a": now, "b": None, "c": None}
    assert starts["b"].why == "it waits for job a, which starts before it and has not trained yet"
    assert starts["c"].why == "it waits for job b"
