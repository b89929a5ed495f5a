"""Storage that fails in a way that no shortage explains: every route still answers 503 or 507 with what to do."""

from __future__ import annotations

import asyncio
import errno
import json
import sqlite3
from typing import Any

import pytest
from fastapi import FastAPI

from llama_stack_provider_trl.errors import RowsRemoved, StoreError
from llama_stack_provider_trl.jobs.store.database import Database
from llama_stack_provider_trl_remote.service.datasets import registration
from llama_stack_provider_trl_remote.service.http import received
from tests.required import FULL, in_full
from tests.security.in_process_calls import Answer, answer_of, calls
from tests.security.in_process_calls import app as app

pytestmark = pytest.mark.contract


def damaged() -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError("database disk image is malformed")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


ERRORS = {
    "a disk of another machine": TimeoutError(errno.ETIMEDOUT, "Connection timed out"),
    "memory": MemoryError(),
    "threads": RuntimeError("can't start new thread"),
    "damaged": damaged(),
    "not permitted": PermissionError(errno.EACCES, "Permission denied"),
    "a descriptor that went": OSError(errno.EBADF, "Bad file descriptor"),
    "stale handle of NFS": OSError(errno.ESTALE, "Stale file handle"),
    "removed": RowsRemoved("rows were removed while job 'a' was stored"),
    "of ours, without a cause": StoreError("the database cannot be used"),
}


ADVICE = {
    "removed": "; send it again",
    "a disk of another machine": "check it",
    "memory": "more memory",
    "threads": "ulimit -u",
}


FAMILIES = (*ADVICE, "damaged", "not permitted")
"""In CI: an error of each class, and each advice."""


@pytest.mark.parametrize("error", [*FAMILIES, *in_full(*(name for name in ERRORS if name not in FAMILIES))])
def test_no_route_answers_500_whatever_its_store_raises(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    def fails(self: Database) -> None:
        raise ERRORS[error]

    monkeypatch.setattr(Database, "_own", fails)

    async def answers() -> dict[str, Answer]:
        return {f"{call[0]} {call[1]}": await answer_of(app, *call) for call in calls(app)}

    found = asyncio.run(answers())
    failed = {call: answer for call, answer in found.items() if answer.status >= 500}
    wrong = [
        f"{call}: {answer.status} {answer.text[:200]}"
        for call, answer in failed.items()
        if answer.status not in (503, 507) or (answer.status == 503 and not int(answer.headers.get("retry-after", 0)))
    ]
    assert not wrong, "\n".join(wrong)
    assert len(failed) > len(found) / 3, "most routes read the database"
    shown = failed["GET /v1/post-training/job/status?job_uuid=waiting"]
    assert ADVICE.get(error, "`trl-remote doctor` on that machine") in json.loads(shown.text)["detail"]


LARGE = json.dumps(
    {
        "dataset_id": "large",
        "purpose": "post-training/messages",
        "source": {"type": "rows", "rows": [{"prompt": "x" * 1000, "completion": "y"}] * 1500},
    }
).encode()
OF_BODIES = {
    "no descriptors": (OSError(errno.EMFILE, "Too many open files"), 503),
    "a failing disk": (OSError(errno.EIO, "Input/output error"), 503),
    "a disk of another machine": (OSError(errno.ETIMEDOUT, "Connection timed out"), 503),
    "a read-only disk": (OSError(errno.EROFS, "Read-only file system"), 507),
    "a full disk": (OSError(errno.ENOSPC, "No space left on device"), 507),
    "no memory": (MemoryError(), 503),
    "no threads": (RuntimeError("can't start new thread"), 503),
}


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (place, name)
        for number, name in enumerate(OF_BODIES)
        for turn, place in enumerate(("the file", "its bytes", "the child"))
        if FULL or turn == number % 3
    ],
)
def test_a_large_body_that_cannot_be_spooled_or_parsed_is_answered_as_elsewhere(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, place: str, name: str
) -> None:
    error, status = OF_BODIES[name]

    def fails(*_: object, **__: object) -> Any:
        raise error

    if place == "the file":
        monkeypatch.setattr(registration.tempfile, "TemporaryDirectory", fails)
    elif place == "its bytes":
        monkeypatch.setattr(received, "_fill", fails)
    else:
        monkeypatch.setattr(registration, "run", fails)
    answer = asyncio.run(answer_of(app, "POST", "/v1/datasets", LARGE))
    assert answer.status == status, answer.text
    assert "; " in json.loads(answer.text)["detail"]
    assert (status == 503) == ("retry-after" in answer.headers)


def test_a_small_body_for_which_there_is_no_memory_is_answered_as_elsewhere(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Any:
        raise MemoryError

    monkeypatch.setattr(received, "parse", fails)
    answer = asyncio.run(answer_of(app, "POST", "/v1/post-training/job/cancel", b'{"job_uuid": "a"}'))
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")
    assert "memory is exhausted" in answer.text
