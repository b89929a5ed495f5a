"""Uploads of nodes: events, logs, answers and checkpoints. These are assembled file by file and become visible at once.

Everything of a task that is not current any more is refused. A checkpoint becomes visible under the same lock as that
check, so that two attempts never both count.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from pydantic import BaseModel

from llama_stack_provider_trl.errors import InvalidRequest, LimitReached
from llama_stack_provider_trl.jobs.store.records import JobRecord, NodeTaskRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.step_checkpoints import named_path, refusal
from llama_stack_provider_trl.specs.checkpoint_files import check_names, is_checkpoint_name
from llama_stack_provider_trl.specs.events import CheckpointSaved, EventWriter, event_lines, parse_event
from llama_stack_provider_trl.system.beneath import NotAFile, directory_beneath
from llama_stack_provider_trl.system.files import (
    MANIFEST,
    RunDir,
    damage,
    fsync_tree,
    open_in,
    point_latest,
    put_in_place,
    resolve_under,
)
from llama_stack_provider_trl.system.offload import entered, to_its_end

from ...wire import AnswersBegin, CheckpointAnswer, CheckpointFileReport, CheckpointReport
from ..http.errors import Gone, NotFound, WrongOffset
from ..space import Space, Use
from ..views.checkpoints import Digests, Opener
from .logs import append_log, write_all
from .node_answers import Finishing, append_answers, begin_answers, find_file, refuse_unfinished

LOG = re.compile(r"rank-\d{1,4}\.log|torchrun\.log")
_REPORT = "report.json"
_LONGEST = 240
"""Bytes of a file's name; file systems accept 255."""
UPLOADS = 32
"""Uploads of one node at a time: each has space reserved. A task sends one; others may be on dead connections."""
_RETRY_S = 5


