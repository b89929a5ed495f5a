"""Answers of jobs on nodes: files in the job's checkpoint directory that grow as the node sends them.

They are those that the job has on this machine, so an attempt continues wherever the one before it was. Every part is
appended while the task is current, so that no earlier attempt adds to the answers of a later one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.store.records import NodeTaskRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.answer_files import whole_batches
from llama_stack_provider_trl.specs.events import Event, Finished, event_lines, parse_event
from llama_stack_provider_trl.specs.job import JobSpec
from llama_stack_provider_trl.specs.row_files import LINE_BYTES
from llama_stack_provider_trl.specs.work import ANSWERS, ROWS
from llama_stack_provider_trl.system.files import open_in

from ..http.errors import Gone, NotFound, WrongOffset
from ..views.checkpoints import Digests, Opener
from .logs import write_all

_REPEATED, _LINE, _TOKEN = 8, 256 << 10, 4 << 10
"""How often a line of answers may repeat its row, bytes of everything else in it, and bytes of a token's text: several
times what is found."""


def remove_results(spec: JobSpec) -> None:
    """Remove what an earlier attempt has made of its answers, before an attempt on another machine sends it again."""
    for name in spec.does.answer_files[1:]:
        (spec.checkpoint_dir / name).unlink(missing_ok=True)


def begin_answers(store: Store, task: NodeTaskRecord, spec: JobSpec, digests: Digests) -> tuple[int, str]:
    """Leave the whole batches of a job's answers: its node gets these, and appends. A repetition is harmless. Raises
    Gone: the task is not current; NotFound: the job answers no prompts; OSError: the file cannot be written, or is
    something else. Returns size and sha256 of their file."""
    answering = spec.does.answering
    if answering is None:
        raise NotFound(_no_file(spec, ANSWERS))
    with _opened(spec.checkpoint_dir / ANSWERS) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
        size = os.fstat(descriptor).st_size
        whole = whole_batches(file, spec.data.batch_size, spec.data.dataset.num_rows * answering.samples_per_prompt)
        if whole.size < size:
            with store.tasks.while_current(task.task_id, task.node) as is_current:
                if not is_current:
                    raise Gone(f"task {task.task_id!r} was ended: its answers are not changed")
                if os.fstat(descriptor).st_size == size:
                    os.ftruncate(descriptor, whole.size)
        return digests.of_file(file)


def find_file(spec: JobSpec, digests: Digests, name: str) -> tuple[Opener, int, str]:
    """A file of a job's answers: a function that opens it, its size and its sha256. Raises NotFound."""
    _check_name(spec, name)
    opener = partial(open_in, spec.checkpoint_dir, name)
    try:
        with opener() as file:
            return opener, *digests.of_file(file)
    except OSError as error:
        raise NotFound(f"job {spec.job_uuid!r} has no {name} yet") from error


def append_answers(
    store: Store,
    task: NodeTaskRecord,
    spec: JobSpec,
    name: str,
    offset: int,
    data: bytes,
    is_finishing: Callable[[], bool] = lambda: False,
) -> int:
    """Append a part of a file; returns the size of the file. Raises Gone: the task is not current; NotFound: the job
    has no such file; WrongOffset: the part does not begin where the file ends; InvalidRequest: the file would be larger
    than the job can need, or the job has finished; OSError: the disk is full.

    Args:
        is_finishing: whether the final event of the task is being checked against its files, or was accepted.
    """
    _check_name(spec, name)
    if offset + len(data) > (most := most_bytes(spec)):
        hint = f"{name} of this job has at most {most} bytes: its prompts, and max_new_tokens tokens for each answer"
        raise InvalidRequest("offset", f"{offset} + {len(data)}", hint)
    with _opened(spec.checkpoint_dir / name) as file:
        with store.tasks.while_current(task.task_id, task.node) as is_current:
            if not is_current:
                raise Gone(f"task {task.task_id!r} was ended during the upload of {name}: the part is not kept")
            size = os.fstat(file).st_size
            if size != offset:
                raise WrongOffset(offset, size)
            if data and is_finishing():
                raise InvalidRequest("offset", offset, f"the final event of the job was sent: {name} is complete")
            write_all(file, size, data)
        os.fsync(file)
    return offset + len(data)


