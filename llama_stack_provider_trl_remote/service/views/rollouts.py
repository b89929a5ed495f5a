"""The answers that train a job, or that a job makes: for the page of its conversations."""

from __future__ import annotations

from typing import NamedTuple

from llama_stack_provider_trl.jobs.store.reader import read_rollouts
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.events import RolledOut
from llama_stack_provider_trl.specs.work import ANSWERS
from llama_stack_provider_trl.system.files import open_in
from llama_stack_provider_trl.system.ownership import Ownership

from ..http.samples import AnswerLine

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

    No symbolic link leads out of the job's checkpoints: see `views.answers`.

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