class UploadReceiver:
    """Receives the events, logs, answers and checkpoints of nodes. Safe to share between threads."""

    def __init__(self, store: Store, digests: Digests, space: Space | None = None) -> None:
        self._store = store
        self._space = space or Space(0)
        self._digests = digests
        self._finishing = Finishing(store)
        self._lock = threading.Lock()
        self._requesting = threading.Lock()
        self._requested: WeakValueDictionary[Path, threading.Lock] = WeakValueDictionary()
        """Of the checkpoints that are requested at the moment."""
        self._senders: dict[Path, object] = {}
        """The writer of each file: the last one to begin. Others may be blocked on dead connections."""
        self._uploads: Counter[str] = Counter()
        """By node."""

    def current(self, task_id: str, node: str) -> NodeTaskRecord:
        """A task of which the node may send data. Raises Gone."""
        task = self._store.tasks.current(task_id, node)
        if task is None:
            raise Gone(f"task {task_id!r} is not current on node {node!r}, or was ordered to stop: end it")
        return task

    def first(self, task_id: str, node: str) -> NodeTaskRecord:
        """A task whose rank 0 runs on this node. Raises Gone."""
        task = self.current(task_id, node)
        if task.node_rank:
            raise Gone(f"node {node!r} has no rank 0 of task {task_id!r}: only that one's events and checkpoints count")
        return task

    def add_events(self, task_id: str, node: str, offset: int, lines: bytes) -> int:
        """Append whole lines to the attempt's events; returns the size of the file. Raises Gone: also for a node
        without rank 0; InvalidRequest: they do not end with a line's end, one is no event, or a checkpoint or an answer
        is missing; WrongOffset: they do not begin where the file ends; OSError: the disk is full."""
        task = self.first(task_id, node)
        if lines and not lines.endswith(b"\n"):
            raise InvalidRequest("body", f"... {lines[-20:]!r}", "send whole lines")
        assert task.run_dir is not None
        with self._finishing.beginning(task, lines):
            self._check_events(task, lines)
            least = self._store.get(task.job_uuid).spec.lifecycle.min_free_bytes
            self._space.require(Use.report, task.run_dir, len(lines), least)
            return self._append_events(task, offset, lines)

    def _append_events(self, task: NodeTaskRecord, offset: int, lines: bytes) -> int:
        assert task.run_dir is not None
        with self._lock, _opened(RunDir(task.run_dir).events) as file:
            size = os.fstat(file).st_size
            if size != offset:
                raise WrongOffset(offset, size)
            # Repeated: a conclusion of the attempt writes here under the same lock.
            self.current(task.task_id, task.node)
            write_all(file, size, lines)
            return size + len(lines)

    def _check_events(self, task: NodeTaskRecord, lines: bytes) -> None:
        """Check an event. A line that the supervisor cannot read would block the job, and a checkpoint is served and
        deleted at the path of its event."""
        spec = self._store.get(task.job_uuid).spec
        for line in event_lines(lines):
            try:
                event = parse_event(line)
            except ValueError as error:
                raise InvalidRequest("body", f"{line[:100]!r}", f"expected an event: {error}") from error
            if (why := refusal(event, spec)) is not None:
                raise InvalidRequest("path", str(named_path(event)), why)
            if isinstance(event, CheckpointSaved) and not (event.path / MANIFEST).is_file():
                raise InvalidRequest("path", str(event.path), "it does not exist: upload its files before its event")
            refuse_unfinished(event, spec, self._digests)

    def append_event(self, path: Path, event: BaseModel) -> None:
        """Append a final event of the service's own."""
        with self._lock:
            writer = EventWriter(path)
            writer.write(event)
            writer.close()

    def add_log(self, task_id: str, node: str, name: str, offset: int, data: bytes) -> int:
        """Append a part of a log. A part that begins beyond the end of the log leaves a gap. Raises Gone; NotFound:
        there is no such log; WrongOffset: it begins before the end of the log; OSError: the disk is full. Returns the
        byte of the node's file up to which the log is here."""
        task = self.current(task_id, node)
        if not LOG.fullmatch(name):
            raise NotFound(f"{name!r} is no log: rank-0.log, rank-1.log ... and torchrun.log are")
        job = self._store.get(task.job_uuid)
        ranks = job.spec.ranks_per_node * len(self._store.tasks.of_attempt(task_id))
        if name.startswith("rank-") and int(name[len("rank-") : -len(".log")]) >= ranks:
            raise NotFound(f"{name!r} is no log of this task: it has {ranks} ranks, counted from 0")
        assert task.run_dir is not None
        if name == "torchrun.log" and task.node_rank:
            name = f"torchrun-{task.node_rank}.log"  # each node has one
        with self._lock:
            self._space.require(Use.report, task.run_dir, len(data), job.spec.lifecycle.min_free_bytes)
            return append_log(task.run_dir / name, offset, data)

    def begin_answers(self, task_id: str, node: str) -> AnswersBegin:
        task = self.first(task_id, node)
        size, sha256 = begin_answers(self._store, task, self._store.get(task.job_uuid).spec, self._digests)
        return AnswersBegin(size=size, sha256=sha256)

    def answers(self, task_id: str, node: str, name: str) -> tuple[Opener, int, str]:
        """See `answers.find_file`. Raises Gone."""
        task = self.first(task_id, node)
        return find_file(self._store.get(task.job_uuid).spec, self._digests, name)

    def add_answers(self, task_id: str, node: str, name: str, offset: int, data: bytes) -> int:
        task = self.first(task_id, node)
        job = self._store.get(task.job_uuid)
        self._space.require(Use.checkpoint, job.spec.checkpoint_dir, len(data), job.spec.lifecycle.min_free_bytes)
        ends = partial(self._finishing.has, task)
        return append_answers(self._store, task, job.spec, name, offset, data, ends)

    def ask(self, task_id: str, node: str, name: str, report: CheckpointReport) -> CheckpointAnswer:
        """The missing files of a checkpoint; one without missing files becomes visible. Raises Gone; InvalidRequest: it
        is not a checkpoint of the job, incomplete, or holds more than data; OSError: the disk is full."""
        task = self.first(task_id, node)
        job = self._store.get(task.job_uuid)
        target = job.spec.checkpoint_dir / name
        if not is_checkpoint_name(name, report.kind):
            raise InvalidRequest("checkpoint", name, f"expected the name of a checkpoint of the kind {report.kind}")
        _check_files(report, code=job.spec.source.trust_remote_code)
        staging = _staging(job, task, name)
        with self._requesting:  # one lock for both of two first requests
            requested_once = self._requested.setdefault(staging, threading.Lock())
        with requested_once:  # repeated while the first request still forces files to disk
            if self._is_in_place(target, report):
                return CheckpointAnswer(missing=(), path=str(target))
            job.spec.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            contents = staging / "files"
            with _place(job, contents, make=True):
                pass
            if _announced(job, staging) not in (None, report):
                shutil.rmtree(staging)  # another checkpoint of that name: its files do not count
            with _place(job, contents, make=True):
                _announce(job, staging, report)
            missing = tuple(file.path for file in report.files if _size(contents / file.path) != file.size)
            if missing:
                size = sum(file.size for file in report.files if file.path in missing)
                self._space.require(Use.checkpoint, contents, size, job.spec.lifecycle.min_free_bytes)
                return CheckpointAnswer(missing=missing)
            self._put_in_place(task, contents, target, report)
            shutil.rmtree(staging, ignore_errors=True)
        return CheckpointAnswer(missing=(), path=str(target))

    async def receive(
        self, task_id: str, node: str, name: str, path: str, sha256: str, offset: int, pieces: AsyncIterator[bytes]
    ) -> int:
        """Append a part of a file that `ask` has listed as missing. Returns the number of bytes that are here. Raises
        Gone; NotFound: no report to `ask` has named such a file; InvalidRequest: the file has another digest: its bytes
        are dropped; WrongOffset: it does not begin at the end of the file."""
        with self._counted(node):
            job, wanted, whole, part = await asyncio.to_thread(self._wanted, task_id, node, name, path, sha256)
            if await asyncio.to_thread(_size, whole) == wanted.size:
                return wanted.size
            async with entered(_place(job, part.parent, make=True)) as parts:
                return await self._append(job, whole, part, parts, wanted, offset, pieces)

    def _wanted(
        self, task_id: str, node: str, name: str, path: str, sha256: str
    ) -> tuple[JobRecord, CheckpointFileReport, Path, Path]:
        """A file that `ask` has listed: its job, itself, its place when whole and in part. Raises Gone, NotFound."""
        task = self.first(task_id, node)
        if not is_checkpoint_name(name):
            raise NotFound(f"{name!r} is not the name of a checkpoint: checkpoint-NUMBER, final and merged are")
        job = self._store.get(task.job_uuid)
        staging = _staging(job, task, name)
        report = _announced(job, staging)
        if report is None:
            raise NotFound(f"checkpoint {name!r} is not announced yet: POST its report first")
        wanted = next((file for file in report.files if (file.path, file.sha256) == (path, sha256)), None)
        if wanted is None:
            raise NotFound(f"checkpoint {name!r} has no file {path!r} with the digest {sha256}: POST its report again")
        resolve_under(Path("/checkpoint"), path)  # who sees this disk may have changed the report
        return job, wanted, staging / "files" / path, staging / "parts" / path

    @contextmanager
    def _counted(self, node: str) -> Iterator[None]:
        """Count an upload of a node, in the event loop. Raises LimitReached."""
        if self._uploads[node] >= UPLOADS:
            raise LimitReached(
                f"node {node!r} has {UPLOADS} uploads of checkpoints under way, as many as may be: send this one again "
                f"when one has ended, in {_RETRY_S} s at the earliest",
                _RETRY_S,
            )
        self._uploads[node] += 1
        try:
            yield
        finally:
            self._uploads[node] -= 1
            if not self._uploads[node]:
                del self._uploads[node]

    async def _append(
        self,
        job: JobRecord,
        whole: Path,
        part: Path,
        parts: int,
        wanted: CheckpointFileReport,
        offset: int,
        pieces: AsyncIterator[bytes],
    ) -> int:
        """Append to `part`, which is in the open directory `parts`; complete, it becomes `whole`. See `receive`."""
        us = object()
        try:
            async with entered(self._part(job, part, parts)) as (file, size, written):
                if size != offset:
                    raise WrongOffset(offset, size)
                self._senders[part] = us
                async for piece in pieces:
                    if self._senders.get(part) is not us:
                        here = await asyncio.to_thread(_size, part)
                        raise WrongOffset(offset, here or 0)
                    if size + len(piece) > wanted.size:
                        raise InvalidRequest("body", f"{size + len(piece)} bytes", f"the file has {wanted.size}")
                    await to_its_end(_add, file, size, piece, written)
                    size += len(piece)
                if size < wanted.size:
                    return size
                await to_its_end(os.fsync, file)
            found = await self._digest(part)
            if found != wanted.sha256:
                await to_its_end(partial(os.unlink, part.name, dir_fd=parts))
                raise InvalidRequest(
                    "sha256", wanted.sha256, f"the digest of the bytes is {found}: nothing was kept, send it again"
                )
            # The first upload counts: a sender without a timely answer sends again, and waits for the same digest.
            await to_its_end(_become, job, part, parts, whole)
        except FileNotFoundError as error:
            if await asyncio.to_thread(_size, whole) != wanted.size:
                here = await asyncio.to_thread(_size, part)
                raise WrongOffset(offset, here or 0) from error
            return wanted.size
        finally:
            if self._senders.get(part) is us:
                del self._senders[part]
        return size

    @contextmanager
    def _part(self, job: JobRecord, part: Path, parts: int) -> Iterator[tuple[int, int, Callable[[int], None]]]:
        """A file to append to, its size, and the function of `Space.arriving`."""
        with (
            self._space.arriving(Use.checkpoint, part.parent, 0, job.spec.lifecycle.min_free_bytes) as written,
            _opened(Path(part.name), 0o644, parts) as file,  # other users may read what is in `checkpoint_roots`
        ):
            yield file, os.fstat(file).st_size, written

    async def _digest(self, path: Path) -> str:
        loop = asyncio.get_running_loop()
        _, found = await loop.run_in_executor(self._digests.threads, self._digests.of, path)
        return found

    def _is_in_place(self, target: Path, report: CheckpointReport) -> bool:
        """Whether the checkpoint is in place already: the answer was lost, or the node shares our file system."""
        try:
            return all(self._digests.of(target / file.path) == (file.size, file.sha256) for file in report.files)
        except OSError:
            return False

    def _put_in_place(self, task: NodeTaskRecord, contents: Path, target: Path, report: CheckpointReport) -> None:
        if wrong := damage(contents, of=()):
            raise InvalidRequest("files", target.name, f"it is incomplete: {wrong}")
        fsync_tree(contents)
        with self._store.tasks.while_current(task.task_id, task.node) as is_current:
            if not is_current:
                raise Gone(f"task {task.task_id!r} was ended during the upload of {target.name}: it is not kept")
            put_in_place(contents, target)
            if report.kind == "step":
                point_latest(target.parent, target.name)


