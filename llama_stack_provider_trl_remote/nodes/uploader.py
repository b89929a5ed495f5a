"""Uploads the results of a task beside its training: events, logs, checkpoints, answers.

Each of these continues until the task has exited and the service has all of it. A failed call is repeated. An
answer of 410 (the task is no longer this node's) ends the upload.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from llama_stack_provider_trl.errors import ServiceRefusal, ServiceUnreachable, is_exhausted
from llama_stack_provider_trl.specs.answer_files import NONE
from llama_stack_provider_trl.specs.checkpoint_files import misplaced
from llama_stack_provider_trl.system.files import (
    MANIFEST,
    atomic_write,
    damage,
    file_names,
    is_regular,
    open_in,
    open_regular,
    read_regular,
    sha256_in,
)

from ..wire import CheckpointAnswer, CheckpointFileReport, CheckpointReport
from .calls import NodeClient, is_gone
from .localize import PathMap
from .outbox import Outbox, PendingEvent

log = logging.getLogger(__name__)
POLL_INTERVAL = 0.25
"""Seconds between two reads of the event file."""
LOG_POLL_INTERVAL = 2.0
ANSWERS_POLL_INTERVAL = 1.0
RETRY = 2.0
"""Seconds between attempts where the service is away or a disk is full."""
_LOG_PIECE = 1 << 18
_LOG_BEHIND = 1 << 20
"""Bytes of a log that may wait; older ones are left out."""
_STEP = re.compile(r"checkpoint-(\d+)")


class Damaged(OSError):
    """Raised when a checkpoint is not what was written, or when the service does not accept a checkpoint or an event.

    Neither changes with time."""


class Uploader:
    """Uploads events, logs, checkpoints and answers of one task.

    Args:
        exited: set once no process of the task is left.
        note_detail: called with the current upload, or with the error; with "" at its end.
    """

    def __init__(
        self,
        paths: PathMap,
        calls: NodeClient,
        exited: asyncio.Event,
        note_detail: Callable[[str], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._paths, self._calls, self._exited, self._note_detail, self._sleep = (
            paths,
            calls,
            exited,
            note_detail,
            sleep,
        )
        self._task_id = paths.order.task_id
        self._outbox = Outbox(paths) if paths.order.node_rank == 0 else None
        self._sent = 0
        self._all_read = False
        self._waiting: int | None = None
        """Checkpoints that wait here, as last written to the training's file."""
        self._answers = AnswerUpload(paths, calls) if self._outbox is not None and paths.answer_files else None
        self._log_sent: dict[str, int] = {}
        """Log -> byte up to which the service has it."""

    @property
    def has_finished(self) -> bool:
        """Whether the job is done: none of its files is needed here any more."""
        return self._outbox is not None and self._outbox.has_finished

    async def run(self) -> None:
        """Upload until nothing is left. Raises ServiceRefusal: 410, the task belongs to another node now; Damaged: a
        checkpoint is damaged."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._until_done(self._ship_logs, LOG_POLL_INTERVAL))
            if self._outbox is not None:
                group.create_task(self._until_done(self._ship_events, POLL_INTERVAL))
                group.create_task(self._until_done(self._ship_checkpoints, POLL_INTERVAL))
            if self._answers is not None:
                group.create_task(self._until_done(self._ship_answers, ANSWERS_POLL_INTERVAL))

    async def _until_done(self, ship: Callable[[bool], Awaitable[bool]], pause: float) -> None:
        trouble = ""
        while True:
            over = self._exited.is_set()  # read first: processes that have exited write nothing more
            try:
                if await ship(over):
                    return
                trouble = self._note("", trouble)
                await self._sleep(pause)
            except (ServiceUnreachable, ServiceRefusal, OSError) as error:
                if is_gone(error) or isinstance(error, Damaged):
                    raise
                trouble = self._note(str(error), trouble)
                await self._sleep(RETRY)

    def _note(self, trouble: str, before: str) -> str:
        if trouble != before:
            self._note_detail(trouble)
            if trouble:
                log.warning("task %s: %s", self._task_id, trouble)
        return trouble

    async def _ship_events(self, over: bool) -> bool:
        outbox = self._outbox
        assert outbox is not None
        outbox.read_events()
        self._note_pending()
        self._all_read = over
        while self._sent < outbox.size:
            piece = outbox.piece(self._sent)
            try:
                have = await self._calls.append_events(self._task_id, self._sent, piece)
            except ServiceRefusal as refusal:
                if refusal.status == 400:
                    raise Damaged(str(refusal)) from refusal
                raise
            if have > outbox.size:
                raise ServiceUnreachable(
                    "",
                    f"has {have} bytes of events of {self._task_id}, and this node wrote only {outbox.size}",
                    "end the job",
                )
            self._sent = have
        return over and not outbox.pending

    async def _ship_checkpoints(self, over: bool) -> bool:
        outbox = self._outbox
        assert outbox is not None
        done = self._all_read
        waiting = next((pending for pending in outbox.pending if pending.is_checkpoint), None)
        if waiting is None:
            return over and done
        await self._ship_checkpoint(waiting)
        await self._remove_old_checkpoints(waiting)
        outbox.release(waiting)
        return False

    async def _ship_answers(self, over: bool) -> bool:
        outbox, answers = self._outbox, self._answers
        assert outbox is not None
        assert answers is not None
        done = self._all_read
        final = next((pending for pending in outbox.pending if not pending.is_checkpoint), None)
        try:
            await answers.ship(is_finished=final is not None and final.event["type"] == "finished")
        except ServiceRefusal as refusal:
            if refusal.status == 400:
                raise Damaged(f"the service does not accept the answers: {refusal}") from refusal
            raise
        except Unreadable as error:
            raise Damaged(error.strerror) from error
        if final is None:
            return over and done
        outbox.release(final)
        return False

    def _note_pending(self) -> None:
        """Name the waiting checkpoints. Before the disk is full, the training waits for them
        (`checkpoints.need_space`)."""
        if self._paths.shared or self._outbox is None:
            return
        waiting = sum(pending.is_checkpoint for pending in self._outbox.pending)
        if waiting != self._waiting:
            atomic_write(self._paths.files.uploads, str(waiting).encode())
            self._waiting = waiting

    async def _ship_checkpoint(self, pending: PendingEvent) -> None:
        path = Path(pending.event["path"])
        if (why := misplaced(path, str(pending.event["kind"]), self._paths.checkpoint_dir)) is not None:
            raise Damaged(f"the training announced checkpoint {path}, which is not uploaded: {why}")
        report = await asyncio.to_thread(_reported, path, pending)
        before: set[str] = set()
        while missing := (await self._offer(path.name, report)).missing:
            if before & set(missing):  # sent, and still missing
                await self._sleep(RETRY)
            for number, name in enumerate(missing, 1):
                file = next(file for file in report.files if file.path == name)
                size = f"{file.size / (1 << 20):.1f} MiB"
                self._note_detail(f"uploads {path.name}, file {number} of {len(missing)}: {name}, {size}")
                await self._calls.upload(self._task_id, path.name, name, file.sha256, path / name)
            before = set(missing)
        self._note_detail("")

    async def _offer(self, name: str, report: CheckpointReport) -> CheckpointAnswer:
        try:
            return await self._calls.offer(self._task_id, name, report)
        except ServiceRefusal as refusal:
            if refusal.status == 400:  # such as a file that is not data; a retry is refused too
                raise Damaged(f"the service does not accept checkpoint {name}: {refusal}") from refusal
            raise

    async def _remove_old_checkpoints(self, shipped: PendingEvent) -> None:
        """Remove the step checkpoints before one that the service has: it has those too, as far as it keeps them.

        A job that ends with its best checkpoint needs the disk space."""
        directory, newest, kept = Path(shipped.event["path"]).parent, int(shipped.event["step"]), set[str]()
        if self._paths.attempt.job.train.best_checkpoint:
            kept = await self._calls.listed_checkpoints(self._paths.order.job_uuid)
            # The supervisor may not have read the events after these yet.
            newest = max((step for name in kept if (step := _step(name)) is not None), default=0)
        for path in directory.glob("checkpoint-*"):
            step = _step(path.name)
            if step is not None and step < newest and path.name not in kept:
                await asyncio.to_thread(shutil.rmtree, path, True)

    async def _ship_logs(self, over: bool) -> bool:
        for path in sorted([*self._paths.run_dir.glob("rank-*.log"), *self._paths.run_dir.glob("torchrun.log")]):
            if not is_regular(path):
                continue
            await self._ship_log(path)
        return over

    async def _ship_log(self, path: Path) -> None:
        name = path.name
        if name not in self._log_sent:
            self._log_sent[name] = await self._calls.put_log(self._task_id, name, 0, b"")
        while (rest := path.lstat().st_size - self._log_sent[name]) > 0:
            if rest > _LOG_BEHIND:  # the service notes the gap
                self._log_sent[name] += rest - _LOG_PIECE
            data = await asyncio.to_thread(_part, path, self._log_sent[name])
            self._log_sent[name] = await self._calls.put_log(self._task_id, name, self._log_sent[name], data)


def _step(name: str) -> int | None:
    found = _STEP.fullmatch(name)
    return None if found is None else int(found[1])


def _part(path: Path, start: int) -> bytes:
    with open_regular(path) as file:
        file.seek(start)
        return file.read(_LOG_PIECE)


def _size(directory: Path, name: str) -> int:
    with open_in(directory, name) as file:
        return os.fstat(file.fileno()).st_size


def _reported(path: Path, pending: PendingEvent) -> CheckpointReport:
    """List the files of a checkpoint with their digests. Raises Damaged: it is missing, or differs from what was
    written; OSError: it cannot be read."""
    if (wrong := damage(path)) is not None:
        raise Damaged(f"checkpoint {path} was damaged before it could be uploaded: {wrong}")
    checked = json.loads(read_regular(path / MANIFEST)).get("sha256", {})  # checked above, so no file is read twice
    files = [
        CheckpointFileReport(path=name, size=_size(path, name), sha256=checked.get(name) or sha256_in(path, name))
        for name in file_names(path)
    ]
    return CheckpointReport(kind=pending.event["kind"], files=tuple(files))


_PIECE = 1 << 19
"""Bytes of one call."""


class Unreadable(OSError):
    """Raised when the training has put something else in the place of its file of answers. That does not change."""


class AnswerUpload:
    """The upload of one task's answers.

    The service's file is the beginning of this node's, which began with it (`inputs`), and its size is the progress. A
    batch that is half written stays here: the next attempt, wherever it is, writes it again.
    """

    def __init__(self, paths: PathMap, calls: NodeClient) -> None:
        self._paths, self._calls = paths, calls
        self._whole = NONE
        self._sent: dict[str, int] = {}
        """File -> bytes that the service has."""

    async def ship(self, *, is_finished: bool) -> None:
        """Send what the service lacks. Raises Unreadable.

        Args:
            is_finished: the training has written all of its files.
        """
        grows, *at_the_end = self._paths.answer_files
        await self._send(grows, await asyncio.to_thread(self._ready, grows, is_finished))
        for name in at_the_end if is_finished else ():
            await self._send(name, await asyncio.to_thread(self._ready, name, is_finished))

    def _ready(self, name: str, is_finished: bool) -> int:
        """Bytes of a file that may be sent."""
        with self._opened(name) as file:
            if file is None:
                return 0
            if is_finished:
                return os.fstat(file.fileno()).st_size
            self._whole = self._paths.whole_answers(file, self._whole)
            return self._whole.size

    async def _send(self, name: str, end: int) -> None:
        task_id = self._paths.order.task_id
        if name not in self._sent:
            self._sent[name] = await self._calls.put_answers(task_id, name, 0, b"")
        while self._sent[name] < end:
            data = await asyncio.to_thread(self._part, name, end)
            if not data:
                return  # the training has cut its own file: the service compares the digest at the end
            self._sent[name] = await self._calls.put_answers(task_id, name, self._sent[name], data)

    def _part(self, name: str, end: int) -> bytes:
        with self._opened(name) as file:
            if file is None:
                return b""
            file.seek(self._sent[name])
            return file.read(min(_PIECE, end - self._sent[name]))

    @contextmanager
    def _opened(self, name: str) -> Iterator[BufferedReader | None]:
        """A file of the training; None: it is missing."""
        try:
            with open_in(self._paths.checkpoint_dir, Path(name)) as file:
                yield file
        except FileNotFoundError:
            yield None
        except OSError as error:
            if is_exhausted(error):
                raise
            raise Unreadable(error.errno, f"{name} of the training cannot be read: {error.strerror}") from error
