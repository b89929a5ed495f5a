"""Threads that write to the job database take turns: none of many waits so long that it fails."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import LOCKED, StoreError, shortage_of
from llama_stack_provider_trl.jobs.store import database as module
from llama_stack_provider_trl.jobs.store.database import Database

MEMBERS = 20


def test_no_thread_of_many_that_write_waits_for_longer_than_the_others_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BUSY_SECONDS", 1.0)
    failures: list[StoreError] = []
    with closing(Database(tmp_path / "jobs.sqlite3")) as database:

        def write() -> None:
            try:
                for _ in range(8):
                    with database.transaction():
                        time.sleep(0.01)
            except StoreError as error:
                failures.append(error)

        threads = [threading.Thread(target=write) for _ in range(MEMBERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


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
