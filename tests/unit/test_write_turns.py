"""Threads that write to the job database take turns: none of many waits so long that it fails."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import LOCKED, StoreError, shortage_of
from llama_stack_provider_trl.jobs.store import database as module
from llama_stack_provider_trl.jobs.store.database import Database

MEMBERS = 20


def test_of_many_threads_that_write_one_at_a_time_asks_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for their turns, which are given in order: SQLite's own wait is not fair, and ends."""
    asking: list[sqlite3.Connection] = []
    together: list[int] = []
    written: list[int] = []
    begin, gate = Database._begin, threading.Barrier(MEMBERS)

    def counted(self: Database, connection: sqlite3.Connection) -> None:
        asking.append(connection)
        together.append(len(asking))
        begin(self, connection)

    monkeypatch.setattr(Database, "_begin", counted)
    monkeypatch.setattr(module, "_BUSY_SECONDS", 60.0)
    with closing(Database(tmp_path / "jobs.sqlite3")) as database:

        def write(number: int) -> None:
            gate.wait(60)
            with database.transaction():
                time.sleep(0.01)
                written.append(number)
                asking.pop()

        threads = [threading.Thread(target=write, args=[number]) for number in range(MEMBERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(written) == list(range(MEMBERS))
    assert together == [1] * MEMBERS


def test_a_thread_that_gets_no_turn_finds_the_database_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BUSY_SECONDS", 0.05)
    found: list[object] = []
    with closing(Database(tmp_path / "jobs.sqlite3")) as database:

        def write() -> None:
            try:
                with database.transaction():
                    found.append("written")
            except StoreError as error:
                found.append(shortage_of(error))

        with database.transaction():
            thread = threading.Thread(target=write)
            thread.start()
            thread.join()
        write()
    assert found == [LOCKED, "written"]