def _add(file: int, offset: int, piece: bytes, written: Callable[[int], None]) -> None:
    write_all(file, offset, piece)
    written(len(piece))


def _become(job: JobRecord, part: Path, parts: int, whole: Path) -> None:
    """Rename a file that has arrived."""
    with _place(job, whole.parent, make=True) as files:
        os.replace(part.name, whole.name, src_dir_fd=parts, dst_dir_fd=files)


def _staging(job: JobRecord, task: NodeTaskRecord, name: str) -> Path:
    """The attempt's own directory for unfinished files; `system.files.remove_leftovers` knows such names."""
    return job.spec.checkpoint_dir / f"{name}.{task.attempt}.tmp"


@contextmanager
def _place(job: JobRecord, directory: Path, *, make: bool = False) -> Iterator[int]:
    """A descriptor of a directory below the job's checkpoint directory, as `dir_fd` of what is written there. Raises
    InvalidRequest: there is a symbolic link on its path, as a training on this machine, or on one that shares the disk,
    may have put there; FileNotFoundError: it is missing."""
    try:
        opened = directory_beneath(job.spec.checkpoint_dir, directory.relative_to(job.spec.checkpoint_dir), make=make)
        with opened as file:
            yield file
    except NotAFile as error:
        hint = f"the checkpoint is not received there: {error.strerror}; remove it"
        raise InvalidRequest("checkpoint", str(directory), hint) from error


