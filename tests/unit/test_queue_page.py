"""The list of jobs in the order in which they run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from llama_stack_provider_trl.jobs.decisions.placement import Node
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.events import Prepared, Progress, Reason, Started
from llama_stack_provider_trl_remote.service.http.bodies import QueueRow
from llama_stack_provider_trl_remote.service.pages.list_view import start_text, wait_text
from llama_stack_provider_trl_remote.service.views.queue import queue_page, start_of
from tests.fakes import FakeClock, job_spec


@pytest.fixture
def store(store: Store, tmp_path: Path, clock: FakeClock) -> Store:
    """A job in every part of the list, added in another order."""

    def add(name: str, priority: int = 0) -> None:
        store.add_job(job_spec(name, priority=priority), "digest")

    for name in ("ended-first", "ended-last", "paused", "waits", "waits-longer", "retried-late", "retried", "runs"):
        add(name)
    add("waits-urgently", priority=5)
    add("paused-urgently", priority=5)
    for name, wait in (("retried-late", 900.0), ("retried", 300.0)):
        store.launch(name, 1, "cpu", tmp_path / name)
        assert store.retry(store.get(name), Reason.rank_failed, "rank 0 ended", wait)
    store.launch("runs", 1, "cpu", tmp_path / "runs")
    for name in ("paused", "paused-urgently"):
        store.request_pause(name)
    for name in ("ended-first", "ended-last"):
        clock.now += 10
        store.request_cancel(name)
    return store


def names(
    store: Store, state: JobState | None = None, search: str = "", limit: int = 100, offset: int = 0
) -> list[str]:
    return [row.job_uuid for row in queue_page(store, state, search, limit, offset).data]


def test_jobs_are_listed_as_they_run_and_those_that_have_ended_come_last(store: Store) -> None:
    assert names(store) == [
        *("runs", "waits-urgently", "waits", "waits-longer", "retried", "retried-late"),
        *("paused-urgently", "paused", "ended-last", "ended-first"),
    ]


def test_a_job_whose_wait_for_a_retry_is_over_waits_like_the_others(store: Store, clock: FakeClock) -> None:
    clock.now += 400
    assert names(store)[1:6] == ["waits-urgently", "waits", "waits-longer", "retried", "retried-late"]
    assert names(store, search="retried") == ["retried", "retried-late"]
    clock.now += 600
    assert names(store, search="retried") == ["retried-late", "retried"]  # in the order of their arrival


def test_each_waiting_job_has_its_reason(store: Store) -> None:
    rows = {row.job_uuid: row for row in queue_page(store, None, None, 100, 0).data}
    assert rows["retried"].detail == "attempt 1 ended (rank_failed); the next one starts in 300 s: rank 0 ended"


def test_pages_follow_each_other_and_filters_count(store: Store) -> None:
    assert [*names(store, limit=4), *names(store, limit=4, offset=4), *names(store, limit=4, offset=8)] == names(store)
    found = queue_page(store, JobState.paused, "URGENT", 100, 0)
    assert ([row.job_uuid for row in found.data], found.matching) == (["paused-urgently"], 1)
    assert found.counts == {"scheduled": 5, "launching": 1, "paused": 2, "cancelled": 2}
    assert names(store, search="_") == []
    assert queue_page(store, None, None, 2, 0).matching == 10


NODES = [Node("head", ("cpu",), head=True)]


def starts(store: Store, clock: FakeClock) -> dict[str, float | str | None]:
    """Waiting job -> seconds until it starts, or why that is not known."""
    rows = queue_page(store, JobState.scheduled, None, 300, 0, NODES, clock.now).data
    return {
        row.job_uuid: row.unpredicted if row.predicted_start is None else row.predicted_start.timestamp() - clock.now
        for row in rows
    }


def do_steps(store: Store, clock: FakeClock) -> None:
    """Have the running job do 20 of its 50 steps, in 40 seconds."""
    begun = [
        Started(pid=1, device="cpu", versions={}),
        Prepared(total_steps=50, num_rows=1, trainable_parameters=1, total_parameters=1, time=clock.now),
    ]
    clock.now += 40
    step = Progress(step=20, epoch=1.0, metrics={"loss": 1.0}, peak_memory_bytes=1, time=clock.now)
    store.apply_events("runs", 1, [*begun, step], 10)


def test_waiting_jobs_have_their_start_as_far_as_it_is_known(store: Store, clock: FakeClock) -> None:
    assert starts(store, clock)["waits"] == "runs has done no step yet"
    do_steps(store, clock)
    found = starts(store, clock)
    assert found.pop("waits-urgently") == 60.0
    assert set(found.values()) == {"waits-urgently starts before it and has not trained yet"}
    rows = queue_page(store, None, None, 100, 0, NODES, clock.now).data
    assert {row.state for row in rows if row.predicted_start or row.unpredicted} == {"scheduled"}
    assert not [row for row in queue_page(store, None, None, 100, 0).data if row.predicted_start or row.unpredicted]
    for row in rows:  # the page of a job has what the list has
        start = start_of(store, row.job_uuid, NODES, (), now=clock.now, preempts=False)
        assert (start.predicted_start, start.unpredicted) == (row.predicted_start, row.unpredicted)
    assert start_of(store, "waits", (), (), preempts=False).predicted_start is None


def test_a_critical_job_starts_at_once_where_it_preempts(store: Store, clock: FakeClock) -> None:
    store.add_job(job_spec("critical", priority=2), "digest")

    store.request_cancel("waits-urgently")

    def start(*, preempts: bool) -> QueueRow:
        return queue_page(store, None, "critical", 9, 0, NODES, clock.now, preempts=preempts).data[0]

    assert start(preempts=False).unpredicted == "runs has done no step yet"
    assert start(preempts=True).predicted_start == datetime.fromtimestamp(clock.now, UTC)


def test_the_paused_job_that_is_queued_again_has_the_duration_that_it_had_left(store: Store, clock: FakeClock) -> None:
    do_steps(store, clock)
    store.request_pause("runs")
    store.transition("runs", 1, JobState.pausing, JobState.paused)
    store.request_resume("runs")
    for name in ("waits-urgently", "waits-longer", "retried", "retried-late"):
        store.request_cancel(name)
    assert starts(store, clock) == {"runs": "waits starts before it and has not trained yet", "waits": 0.0}
    store.request_cancel("waits")
    assert starts(store, clock) == {"runs": 0.0}


def test_only_the_first_jobs_of_a_long_queue_are_predicted(store: Store, clock: FakeClock) -> None:
    for number in range(200):
        store.add_job(job_spec(f"more-{number}"), "digest")
    assert starts(store, clock)["more-199"] == "more than 200 jobs are before it"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "starts in a moment"),
        (50, "starts in about a minute"),
        (12 * 60, "starts in about 12 min"),
        (5 * 3600, "starts in about 5 h"),
        (86_400 * 3, "starts in about 3 days"),
    ],
)
def test_a_start_is_shown_as_roughly_as_it_is_known(seconds: int, text: str) -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    assert start_text(QueueRow(job_uuid="a", predicted_start=now + timedelta(seconds=seconds)), now) == text
    assert start_text(QueueRow(job_uuid="a", unpredicted="it rains"), now) == "start not known: it rains"
    assert start_text(QueueRow(job_uuid="a"), now) == ""
    later = QueueRow(job_uuid="a", predicted_start=now + timedelta(seconds=50))
    assert wait_text(later, "waiting for cpu", now) == "starts in about a minute; waiting for cpu"
    assert wait_text(later, "", now) == "starts in about a minute; waiting to be placed"
    rainy = QueueRow(job_uuid="a", unpredicted="it rains")
    assert wait_text(rainy, "waiting for cpu", now) == "waiting for cpu; start not known: it rains"
