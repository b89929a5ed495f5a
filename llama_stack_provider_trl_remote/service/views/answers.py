"""Reads answers of jobs: the file of whole lines that a job leaves, a part of it while it grows, those of several jobs
beside each other, and rollouts, which train a job."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, BinaryIO, Literal, NamedTuple

from llama_stack_provider_trl.jobs.decisions.states import TERMINAL, JobState
from llama_stack_provider_trl.jobs.store.reader import read_rollouts
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.events import RolledOut
from llama_stack_provider_trl.specs.work import ANSWERS
from llama_stack_provider_trl.system.files import open_in
from llama_stack_provider_trl.system.ownership import Ownership

from ..http.bodies import AnswerLine
from ..http.errors import Conflict, NotFound
from .checkpoints import Digests, Opener

_PIECE = 1 << 16


def find_answers(ownership: Ownership, store: Store, digests: Digests, job_uuid: str) -> tuple[Opener, int, str]:
    """The answers of a job that has ended: a function that opens their file, its bytes in whole lines, and their
    sha256.

    A job that never began has none, whatever lies in its directory: an earlier job of its name may have left it. The
    function never follows a symbolic link out of the job's checkpoints: a training may create one at any time.

    Raises:
        JobNotFound.
        NotFound: the job answers no prompts, or has no answer; the message has the reason.
        Conflict: it has not ended yet.
    """
    job = store.get(job_uuid)
    work = job.spec.work
    if job.spec.does.answering is None:
        does = f"is of kind {work.kind}" + (" without checks" if work.kind == "evaluate" else "") if work else "trains"
        raise NotFound(f"job {job_uuid!r} {does} and answers no prompts: generate jobs and evaluations with checks do")
    if job.state not in TERMINAL:
        raise Conflict(f"job {job_uuid!r} is {job.state}{_progress(job)}: its answers can be read once it has ended")
    opener = partial(open_in, job.spec.checkpoint_dir, ANSWERS)
    try:
        if job.attempt and ownership.is_ours(job.spec.checkpoint_dir):
            with opener() as file:
                if size := _whole_lines(file):
                    return opener, *digests.of_beginning(file, size)
    except (OSError, RuntimeError):  # missing, no regular file, or a symbolic link that leads out
        pass
    if job.state is JobState.completed:
        raise NotFound(f"the answers of job {job_uuid!r} are gone: {job.spec.checkpoint_dir / ANSWERS}")
    raise NotFound(f"job {job_uuid!r} is {job.state} and has no answers: it ended before the first batch of them")


def _progress(job: JobRecord) -> str:
    """How far it is, where that is known."""
    total = job.progress.total_steps
    return f" at step {job.progress.step} of {total}" if total else ""


def _whole_lines(file: BinaryIO) -> int:
    """Bytes of a file up to the end of its last whole line: a process that was killed leaves a part of one."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - _PIECE)
        file.seek(begin)
        if (last := file.read(end - begin).rfind(b"\n")) >= 0:
            return begin + last + 1
        end = begin
    return 0


MOST_ANSWERS = 4
"""Jobs beside each other."""
MOST_BYTES = 8 << 20
"""Bytes of all files that are read for a page."""
_LONGEST = 1 << 20
"""Bytes of a line that is read. A longer one is left out."""
type Wanted = Literal["all", "failed", "differ"]


class AnsweredRow(NamedTuple):
    row: int
    sample: int
    """Number of the answer to this row, from 0."""
    prompt: list[dict[str, Any]]
    answers: list[AnswerLine | None]
    """One per job; None: it has none to this prompt."""
    has_others: bool
    """Whether jobs have another prompt in the row of this number: they have read different rows, and have a line of
    their own."""


class AnsweredRows(NamedTuple):
    rows: list[AnsweredRow]
    has_more: bool
    is_cut: bool
    """Whether the files have more than was read for this page."""
    unreadable: int
    """Lines that are no answers, or too long, among those that were read."""


def read_rows(files: Sequence[tuple[Opener, int] | None], first: int, count: int, wanted: Wanted) -> AnsweredRows:
    """A part of the rows that some jobs have answered, in their order. Raises OSError: a file cannot be read.

    Args:
        files: of each job, what opens its answers, and their bytes in whole lines; None: it has none.
        first: rows of those that are wanted to leave out.
        wanted: all; those where an answer fails a check; or those where some job passes a check that another one
            fails, or, without checks, has another text.
    """
    most = MOST_BYTES // max(1, sum(one is not None for one in files))
    found: list[AnsweredRow] = []
    with ExitStack() as opened:
        sources = [_Answers(opened.enter_context(one[0]()), min(one[1], most)) if one else None for one in files]
        is_cut = any(one and one[1] > most for one in files)
        for row in _beside(sources):
            if not _is_wanted(row, wanted):
                continue
            if first:
                first -= 1
                continue
            if len(found) == count:
                return AnsweredRows(found, has_more=True, is_cut=False, unreadable=_unreadable(sources))
            found.append(row)
    return AnsweredRows(found, has_more=False, is_cut=is_cut, unreadable=_unreadable(sources))


