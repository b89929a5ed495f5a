"""CancelOrders: cancels that the database could not record, in a file that needs no space."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import StoreError, shortage_of
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.database import Database
from llama_stack_provider_trl.jobs.store.related.cancels import CancelOrder, CancelOrders
from llama_stack_provider_trl.jobs.store.store import Store
from tests.fakes import FakeClock, job_spec

ORDER = CancelOrder("a", 7, "its search was cancelled")


def test_an_order_is_found_by_another_process_until_it_is_removed(tmp_path: Path) -> None:
    ours, theirs = CancelOrders(tmp_path / "cancel-orders"), CancelOrders(tmp_path / "cancel-orders")
    ours.prepare()
    assert ours.add(ORDER)
    assert ours.add(ORDER)
    assert theirs.pending() == [ORDER]
    theirs.remove(ORDER)
    assert CancelOrders(tmp_path / "cancel-orders").pending() == []


def test_the_file_keeps_its_size_and_has_no_holes(tmp_path: Path) -> None:
    orders = CancelOrders(tmp_path / "cancel-orders")
    orders.prepare()
    before = os.stat(tmp_path / "cancel-orders")
    assert before.st_blocks * 512 >= before.st_size
    for number in range(10):
        assert orders.add(CancelOrder(str(number) * 128, 1, "x" * 10_000))
    assert os.stat(tmp_path / "cancel-orders").st_size == before.st_size
    assert len(CancelOrders(tmp_path / "cancel-orders").pending()) == 10


def test_a_full_file_or_none_leaves_orders_in_memory(tmp_path: Path) -> None:
    orders = CancelOrders(tmp_path / "cancel-orders")
    assert not orders.add(ORDER)
    assert orders.pending() == [ORDER]
    orders.remove(ORDER)
    assert orders.pending() == []
    orders.prepare()
    kept = [orders.add(CancelOrder(str(number), 1)) for number in range(300)]
    assert kept == [True] * 256 + [False] * 44
    assert len(orders.pending()) == 300


def test_a_torn_order_is_ignored(tmp_path: Path) -> None:
    orders = CancelOrders(tmp_path / "cancel-orders")
    orders.prepare()
    with open(tmp_path / "cancel-orders", "r+b") as file:
        file.write(b'["a", 1')
    assert orders.pending() == []
    assert orders.add(ORDER)


def full_database(store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make every write of the store fail as on a full disk; returns what ends that."""
    begin = Database._begin

    def fail(database: Database, connection: sqlite3.Connection) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    monkeypatch.setattr(Database, "_begin", fail)
    return lambda: monkeypatch.setattr(Database, "_begin", begin)


def test_a_kept_cancel_is_recorded_when_the_database_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Store(tmp_path / "jobs.sqlite3")) as store:
        store.cancels.prepare()
        store.add_job(job_spec("a"), "digest")
        free = full_database(store, monkeypatch)
        assert store.request_cancel("a").state is JobState.cancelled
        with pytest.raises(StoreError) as caught:
            store.record_kept_cancels()
        assert caught.value.status_code == 507
        free()
        with closing(Store(tmp_path / "jobs.sqlite3")) as other:  # of the process that supervises
            other.record_kept_cancels()
        assert store.get("a").state is JobState.cancelled
        assert store.cancels.pending() == []


def test_a_kept_cancel_does_not_concern_a_later_job_of_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Store(tmp_path / "jobs.sqlite3")) as store:
        store.cancels.prepare()
        store.add_job(job_spec("a"), "digest")
        store.cancels.add(CancelOrder("a", store.get("a").age))
        store.request_cancel("a")
        store.delete("a")
        store.add_job(job_spec("a"), "digest")
        store.record_kept_cancels()
        assert store.get("a").state is JobState.scheduled
        assert store.cancels.pending() == []


def test_a_kept_cancel_is_recorded_where_the_clock_was_set_back_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of submission of a job that waits is corrected then."""
    clock = FakeClock()
    with closing(Store(tmp_path / "jobs.sqlite3", clock)) as store:
        store.cancels.prepare()
        store.add_job(job_spec("a"), "digest")
        free = full_database(store, monkeypatch)
        store.request_cancel("a")
        free()
        clock.advance(-3600)
        assert store.correct_waits(3600, 60.0) == 1
        store.record_kept_cancels()
        assert store.get("a").state is JobState.cancelled


def test_a_kept_cancel_of_a_damaged_record_holds_up_no_other_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Store(tmp_path / "jobs.sqlite3")) as store:
        store.cancels.prepare()
        for name in "ab":
            store.add_job(job_spec(name), "digest")
        free = full_database(store, monkeypatch)
        for name in "ab":
            store.request_cancel(name)
        free()
        with closing(sqlite3.connect(store.path)) as database, database:
            (spec,) = database.execute("SELECT spec FROM jobs WHERE job_uuid = 'a'").fetchone()
            database.execute("UPDATE jobs SET spec = '{}' WHERE job_uuid = 'a'")
        store.record_kept_cancels()
        assert store.get("b").state is JobState.cancelled
        assert [order.job_uuid for order in store.cancels.pending()] == ["a"]
        with closing(sqlite3.connect(store.path)) as database, database:
            database.execute("UPDATE jobs SET spec = ? WHERE job_uuid = 'a'", (spec,))
        store.record_kept_cancels()
        assert (store.get("a").state, store.cancels.pending()) == (JobState.cancelled, [])


def test_a_cancel_that_is_in_memory_only_is_not_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Store(tmp_path / "jobs.sqlite3")) as store:
        store.add_job(job_spec("a"), "digest")
        free = full_database(store, monkeypatch)
        with pytest.raises(StoreError, match="repeat the cancel") as caught:
            store.request_cancel("a")
        assert shortage_of(caught.value) is not None
        free()
        store.record_kept_cancels()
        assert store.get("a").state is JobState.cancelled


def test_writers_wait_briefly_while_a_lock_was_just_waited_for_without_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_stack_provider_trl.jobs.store.database._LOCKED_SECONDS", 3600.0)
    with closing(Store(tmp_path / "jobs.sqlite3")) as store, closing(sqlite3.connect(store.path)) as other:
        waits: list[str] = []
        monkeypatch.setattr("llama_stack_provider_trl.jobs.store.database._BUSY_SECONDS", 0.2)
        store.close()
        connection = store.database._connection()
        connection.set_trace_callback(waits.append)
        other.execute("BEGIN EXCLUSIVE")
        for _ in range(2):
            with pytest.raises(StoreError, match="locked") as caught:
                store.add_job(job_spec("a"), "digest")
            assert caught.value.status_code == 503
        assert [text for text in waits if "busy_timeout" in text] == [
            "PRAGMA busy_timeout = 100",
            "PRAGMA busy_timeout = 200",
        ]
        other.execute("ROLLBACK")
        assert store.add_job(job_spec("a"), "digest")
