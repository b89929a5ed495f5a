"""Serves the answers of jobs that answer prompts: the file of whole lines that such a job leaves."""

from __future__ import annotations

import os
from functools import partial
from typing import BinaryIO

from llama_stack_provider_trl.jobs.decisions.states import TERMINAL, JobState
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.work import ANSWERS
from llama_stack_provider_trl.system.files import open_in
from llama_stack_provider_trl.system.ownership import Ownership

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
