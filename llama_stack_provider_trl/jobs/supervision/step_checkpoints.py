"""The step checkpoints of a job: which ones are kept, and which one an attempt resumes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ...specs.checkpoint_files import misplaced
from ...specs.evaluations import best_step
from ...specs.events import CheckpointDamaged, CheckpointSaved, Event, Prepared, Reason, Warned
from ...specs.job import JobSpec
from ...system.files import discard, is_whole
from ..store.records import CheckpointRecord, JobRecord
from ..store.store import Store

_TRIES = 2
"""Attempts that may fail before their first step after a resume from the same checkpoint."""


def delete_superfluous(store: Store, job: JobRecord) -> None:
    """Delete the step checkpoints that need not be kept; never the newest one, from which a retry resumes.

    A checkpoint leaves the list before it leaves the disk, so that no listed one is ever missing.
    """
    if _keeps_all(job):
        return  # 10,000 of them take 0.2 s to list, for each new one
    steps = _listed(store, job)
    metric = job.spec.train.best_checkpoint
    # A better one may be in progress and never be announced: the best is one that a retry would find.
    evaluations = [one for one in store.evaluations(job.job_uuid) if steps and one[0] <= steps[-1].step]
    best = best_step(metric, evaluations) if metric else None
    needed = store.chains.needed_checkpoints(job.job_uuid)
    for checkpoint in superfluous(steps, job, best):
        if checkpoint.path.name in needed:
            continue
        store.remove_checkpoint(checkpoint)
        # Checked again: the training may have replaced it since it was listed.
        if misplaced(checkpoint.path, checkpoint.kind, job.spec.checkpoint_dir) is None:
            discard(checkpoint.path)


def superfluous(
    steps: Sequence[CheckpointRecord], job: JobRecord, best: int | None = None
) -> Sequence[CheckpointRecord]:
    """The checkpoints that need not be kept, of a job's step checkpoints in the order of their steps.

    With `keep_last`: all but the newest ones. Without it: those between the planned ones that a newer one replaces. A
    job saves one every half hour, or at every best evaluation, which would fill the disk over a weekend. That of step
    `best` is kept in addition.
    """
    spec = job.spec
    if spec.train.keep_last:
        return [checkpoint for checkpoint in steps if checkpoint.step != best][: -spec.train.keep_last]
    # The planned number: a job that stopped early has fewer steps by now.
    total_steps = job.effective and job.effective["total_steps"]
    if _keeps_all(job) or not total_steps:
        return []
    planned = spec.train.save_steps or total_steps // spec.train.n_epochs
    return [checkpoint for checkpoint in steps[:-1] if checkpoint.step % planned and checkpoint.step != best]


def resume_point(store: Store, job: JobRecord) -> tuple[Path, int] | None:
    """The newest step checkpoint that is complete, and its step; damaged ones are removed from the list. Without one,
    the copy of another job's checkpoint that the job begins with, if it has one.

    Sizes reveal most damage here, and digests, which the training process verifies, nearly all of it. A checkpoint that
    two attempts could not make a step from counts as damaged too.
    """
    without_step = Counter(
        tried.resume_from
        for tried in store.attempts(job.job_uuid)
        if tried.reason is Reason.rank_failed and tried.step <= tried.start_step
    )
    for checkpoint in reversed(_listed(store, job)):
        if is_whole(checkpoint.path) and without_step[checkpoint.path] < _TRIES:
            return checkpoint.path, checkpoint.step
        store.remove_checkpoint(checkpoint)
        store.warn(job.job_uuid, f"checkpoint {checkpoint.path} is damaged or gone and was skipped")
    given = _given(job)
    return None if given is None else (given, int(given.name.rpartition("-")[2]))


def fallbacks(store: Store, job: JobRecord, resume_from: Path | None) -> list[Path]:
    """Other complete checkpoints that an attempt may resume from if `resume_from` proves damaged, the newest first; the
    one that the job began with is the last. None for an attempt that begins at step 0."""
    if resume_from is None:
        return []
    own = [checkpoint.path for checkpoint in reversed(_listed(store, job))]
    given = _given(job)
    paths = own if given is None else [*own, given]
    return [path for path in paths if path != resume_from and is_whole(path)]


def _keeps_all(job: JobRecord) -> bool:
    """Whether every step checkpoint of the job is a planned one, and planned ones stay."""
    return bool(job.spec.train.save_steps) and not job.spec.train.best_checkpoint and not job.spec.train.keep_last


def _listed(store: Store, job: JobRecord) -> list[CheckpointRecord]:
    return [checkpoint for checkpoint in store.checkpoints(job.job_uuid) if checkpoint.kind == "step"]


def _given(job: JobRecord) -> Path | None:
    """The job's own copy of another job's checkpoint."""
    return job.spec.resume_from.path if job.spec.resume_from else None


def named_path(event: Event) -> Path | None:
    """The checkpoint that an event names, if it names one."""
    if isinstance(event, CheckpointSaved | CheckpointDamaged):
        return event.path
    return event.resumed_from if isinstance(event, Prepared) else None


def refusal(event: Event, spec: JobSpec) -> str | None:
    """Why an event's checkpoint cannot be the job's, as a sentence; None: the event names none, or the job's own.

    The checkpoint that the job was given to begin with can be resumed from or found damaged, and never saved.
    """
    path = named_path(event)
    if path is None:
        return None
    saved = isinstance(event, CheckpointSaved)
    if not saved and spec.resume_from is not None and path == spec.resume_from.path:
        return None
    return misplaced(path, event.kind if isinstance(event, CheckpointSaved) else "step", spec.checkpoint_dir)


def accepted(events: Iterable[Event], spec: JobSpec) -> Iterator[Event]:
    """The events of a job with a warning in place of each checkpoint that is not the job's."""
    for event in events:
        why = refusal(event, spec)
        if why is None:
            yield event
            continue
        yield Warned(time=event.time, message=f"the event {event.type!r} names {named_path(event)}, left out: {why}")
        if isinstance(event, Prepared):  # everything else in it is about the training only
            yield event.model_copy(update={"resumed_from": None})
