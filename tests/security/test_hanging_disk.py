"""A disk whose writes hang: what needs them waits in threads, and every other call is answered."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from llama_stack_provider_trl.jobs.store.database import Database
from llama_stack_provider_trl.system.logs import FileWriter, PrivateFileHandler
from llama_stack_provider_trl_remote.service.app import make_app
from llama_stack_provider_trl_remote.service.context import Service
from llama_stack_provider_trl_remote.service.security import audit as audit_module
from llama_stack_provider_trl_remote.service.security.audit import AuditLog, Refusal, Refusals
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import ndjson
from tests.security.guarded import report
from tests.security.in_process_calls import Answer, answer_of, calls

TOKEN = "token-of-the-operator"
_CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.utime", "os.truncate", "os.link", "os.symlink"}
"""What Python reports of a change in a file system, besides an `open` for writing."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Disk:
    """Notices what an event loop writes, and lets other threads wait while the disk hangs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.loop: int | None = None
        """The thread of the event loop; None: nothing is noticed."""
        self.by_loop: list[str] = []
        self.hangs = False
        self.asked, self.answers = threading.Event(), threading.Event()

    def write(self) -> None:
        if self.loop == threading.get_ident():
            self.by_loop.append("".join(traceback.format_stack(limit=12)))
        elif self.hangs:
            self.asked.set()
            assert self.answers.wait(60)

    def notice(self, event: str, arguments: tuple[Any, ...]) -> None:
        """What `sys.addaudithook` calls."""
        if self.loop is None:
            return
        if event == "open":
            path, _, flags = arguments
            is_write = isinstance(flags, int) and bool(flags & _WRITING)
        else:
            path, is_write = arguments[0] if arguments else "", event in _CHANGES
        if is_write and isinstance(path, str | bytes):  # one relative to a descriptor may lie anywhere
            name = os.fsdecode(path)
            if not os.path.isabs(name) or name.startswith(str(self.root)):
                self.write()


_disks: list[Disk] = []
_hooked: list[bool] = []
"""Whether the hook was added: it cannot be removed."""


def _notice(event: str, arguments: tuple[Any, ...]) -> None:
    for disk in _disks:
        disk.notice(event, arguments)


@pytest.fixture
def app(tmp_path: Path) -> Iterator[FastAPI]:
    """A service with a dataset, a job that waits and a node behind its routes."""
    (tmp_path / "data").mkdir(mode=0o700)
    settings = ServiceSettings(
        data_dir=tmp_path / "data", device="cpu", isolation="off", warm_start=False, api_token=TOKEN
    )
    service = Service(settings)
    service.audit.open()
    service.blobs.prepare()
    service.datasets.prepare()
    app = make_app(service)

    async def fill() -> None:
        rows = {"purpose": "post-training/messages", "source": {"type": "rows", "rows": QUESTIONS}}
        for path, body in (
            ("/v1/datasets", {"dataset_id": "questions", **rows}),
            ("/v1/post-training/supervised-fine-tune", sft("waiting", "questions")),
            ("/v1/nodes", report("mine")),
        ):
            answer = await answer_of(app, "POST", path, json.dumps(body).encode(), token=TOKEN)
            assert answer.status == 200, answer.text
        upload = f"/v1/blobs/{DIGEST}", ndjson(QUESTIONS), "application/octet-stream"
        answer = await answer_of(app, "PUT", *upload, token=TOKEN)
        assert answer.status == 201, answer.text

    asyncio.run(fill())
    yield app
    service.audit.close()
    service.close()


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    found = Disk(tmp_path)
    if not _hooked:
        sys.addaudithook(_notice)
        _hooked.append(True)
    _disks.append(found)

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: int, *arguments: Any) -> Any:
            if found.loop is not None and stat.S_ISREG(os.fstat(file).st_mode):
                found.write()
            return function(file, *arguments)

        return call

    for name in ("write", "pwrite", "fsync", "ftruncate"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    begin = Database._begin

    def begins(self: Database, connection: Any) -> None:
        if found.loop is not None:
            found.write()
        begin(self, connection)

    monkeypatch.setattr(Database, "_begin", begins)
    yield found
    found.answers.set()
    found.loop = None
    _disks.clear()


def on_loop(disk: Disk, work: Callable[[], Any]) -> Any:
    async def run() -> Any:
        disk.loop = threading.get_ident()
        try:
            return await work()
        finally:
            disk.loop = None

    return asyncio.run(run())


@pytest.mark.contract
def test_no_route_writes_on_the_event_loop(app: FastAPI, disk: Disk) -> None:
    found: dict[str, Answer] = {}

    async def answers() -> None:
        for call in calls(app):
            found[f"{call[0]} {call[1]}"] = await answer_of(app, *call, token=TOKEN)
            assert not disk.by_loop, f"{call[0]} {call[1]}:\n{disk.by_loop[0]}"

    on_loop(disk, answers)
    good = [call for call, answer in found.items() if answer.status < 300]
    assert len(good) > len(found) / 3, "most routes find something"


DIGEST = hashlib.sha256(ndjson(QUESTIONS)).hexdigest()
MORE = ndjson([*QUESTIONS, {"prompt": "Why?", "completion": "So."}])
LARGE = [{"prompt": "x" * 1000, "completion": str(number)} for number in range(1500)]


def dataset(name: str, rows: list[Any]) -> bytes:
    source = {"type": "rows", "rows": rows}
    return json.dumps({"dataset_id": name, "purpose": "post-training/messages", "source": source}).encode()


WAITING = {
    "rows that are here": (("HEAD", f"/v1/blobs/{DIGEST}"), 200),
    "an upload": (("PUT", f"/v1/blobs/{hashlib.sha256(MORE).hexdigest()}", MORE, "application/octet-stream"), 201),
    "a registration": (("POST", "/v1/datasets", dataset("small", QUESTIONS[:2])), 200),
    "a large registration": (("POST", "/v1/datasets", dataset("large", LARGE)), 200),
    "a cancel": (("POST", "/v1/post-training/jobs/waiting/cancel"), 200),
    "a login": (("POST", "/login", f"token={TOKEN}".encode(), "application/x-www-form-urlencoded"), 303),
}
AT_ONCE = {
    "a wrong token": (("GET", "/v1/nodes"), 401),
    "a login with a wrong token": (("POST", "/login", b"token=wrong", "application/x-www-form-urlencoded"), 401),
}


@pytest.mark.contract
@pytest.mark.parametrize("name", [*WAITING, *AT_ONCE])
def test_health_is_answered_while_a_call_waits_for_the_disk(app: FastAPI, disk: Disk, name: str) -> None:
    call, status = {**WAITING, **AT_ONCE}[name]

    async def run() -> tuple[Answer, Answer]:
        disk.hangs = True
        waiting = asyncio.create_task(answer_of(app, *call, token=TOKEN if name in WAITING else "wrong"))
        try:
            assert await asyncio.to_thread(disk.asked.wait, 20), "it has not asked the disk"
            if name in AT_ONCE:
                await waiting
            health = await answer_of(app, "GET", "/v1/health")
            assert waiting.done() == (name in AT_ONCE)
        finally:
            disk.answers.set()
        return health, await waiting

    health, answer = on_loop(disk, run)
    assert not disk.by_loop, disk.by_loop[0]
    assert (health.status, answer.status) == (200, status), answer.text


@pytest.mark.contract
def test_a_browser_is_answered_while_the_login_of_another_waits_for_the_disk(app: FastAPI, disk: Disk) -> None:
    login = ("POST", "/login", f"token={TOKEN}".encode(), "application/x-www-form-urlencoded")

    async def run() -> Answer:
        cookie = (await answer_of(app, *login)).headers["set-cookie"].partition(";")[0]
        disk.hangs = True
        waiting = asyncio.create_task(answer_of(app, *login))
        try:
            assert await asyncio.to_thread(disk.asked.wait, 20)
            # In a thread, so that a lock that is held there ends the test, and not the event loop.
            reading = asyncio.create_task(asyncio.to_thread(_caller_of, app, cookie))
            await asyncio.wait([reading], timeout=5)
            assert reading.done(), "the event loop would wait"
            answer = await answer_of(app, "GET", "/v1/post-training/jobs", cookie=cookie)
        finally:
            disk.answers.set()
        await waiting
        return answer

    assert on_loop(disk, run).status == 200
    assert not disk.by_loop, disk.by_loop[0]


def _caller_of(app: FastAPI, cookie: str) -> object:
    return app.state.sessions.caller(cookie.partition("=")[2])


def test_refusals_are_counted_and_held_in_bounds_while_the_disk_hangs(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "_QUEUED", 10)
    log = AuditLog(tmp_path / "audit", 1 << 20, 4)
    log.open()

    async def refused() -> None:
        disk.hangs = True
        refusals = Refusals(log)
        for number in range(100):
            refusals.add(Refusal(401, "", None, None, f"10.0.0.{number}", "GET", "/v1/nodes"))
        assert log._writer.pending == 10
        disk.answers.set()
        assert await asyncio.to_thread(log._writer.drain, 20)
        refusals.flush()
        assert refusals._timer is not None
        refusals._timer.cancel()

    on_loop(disk, refused)
    log.close()
    lines, _ = log.page(0, 1000)
    assert sum(line.get("count", 1) for line in lines) == 100


def test_nobody_who_logs_waits_for_the_disk_of_the_log(tmp_path: Path) -> None:
    path, answers = tmp_path / "logs" / "service.log", threading.Event()

    class Hanging(PrivateFileHandler):
        def emit(self, record: logging.LogRecord) -> None:
            assert answers.wait(60)
            super().emit(record)

    writer = FileWriter(Hanging(path), most=3)
    logger = logging.Logger("of a hanging disk")
    logger.addHandler(writer)
    for number in range(5):
        logger.warning("entry %d", number)
    assert path.read_text() == ""
    answers.set()
    writer.flush()
    logger.warning("entry 5")
    writer.close()
    assert path.read_text().splitlines() == [
        *(f"entry {number}" for number in range(3)),
        "2 entries were lost: the disk hung",
        "entry 5",
    ]