def _announced(job: JobRecord, staging: Path) -> CheckpointReport | None:
    """What was reported of the checkpoint that is received in `staging`; None: nothing that can be read."""
    try:
        with open_in(job.spec.checkpoint_dir, Path(staging.name, _REPORT)) as file:
            return CheckpointReport.model_validate_json(file.read())
    except (NotAFile, FileNotFoundError, ValueError):
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EXDEV, errno.ENOTDIR):
            return None
        raise


def _announce(job: JobRecord, staging: Path, report: CheckpointReport) -> None:
    with _place(job, staging) as place:
        temporary = f".{_REPORT}"
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=place)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=place), "wb") as file:
            file.write(report.model_dump_json().encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, _REPORT, src_dir_fd=place, dst_dir_fd=place)


def _check_files(report: CheckpointReport, *, code: bool) -> None:
    """Refuse a report before any of its files is sent. Raises InvalidRequest.

    Args:
        code: the job's model has code of its own, which the operator trusts; its exports contain the code.
    """
    names = [file.path for file in report.files]
    if MANIFEST not in names:
        raise InvalidRequest("files", names[:5], f"a checkpoint has a {MANIFEST}: send all files of it")
    for name in names:
        resolve_under(Path("/checkpoint"), name, "files.path")
        if any(len(part.encode()) > _LONGEST for part in Path(name).parts):
            raise InvalidRequest("files.path", name[:100], f"expected a name of at most {_LONGEST} bytes")
    check_names(names, "files.path", code=code)
    directories = {str(parent) for name in names for parent in Path(name).parents}
    if len(set(names)) < len(names) or directories & set(names):
        raise InvalidRequest("files", names[:5], "expected each name once, and no file with the name of a directory")


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


@contextmanager
def _opened(path: Path, mode: int = 0o600, directory: int | None = None) -> Iterator[int]:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        file = os.open(path, flags, mode, dir_fd=directory)
    except OSError as error:
        if directory is None or error.errno not in (errno.ELOOP, errno.EISDIR):
            raise
        hint = "it is a symbolic link or a directory where a file is received: remove it"
        raise InvalidRequest("path", str(path), hint) from error
    try:
        yield file
    finally:
        os.close(file)
