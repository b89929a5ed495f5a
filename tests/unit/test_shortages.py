"""Storage that cannot be used: how errors of the system and of SQLite are answered, here and by Llama Stack."""

from __future__ import annotations

import asyncio
import errno
import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from llama_stack_provider_trl.errors import InvalidRequest, RowsRemoved, StoreError
from llama_stack_provider_trl.jobs.store import database
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl_remote.service import server
from llama_stack_provider_trl_remote.service.http.errors import NotFound, answered
from llama_stack_provider_trl_remote.service.settings import ServiceSettings


def of_sqlite(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("the words of SQLite")
    error.sqlite_errorcode = code
    return error


CHECK = "check it (the kernel's log has the reason)"
CASES: list[tuple[Exception, int, bool]] = [
    (OSError(errno.ENOSPC, "No space left on device"), 507, False),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), 507, False),
    (OSError(errno.EROFS, "Read-only file system"), 507, False),
    (OSError(errno.EIO, "Input/output error"), 503, True),
    (TimeoutError(errno.ETIMEDOUT, "Connection timed out", "/mnt/rows"), 503, True),
    (ConnectionAbortedError(errno.ECONNABORTED, "Software caused connection abort", "/mnt/rows"), 503, True),
    (OSError(errno.EMFILE, "Too many open files"), 503, True),
    (MemoryError(), 503, True),
    (RuntimeError("can't start new thread"), 503, True),
    (of_sqlite(sqlite3.SQLITE_FULL), 507, False),
    (of_sqlite(sqlite3.SQLITE_READONLY_DBMOVED), 507, False),
    (of_sqlite(sqlite3.SQLITE_BUSY_SNAPSHOT), 503, True),
    (of_sqlite(sqlite3.SQLITE_LOCKED), 503, True),
    (of_sqlite(sqlite3.SQLITE_IOERR_WRITE), 503, True),
]


def answer_to(error: Exception) -> tuple[int, str, str | None]:
    request = Request({"type": "http", "method": "GET", "path": "/v1/x", "headers": []})
    answer = asyncio.run(answered(request, error))
    return answer.status_code, json.loads(bytes(answer.body))["detail"], answer.headers.get("retry-after")


@pytest.mark.parametrize("is_stores", [False, True])
@pytest.mark.parametrize(("error", "status", "may_repeat"), CASES)
def test_an_error_of_storage_is_answered_with_what_to_do(
    error: Exception, status: int, may_repeat: bool, is_stores: bool
) -> None:
    raised: Exception = error
    if is_stores:
        raised = StoreError("job database jobs.sqlite3: it cannot be used")
        raised.__cause__ = error
    found, detail, after = answer_to(raised)
    assert found == status
    assert (after is not None) is may_repeat
    assert "; " in detail


@pytest.mark.parametrize("is_stores", [False, True])
@pytest.mark.parametrize(("error", "status", "may_repeat"), CASES)
def test_llama_stack_gets_the_same_status_of_an_error_of_storage(
    error: Exception, status: int, may_repeat: bool, is_stores: bool
) -> None:
    pytest.importorskip("llama_stack", reason="the answers are Llama Stack's")
    from llama_stack_provider_trl.stack.protocol import answers_clearly

    @answers_clearly
    async def call(self: object) -> None:
        if is_stores:
            raise StoreError("dataset 'rows' cannot be stored") from error
        raise error

    with pytest.raises(StoreError) as caught:
        asyncio.run(call(None))
    assert caught.value.status_code == status
    if not is_stores:
        assert str(caught.value) == answer_to(error)[1], "the service has another sentence"