class _Answers:
    """The answers of a file, with a look at the next one."""

    def __init__(self, file: Any, size: int) -> None:
        self._file, self._left = file, size
        self.unreadable = 0
        self.next = self._read()

    def take(self) -> AnswerLine:
        assert self.next is not None
        taken, self.next = self.next, self._read()
        return taken

    def _read(self) -> AnswerLine | None:
        while line := self._piece():
            if line.endswith(b"\n"):
                if (found := answer_of(line)) is not None:
                    return found
                self.unreadable += 1
            elif self._left:  # it is longer than what is read of one
                while self._left and not self._piece().endswith(b"\n"):
                    pass
                self.unreadable += 1
        return None

    def _piece(self) -> bytes:
        """A line, or a part of a long one; empty: the end of what is read."""
        piece: bytes = self._file.readline(min(self._left, _LONGEST))
        # The file may be shorter than it was.
        self._left = self._left - len(piece) if piece else 0
        return piece


def _unreadable(sources: Sequence[_Answers | None]) -> int:
    return sum(one.unreadable for one in sources if one is not None)


def _beside(sources: Sequence[_Answers | None]) -> Iterator[AnsweredRow]:
    """Rows in their order, each with the answers of all jobs that have it. Jobs that have another prompt there have
    read different rows: their answers are to something else, and are not beside each other."""
    while waiting := [one.next for one in sources if one is not None and one.next is not None]:
        row, sample = min((one.row, one.sample) for one in waiting)
        lines = [
            one.take()
            if one is not None and one.next is not None and (one.next.row, one.next.sample) == (row, sample)
            else None
            for one in sources
        ]
        prompts: list[list[dict[str, Any]]] = []
        for line in lines:
            if line is not None and line.prompt not in prompts:
                prompts.append(line.prompt)
        for prompt in prompts:
            answers = [line if line is not None and line.prompt == prompt else None for line in lines]
            yield AnsweredRow(row, sample, prompt, answers, has_others=len(prompts) > 1)


def _is_wanted(row: AnsweredRow, wanted: Wanted) -> bool:
    answers = [one for one in row.answers if one is not None]
    if wanted == "failed":
        return any(not all(one.passed.values()) for one in answers)
    if wanted == "differ":
        if any(one.passed for one in answers):
            return len({tuple(sorted(one.passed.items())) for one in answers}) > 1
        return len({one.text for one in answers}) > 1
    return True


ROLLOUTS = 5
"""Prompts of a page, each with all answers to it."""
_ANSWERS = 20
_BYTES = 1 << 20
"""That are read of a file of answers for a page. A longer line is left out."""


class Rollouts(NamedTuple):
    """Some of a job's rollouts, the newest first."""

    data: list[RolledOut]
    total: int
    newer: int | None
    """`skip` of the ones before these; None: there are none."""
    older: int | None


class Answers(NamedTuple):
    """Some of the answers that a job has made, in their order."""

    data: list[AnswerLine]
    unreadable: int
    """Lines that are no answers, or too long."""
    following: int | None
    """`skip` of the next ones; None: there are none yet."""


def rollouts_of(store: Store, job_uuid: str, skip: int) -> Rollouts:
    """The answers that train a job, a few prompts at a time."""
    found, total = read_rollouts(store, job_uuid, ROLLOUTS, skip)
    older = skip + ROLLOUTS if skip + ROLLOUTS < total else None
    return Rollouts([*found], total, max(0, skip - ROLLOUTS) if skip else None, older)


def answers_of(ownership: Ownership, job: JobRecord, skip: int) -> Answers | None:
    """Some of the answers of a job, also while it runs; None: it makes none, or has none yet.

    No symbolic link leads out of the job's checkpoints: see `find_answers`.

    Args:
        skip: bytes of the file before these answers.
    """
    if job.spec.does.answering is None or not job.attempt:
        return None
    try:
        if not ownership.is_ours(job.spec.checkpoint_dir):
            return None
        with open_in(job.spec.checkpoint_dir, ANSWERS) as file:
            file.seek(skip)
            data = file.read(_BYTES)
            more = bool(file.read(1))
    except (OSError, RuntimeError):  # missing, no regular file, or a symbolic link that leads out
        return None
    lines = data.split(b"\n")[:-1]  # behind the last end of a line may be a part of one
    shown = lines[:_ANSWERS]
    found = [answer for line in shown if (answer := answer_of(line)) is not None]
    unreadable = len(shown) - len(found)
    if not lines and more:  # a line that is longer than what is read
        return Answers([], 1, skip + len(data))
    behind = skip + sum(len(line) + 1 for line in shown)
    return Answers(found, unreadable, behind if more or len(lines) > len(shown) else None)


def answer_of(line: bytes) -> AnswerLine | None:
    """A line of a file of answers; None: it is none."""
    try:
        return AnswerLine.model_validate_json(line)
    except ValueError:
        return None
