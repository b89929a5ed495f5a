"""Predicts when waiting jobs start, as far as the ends of the jobs before them are known. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from .cores import Held
from .demands import CRITICAL, Queued
from .placement import Node, Obtainable, Offers, place, places_for, refusing, wish_of
from .preemption import LEAST_RUN, Preemptible, Preemption, preempt
from .states import JobState

_MOST_COMPARED = 400_000
"""Kinds of demand times nodes, over all times that are examined: 1 s on one core. Later starts are not predicted."""


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
    job: Queued | None = None
    """As it would wait again; None: it is not preempted."""
    attempt: int = 1
    launched_at: float = 0.0
    """Start of its attempt, seconds since the epoch."""


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
    *,
    preempts: bool = False,
) -> dict[str, PredictedStart]:
    """Run the queue ahead of time: at each end that is known the devices become free, and `place` gives them to jobs.

    A job that has never trained has no known duration. It keeps its devices here, so what waits for these, or for it,
    is not predicted. Returns job_uuid -> start, of all waiting jobs.

    Args:
        nodes: the service's own machine first.
        holders: place -> the job that holds it.
        running: jobs that may have processes.
        now: seconds since the epoch.
        obtainable: what pools may give: when is not known.
        preempts: whether critical jobs have others save and wait. The time that they take to save does not count.
    """
    ahead = _Ahead(waiting, nodes, holders, running, now, obtainable, preempts=preempts)
    refuse, compared = refusing(nodes), 0
    while ahead.left:
        if compared > _MOST_COMPARED:
            ahead.has_given_up = True
            break
        ready = [
            one.job for one in ahead.left.values() if one.not_before <= ahead.time and one.after <= ahead.completed
        ]
        compared += len({wish_of(job, refuse) for job in ready}) * len(nodes)
        if (preemption := ahead.preemption(ready, _MOST_COMPARED - compared)) is not None:
            compared += preemption.compared
            if compared > _MOST_COMPARED:
                continue  # to give up: it may lack critical jobs
            ready = ahead.make_way(ready, preemption)
        for job_uuid, places in place(ready, nodes, ahead.held, ahead.time, obtainable, known=ahead.known).items():
            ahead.start(job_uuid, places)
        if not ahead.advance():
            break
    return {one.job.job_uuid: ahead.start_of(one.job.job_uuid) for one in waiting}


class _Ahead:
    """The queue at a time to come. The arguments are those of `predict`."""

    def __init__(
        self,
        waiting: Sequence[WaitingJob],
        nodes: Sequence[Node],
        holders: Mapping[str, str],
        running: Iterable[RunningJob],
        now: float,
        obtainable: Sequence[Obtainable],
        *,
        preempts: bool,
    ) -> None:
        self._preempts = preempts
        self._nodes, self._obtainable, self.time = nodes, obtainable, now
        self.left = {one.job.job_uuid: one for one in waiting}
        self.held = dict(holders)
        self.completed: set[str] = set()
        self.known: Offers = {}
        self.has_given_up = False
        self._found: dict[str, PredictedStart] = {}
        self._running = {job.job_uuid: job for job in running}
        self._ends, self._unknown = _ends(self._running.values(), now)
        for job_uuid in self.held.values():
            if job_uuid not in self._ends:
                self._unknown.setdefault(job_uuid, f"processes of job {job_uuid} have not ended yet")

    def start(self, job_uuid: str, places: Sequence[str]) -> None:
        """Give a waiting job its devices now."""
        self._found.setdefault(job_uuid, PredictedStart(self.time))
        self.held |= dict.fromkeys(places, job_uuid)
        job, _, pace, _ = self.left.pop(job_uuid)
        attempt = self._running[job_uuid].attempt + 1 if job_uuid in self._running else 2 if job.tried else 1
        self._running[job_uuid] = RunningJob(job_uuid, JobState.in_progress, pace, job, attempt, self.time)
        if (seconds := pace.seconds_left) is None:
            self._unknown.setdefault(job_uuid, f"{job_uuid} starts before it and has not trained yet")
        else:
            self._ends[job_uuid] = self.time + seconds

    def preemption(self, ready: Sequence[Queued], most: int) -> Preemption | None:
        """What critical jobs have others do now; None: nothing."""
        if not self._preempts or not any(job.priority >= CRITICAL for job in ready):
            return None
        places_of: dict[str, list[str]] = {}
        for place_, holder in self.held.items():
            places_of.setdefault(holder, []).append(place_)
        candidates = [
            Preemptible(
                one.job_uuid,
                one.job.priority,
                tuple(places_of[one.job_uuid]),
                one.attempt,
                one.launched_at,
                self._is_ending(one.job_uuid),
            )
            for one in self._running.values()
            if one.job is not None and one.job_uuid in places_of
        ]
        return preempt(ready, candidates, self._nodes, self.held, self.time, self._obtainable, self.known, most=most)

    def _is_ending(self, job_uuid: str) -> bool:
        running = self._running.get(job_uuid)
        return running is not None and running.state in (JobState.pausing, JobState.cancelling)

    def make_way(self, ready: Sequence[Queued], preemption: Preemption) -> list[Queued]:
        """Start the critical jobs for which others save and wait. Returns the jobs that get free devices only."""
        victims, reserved = preemption.victims, preemption.reserved
        ending = {place_ for place_, job_uuid in self.held.items() if self._is_ending(job_uuid)}
        for critical in dict.fromkeys(reserved.values()):
            places = [place_ for place_, job_uuid in reserved.items() if job_uuid == critical]
            if ending.isdisjoint(places):  # else it waits for an end that is not known
                for victim in [victim for victim, job_uuid in victims.items() if job_uuid == critical]:
                    self._wait_again(victim)
                self.start(critical, places)
        waits_for = set(reserved.values())
        return [job for job in ready if job.job_uuid not in waits_for]

    def _wait_again(self, job_uuid: str) -> None:
        job = self._running[job_uuid].job
        assert job is not None
        self.held = {place_: holder for place_, holder in self.held.items() if holder != job_uuid}
        end = self._ends.pop(job_uuid, None)
        pace = StepPace() if end is None else StepPace(1, end - self.time, self.time)
        self.left[job_uuid] = WaitingJob(job._replace(scheduled_at=self.time, tried=True), self.time, pace)

    def advance(self) -> bool:
        """Go to the next time at which a job ends or may start. Returns whether there is one."""
        coming = [
            *self._ends.values(),
            *(one.not_before for one in self.left.values() if one.not_before > self.time),
            *self._pausable_from(),
        ]
        if not coming:
            return False
        self.time = max(self.time, min(coming))
        over = {job_uuid for job_uuid, end in self._ends.items() if end <= self.time}
        self.completed |= over
        self._ends = {job_uuid: end for job_uuid, end in self._ends.items() if job_uuid not in over}
        self.held = {place_: job_uuid for place_, job_uuid in self.held.items() if job_uuid not in over}
        return True

    def _pausable_from(self) -> list[float]:
        """Later times at which running jobs may be paused for critical ones."""
        if not self._preempts or not any(one.job.priority >= CRITICAL for one in self.left.values()):
            return []
        times = [
            one.launched_at + LEAST_RUN
            for one in self._running.values()
            if one.job is not None and one.attempt > 1 and one.job.priority < CRITICAL and one.job_uuid in self._ends
        ]
        return [time for time in times if time > self.time]

    def start_of(self, job_uuid: str) -> PredictedStart:
        """The start of a waiting job, once there is nothing more to predict."""
        if job_uuid in self._found:
            return self._found[job_uuid]
        if self.has_given_up:
            return PredictedStart(None, "too many jobs and machines are before it")
        one = self.left[job_uuid]
        why = _why_blocked(one.after - self.completed, self._unknown)
        return PredictedStart(None, why or _why(one.job, self._nodes, self.held, self._unknown, self._obtainable))


def _ends(running: Iterable[RunningJob], now: float) -> tuple[dict[str, float], dict[str, str]]:
    """Job -> its end, and of the others -> why it is not known."""
    ends, unknown = {}, {}
    for job in running:
        seconds, stepped_at = job.pace.seconds_left, job.pace.stepped_at
        if job.state in (JobState.pausing, JobState.cancelling):
            unknown[job.job_uuid] = f"{job.job_uuid} is {job.state}"
        elif seconds is None or stepped_at is None:
            unknown[job.job_uuid] = f"{job.job_uuid} has done no step yet"
        elif not seconds:
            unknown[job.job_uuid] = f"{job.job_uuid} has done its steps and saves its result"
        else:
            # Of a job that is overdue no more than the step that it is at counts as done.
            ends[job.job_uuid] = max(stepped_at, now - (job.pace.step_seconds or 0.0)) + seconds
    return ends, unknown


def _why_blocked(after: Collection[str], unknown: Mapping[str, str]) -> str:
    if not after:
        return ""
    first = next((name for name in sorted(after) if name in unknown), min(after))
    known = unknown.get(first, "").removeprefix(f"{first} ")
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
