"""Checks the checkpoint paths in events: a training writes its events, and may name any path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ..specs.checkpoint_files import misplaced
from ..specs.events import CheckpointDamaged, CheckpointSaved, Event, Prepared, Warned
from ..specs.job import JobSpec


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
