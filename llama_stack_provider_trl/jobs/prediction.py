"""Predicts when waiting jobs start, as far as the ends of the jobs before them are known. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from .cores import Held
from .demands import Queued
from .placement import Node, Obtainable, place, places_for
from .states import JobState


class StepPace(NamedTuple):
    """How far a job is, and how fast: in its current attempt, or in the last one. None: not known."""

    steps_left: int | None = None
    step_seconds: float | None = None
    """Mean seconds of a step."""
    stepped_at: float | None = None
    """Time of the last step, seconds since the epoch."""

    @property
    def seconds_left(self) -> float | None:
        return None if self.steps_left is None or self.step_seconds is None else self.steps_left * self.step_seconds


class WaitingJob(NamedTuple):
    job: Queued
    not_before: float
    """It waits for its next attempt until then, seconds since the epoch."""
    pace: StepPace
    after: frozenset[str] = frozenset()
    """Jobs that it waits for and that have not completed."""


class RunningJob(NamedTuple):
    job_uuid: str
    state: JobState
    pace: StepPace


class PredictedStart(NamedTuple):
    """When a job starts."""

    at: float | None
    """Seconds since the epoch; None: it cannot be predicted."""
    why: str = ""
    """Why it cannot be predicted."""


def predict(
    waiting: Sequence[WaitingJob],
    nodes: Sequence[Node],
    holders: Mapping[str, str],
    running: Iterable[RunningJob],
    now: float,
    obtainable: Sequence[Obtainable] = (),
) -> dict[str, PredictedStart]:
    """Run the queue ahead of time: at each end that is known the devices become free, and `place` gives them to jobs.

    A job that has never trained has no known duration. It keeps its devices here, so what waits for these, or for it,
    is not predicted.

    Args:
        nodes: the service's own machine first.
        holders: place -> the job that holds it.
        running: jobs that may have processes.
        now: seconds since the epoch.
        obtainable: what pools may give: when is not known.

    Returns:
        job_uuid -> start, of all waiting jobs.
    """
    left = {one.job.job_uuid: one for one in waiting}
    held = dict(holders)
    ends, unknown = _ends(running, now)
    for job_uuid in held.values():
        if job_uuid not in ends:
            unknown.setdefault(job_uuid, f"processes of job {job_uuid} have not ended yet")
    found: dict[str, PredictedStart] = {}
    completed: set[str] = set()
    time = now
    while left:
        ready = [one.job for one in left.values() if one.not_before <= time and one.after <= completed]
        for job_uuid, places in place(ready, nodes, held, time, obtainable).items():
            found[job_uuid] = PredictedStart(time)
            held |= dict.fromkeys(places, job_uuid)
            seconds = left.pop(job_uuid).pace.seconds_left
            if seconds is None:
                unknown[job_uuid] = f"job {job_uuid} starts before it and has not trained yet"
            else:
                ends[job_uuid] = time + seconds
        coming = [*ends.values(), *(one.not_before for one in left.values() if one.not_before > time)]
        if not coming:
            break
        time = max(time, min(coming))
        over = {job_uuid for job_uuid, end in ends.items() if end <= time}
        completed |= over
        ends = {job_uuid: end for job_uuid, end in ends.items() if job_uuid not in over}
        held = {place_: job_uuid for place_, job_uuid in held.items() if job_uuid not in over}
    return found | {
        job_uuid: PredictedStart(
            None, _why_blocked(one.after - completed, unknown) or _why(one.job, nodes, held, unknown, obtainable)
        )
        for job_uuid, one in left.items()
    }


def _ends(running: Iterable[RunningJob], now: float) -> tuple[dict[str, float], dict[str, str]]:
    """Job -> its end, and of the others -> why it is not known."""
    ends, unknown = {}, {}
    for job in running:
        seconds, stepped_at = job.pace.seconds_left, job.pace.stepped_at
        if job.state in (JobState.pausing, JobState.cancelling):
            unknown[job.job_uuid] = f"job {job.job_uuid} is {job.state}"
        elif seconds is None or stepped_at is None:
            unknown[job.job_uuid] = f"job {job.job_uuid} has done no step yet"
        elif not seconds:
            unknown[job.job_uuid] = f"job {job.job_uuid} has done its steps and saves its result"
        else:
            # Of a job that is overdue no more than the step that it is at counts as done.
            ends[job.job_uuid] = max(stepped_at, now - (job.pace.step_seconds or 0.0)) + seconds
    return ends, unknown


def _why_blocked(after: Collection[str], unknown: Mapping[str, str]) -> str:
    if not after:
        return ""
    first = next((name for name in sorted(after) if name in unknown), min(after))
    known = unknown.get(first, "").removeprefix(f"job {first} ")
    return f"it waits for job {first}" + (f", which {known}" if known else "")


def _why(
    job: Queued,
    nodes: Sequence[Node],
    held: Mapping[str, str],
    unknown: Mapping[str, str],
    obtainable: Sequence[Obtainable],
) -> str:
    places = places_for(job, nodes, obtainable)
    if not places:
        return "no machine that takes jobs now can serve it"
    taken = Held(held)
    known = (unknown[job_uuid] for place_ in places for job_uuid in taken.of(place_) if job_uuid in unknown)
    return next(known, "jobs before it come first, or too few machines take jobs")
