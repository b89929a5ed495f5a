"""The list of jobs in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_stack_provider_trl.jobs.states import JobState
from llama_stack_provider_trl.jobs.store import Store
from llama_stack_provider_trl.specs.events import Reason
from llama_stack_provider_trl_remote.service.views.queue import queue_page
from tests.fakes import FakeClock, job_spec


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[Store]:
    """A job in every part of the list, added in another order."""
    store = Store(tmp_path / "jobs.db", clock)

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
    yield store
    store.close()


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
