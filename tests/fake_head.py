"""The service as a node's agent calls it, played in this process: what it has, what it wants, and its troubles."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.errors import ServiceRefusal, ServiceUnreachable
from llama_stack_provider_trl.system.files import sha256_of
from llama_stack_provider_trl_remote.wire import (
    CheckpointAnswer,
    CheckpointReport,
    Joined,
    NodeReport,
    Orders,
    Poll,
    TaskOrder,
    TaskReport,
)

URL = "http://head:8322"


class FakeHead:
    """Keeps events, logs, answers and checkpoints in memory. A poll answers at once if there is something new, and else
    when `order` or `release` is called."""

    def __init__(self) -> None:
        self.url = URL
        self.sent: str | None = None
        """The credential that the calls have; None: the token that joins."""
        self.joined: list[NodeReport] = []
        self.joined_with: list[str | None] = []
        self.issued = 0
        self.polls: list[Poll] = []
        self.wanted: dict[str, TaskOrder] = {}
        self.revision = 0
        self.over: set[str] = set()
        """Jobs that have ended."""
        self.kept: list[str] = []
        """Jobs that the last poll named."""
        self.events = bytearray()
        self.logs: dict[str, bytearray] = {}
        self.skipped: dict[str, int] = {}
        self.answer_files: dict[str, bytearray] = {}
        self.checkpoints: dict[str, dict[str, bytes]] = {}
        """In place: name -> files."""
        self.listed: set[str] | None = None
        """Names that the job has; None: all that are in place."""
        self.sources: dict[tuple[str, str], Path] = {}
        """Job and name of a checkpoint that nodes may fetch -> where it is."""
        self.blobs: dict[str, bytes] = {}
        self.models: dict[str, bytes] = {}
        """Files of models by their sha256."""
        self.trouble: list[Exception] = []
        """Raised by the next calls."""
        self.only: str = ""
        """What the calls begin with that have the trouble; the others have none."""
        self.cut = False
        """Polls get no answer."""
        self.calls: list[str] = []
        self._half: dict[str, dict[str, bytes]] = {}
        self._news = asyncio.Event()

    def order(self, *orders: TaskOrder) -> None:
        """What the node is to know from now on."""
        self.wanted = {order.task_id: order for order in orders}
        self.release()

    def release(self) -> None:
        self.revision += 1
        self._news.set()

    @property
    def received_events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.events.splitlines()]

    def report(self, task_id: str = "job-1") -> TaskReport | None:
        """The last report of a task."""
        return next((task for task in self.polls[-1].tasks if task.task_id == task_id), None) if self.polls else None

    async def until(self, holds: Callable[[], Any]) -> None:
        """Wait for something that the agent does."""
        async with asyncio.timeout(20):
            while not holds():
                await asyncio.sleep(0)

    async def reported(self, holds: Callable[[TaskReport], Any], task_id: str = "job-1") -> TaskReport:
        """Wait for such a report of a task."""
        await self.until(lambda: (report := self.report(task_id)) and holds(report))
        report = self.report(task_id)
        assert report is not None
        return report

    def authenticate(self, credential: str | None) -> None:
        self.sent = credential

    async def join(self, report: NodeReport) -> Joined:
        self._meet("join" if self.sent is None else f"join with {self.sent}")
        self.joined.append(report)
        self.joined_with.append(self.sent)
        self.issued += 1
        return Joined(node=report.name, head="head", version="0", credential=f"credential-{self.issued}")

    async def poll(self, poll: Poll, kept: Collection[str] = ()) -> Orders:
        self._meet("poll")
        self.kept = list(kept)
        if self.cut:
            await asyncio.sleep(0.2)
            raise away()
        self.polls.append(poll)
        while poll.seen >= self.revision:
            self._news.clear()
            await self._news.wait()
        return Orders(revision=self.revision, tasks=tuple(self.wanted.values()), over=tuple(self.over))

    async def append_events(self, task_id: str, offset: int, lines: bytes) -> int:
        self._meet(f"events {offset}")
        if offset == len(self.events):
            assert lines.endswith(b"\n")
            self.events += lines
        return len(self.events)

    async def put_log(self, task_id: str, file: str, offset: int, data: bytes) -> int:
        self._meet(f"log {file} {offset}")
        log = self.logs.setdefault(file, bytearray())
        if offset >= len(log):
            self.skipped[file] = self.skipped.get(file, 0) + offset - len(log)
            log += bytes(offset - len(log)) + data
        return len(log)

    async def put_answers(self, task_id: str, file: str, offset: int, data: bytes) -> int:
        self._meet(f"answers {file} {offset}")
        answers = self.answer_files.setdefault(file, bytearray())
        if offset == len(answers):
            answers += data
        return len(answers)

    async def answers(self, task_id: str, file: str, path: Path) -> None:
        self._meet(f"fetch {file}")
        path.write_bytes(self.answer_files.setdefault(file, bytearray()))

    async def offer(self, task_id: str, checkpoint: str, report: CheckpointReport) -> CheckpointAnswer:
        self._meet(f"offer {checkpoint}")
        files = self._half.setdefault(checkpoint, {})
        missing = tuple(file.path for file in report.files if file.path not in files)
        if not missing:
            self.checkpoints[checkpoint] = files
        return CheckpointAnswer(missing=missing)

    async def upload(self, task_id: str, checkpoint: str, name: str, sha256: str, file: Path) -> None:
        self._meet(f"upload {checkpoint}/{name}")
        assert sha256_of(file) == sha256
        self._half[checkpoint][name] = file.read_bytes()

    async def listed_checkpoints(self, job_uuid: str) -> set[str]:
        self._meet("listed")
        return set(self.checkpoints) if self.listed is None else self.listed

    async def rows(self, sha256: str, path: Path) -> None:
        self._meet(f"rows {sha256}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.blobs[sha256])

    async def checkpoint_files(self, job_uuid: str, checkpoint: str) -> list[dict[str, Any]]:
        self._meet(f"files {job_uuid} {checkpoint}")
        source = self.sources[job_uuid, checkpoint]
        found = sorted(path for path in source.rglob("*") if path.is_file())
        return [
            {"path": str(path.relative_to(source)), "size": path.stat().st_size, "sha256": sha256_of(path)}
            for path in found
        ]

    async def checkpoint_file(self, job_uuid: str, checkpoint: str, path: Path, file: dict[str, Any]) -> None:
        self._meet(f"file {checkpoint}/{file['path']}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((self.sources[job_uuid, checkpoint] / file["path"]).read_bytes())

    async def model_file(
        self, task_id: str, model: str, path: Path, file: dict[str, Any], note: Callable[[int], None]
    ) -> None:
        self._meet(f"model {file['path']}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.models[file["sha256"]])
        note(file["size"])

    def _meet(self, call: str) -> None:
        self.calls.append(call)
        if self.trouble and call.startswith(self.only):
            raise self.trouble.pop(0)


def away() -> ServiceUnreachable:
    return ServiceUnreachable(URL, "accepts no connection")


def refusal(status: int, detail: str = "no") -> ServiceRefusal:
    return ServiceRefusal(URL, status, detail)