class Finishing:
    """The tasks whose final event is being checked against their files, or was accepted: nothing is appended to these.

    Safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._calls: dict[tuple[str, str], set[object]] = {}
        """Task and node -> its calls with a final event. A node that has had no answer sends the event again, while the
        first call is not over: the failure of one does not undo the other."""

    def has(self, task: NodeTaskRecord) -> bool:
        return (task.task_id, task.node) in self._calls

    @contextmanager
    def beginning(self, task: NodeTaskRecord, lines: bytes) -> Iterator[None]:
        """Nothing is appended to the task's files from here on, if these events end it and the block accepts them."""
        if not _has_end(lines):
            yield
            return
        name, call = (task.task_id, task.node), object()
        over = {one for one in list(self._calls) if self._store.tasks.current(*one) is None}
        # A write transaction, as that of each append: one that has begun ends before.
        with self._store.tasks.while_current(*name), self._lock:
            for one in over:
                self._calls.pop(one, None)
            self._calls.setdefault(name, set()).add(call)
        try:
            yield
        except BaseException:
            with self._lock:
                calls = self._calls.get(name, set())
                calls.discard(call)
                if not calls:
                    self._calls.pop(name, None)
            raise


def _has_end(lines: bytes) -> bool:
    for line in event_lines(lines):
        if b'"finished"' in line:
            with suppress(ValueError):  # which is refused
                if isinstance(parse_event(line), Finished):
                    return True
    return False


def most_bytes(spec: JobSpec) -> int:
    """Bytes of the largest file that a job's answers can make; so a node cannot fill the disk with one."""
    answering = spec.does.answering
    assert answering is not None
    count = spec.data.dataset.num_rows * answering.samples_per_prompt
    try:
        rows = spec.data.dataset.path.stat().st_size
    except OSError:  # an answer's line repeats its prompt
        rows = spec.data.dataset.num_rows * LINE_BYTES
    return _REPEATED * rows * answering.samples_per_prompt + count * (_LINE + _TOKEN * answering.max_new_tokens)


def refuse_unfinished(event: Event, spec: JobSpec, digests: Digests) -> None:
    """Refuse the end of a job whose files are not those that its result names. Raises InvalidRequest."""
    names = spec.does.answer_files
    if not isinstance(event, Finished) or not names:
        return
    result: Any = event.result or {}
    found, name = result.get("dataset" if ROWS in names else "answers"), names[-1]
    path, given = spec.checkpoint_dir / name, found if isinstance(found, dict) else {}
    if given.get("path", str(path)) != str(path):
        raise InvalidRequest("result.answers.path", str(given["path"])[:200], f"the answers of this job are {path}")
    try:
        with open_in(spec.checkpoint_dir, name) as file:
            _, here = digests.of_file(file)
    except OSError:
        here = ""
    if not here or given.get("sha256") != here:
        hint = f"{path} has the sha256 {here or 'none, it is missing'}: send the whole file before the event"
        raise InvalidRequest("result.sha256", str(given.get("sha256"))[:200], hint)


def _check_name(spec: JobSpec, name: str) -> None:
    if name not in spec.does.answer_files:
        raise NotFound(_no_file(spec, name))


def _no_file(spec: JobSpec, name: str) -> str:
    names = spec.does.answer_files
    does = f"its answers are in {' and '.join(names)}" if names else "it answers no prompts"
    return f"job {spec.job_uuid!r} has no file {name[:200]!r} of answers: {does}"


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    # Where the directory was removed, the node finds the file empty, and sends it again from its beginning.
    path.parent.mkdir(parents=True, exist_ok=True)
    # Other users may read what is in `checkpoint_roots`.
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        yield file
    finally:
        os.close(file)