@pytest.mark.parametrize(
    "error",
    [TimeoutError("no answer"), ConnectionResetError(errno.ECONNRESET, "reset"), KeyError("x"), RuntimeError("x")],
    ids=repr,
)
def test_llama_stack_gets_an_error_of_another_kind_unchanged(error: Exception) -> None:
    pytest.importorskip("llama_stack", reason="the answers are Llama Stack's")
    from llama_stack_provider_trl.stack.protocol import answers_clearly

    @answers_clearly
    async def call(self: object) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        asyncio.run(call(None))
    assert caught.value is error


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.ECONNABORTED])
def test_a_disk_of_another_machine_that_gives_up_is_no_bug(number: int) -> None:
    lost = OSError(number, "the words of the system")  # of a write: it names no file
    assert answer_to(lost) == (503, f"the disk cannot be read or written: {lost}; {CHECK}", "30")


def test_a_lack_of_descriptors_memory_or_threads_is_answered_with_what_to_do() -> None:
    lacks = {
        "ulimit -n": OSError(errno.EMFILE, "Too many open files"),
        "more memory": MemoryError(),
        "ulimit -u": RuntimeError("can't start new thread"),
    }
    for advice, error in lacks.items():
        status, detail, after = answer_to(error)
        assert (status, after) == (503, "5")
        assert advice in detail


def test_a_start_on_a_disk_that_takes_nothing_prints_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def is_read_only(data_dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(data_dir))

    monkeypatch.setattr(server, "private_data_dir", is_read_only)
    assert server.serve(ServiceSettings(data_dir=tmp_path, device="cpu", port=0)) == 1
    printed = capsys.readouterr().err
    assert "the disk is read-only: " in printed
    assert "make it writable again (the kernel's log has the reason), then start the service again" in printed


def test_other_errors_keep_their_answers() -> None:
    refused = InvalidRequest("name", "x", "choose another")
    refused.__context__ = OSError(errno.ENOSPC, "of something else")
    assert answer_to(refused)[0] == 400
    missing = NotFound("there is none")
    missing.__cause__ = FileNotFoundError(errno.ENOENT, "No such file")
    assert answer_to(missing)[0] == 404
    assert answer_to(TimeoutError("no answer"))[0] == 500
    assert answer_to(sqlite3.IntegrityError("UNIQUE constraint failed"))[0] == 500


@pytest.mark.parametrize(
    "error",
    [
        StoreError("the file is damaged"),
        of_sqlite(sqlite3.SQLITE_CORRUPT),
        sqlite3.DatabaseError("file is not a database"),
        PermissionError(errno.EACCES, "Permission denied"),
        FileNotFoundError(errno.ENOENT, "No such file or directory"),
        OSError(errno.ESTALE, "Stale file handle"),
    ],
    ids=str,
)
def test_storage_that_fails_for_another_reason_is_no_bug_of_the_service(error: Exception) -> None:
    status, detail, after = answer_to(error)
    assert (status, after) == (503, "30")
    assert detail == (
        f"storage cannot be used: {error}; `trl-remote doctor` on that machine, and the log, show what is wrong with it"
    )


def test_rows_that_were_removed_while_a_job_was_stored_are_sent_again() -> None:
    error = RowsRemoved("datasets/1.jsonl was removed while job 'a' was stored")
    assert answer_to(error) == (503, f"rows were removed meanwhile: {error}; send it again", "1")


def test_a_connection_that_was_opened_on_a_read_only_disk_writes_when_the_disk_is_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect

    def opened(path: Path, **options: Any) -> sqlite3.Connection:
        """As SQLite opens a file there."""
        return connect(f"file:{path}?mode=ro", uri=True, **options)

    with closing(Store(tmp_path / "jobs.sqlite3")) as store:
        store.rows.note("0" * 64, "a", 7)
        with monkeypatch.context() as disk, ThreadPoolExecutor(1) as thread:
            disk.setattr(database, "is_read_only", lambda path: True)
            disk.setattr(database.sqlite3, "connect", opened)
            assert thread.submit(store.rows.used, "a").result() == 7
            with pytest.raises(StoreError, match="readonly"):
                thread.submit(store.rows.note, "1" * 64, "a", 7).result()
            assert thread.submit(store.rows.used, "a").result() == 7  # over another one, which is read-only too
            disk.undo()
            thread.submit(store.rows.note, "1" * 64, "a", 7).result()
        assert store.rows.used("a") == 14
