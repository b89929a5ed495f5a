"""Decides which jobs may start after others, and which cannot any more. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...specs.events import Reason
from .states import TERMINAL, JobState

_NAMED = 3
"""Jobs that a reason for waiting names; it counts the others."""


class Predecessor(NamedTuple):
    """A job that must have completed before another one starts."""

    job_uuid: str
    state: JobState | None
    """None: it was deleted."""
    reason: Reason | None = None
    """Why it failed."""
    step: int | None = None
    total_steps: int | None = None


class Blocked(NamedTuple):
    """A scheduled job that waits for others."""

    job_uuid: str
    attempt: int
    detail: str
    """The reason for waiting, as in its status."""
    cancel_with: bool
    """Whether it is cancelled with a job that it waits for; else it fails."""
    after: tuple[Predecessor, ...]


class Decisions(NamedTuple):
    """What follows for the jobs that wait for others."""

    ready: tuple[str, ...]
    """They wait for no job any longer."""
    ended: tuple[tuple[Blocked, JobState, str], ...]
    """They can never start: the state that each gets, and why."""
    waiting: tuple[tuple[str, str], ...]
    """The others whose reason for waiting has changed, with the new one."""


def decide(blocked: Iterable[Blocked]) -> Decisions:
    """Decide on all jobs that wait for others, at once: what fails here fails what waits for it.

    Args:
        blocked: the oldest first, so that a job comes after those that it waits for.
    """
    ready, ended, waiting = [], [], []
    decided: dict[str, tuple[JobState, Reason | None]] = {}
    for job in blocked:
        after = [_as_decided(one, decided) for one in job.after]
        if (lost := _lost(after)) is not None:
            cancelled = job.cancel_with and lost.state is JobState.cancelled
            state = JobState.cancelled if cancelled else JobState.failed
            decided[job.job_uuid] = state, None if cancelled else Reason.predecessor_failed
            ended.append((job, state, _why_lost(lost)))
        elif open_ := [one for one in after if one.state is not JobState.completed]:
            if (why := why_waits(open_)) != job.detail:
                waiting.append((job.job_uuid, why))
        else:
            ready.append(job.job_uuid)
    return Decisions(tuple(ready), tuple(ended), tuple(waiting))


def why_waits(after: Sequence[Predecessor]) -> str:
    """The reason for which a job waits, from the jobs that have not completed."""
    named = [f"job {one.job_uuid} ({_progress(one)})" for one in after[:_NAMED]]
    more = len(after) - len(named)
    if more:
        return f"waits for {', '.join(named)} and {more} more"
    *first, last = named
    return f"waits for {', '.join(first)} and {last}" if first else f"waits for {last}"


def cycle(after: Mapping[str, Iterable[str]]) -> list[str]:
    """Jobs that wait for one another, the first one again at the end; empty: there are none.

    Args:
        after: job -> the jobs that it waits for. Those that are no key wait for none.
    """
    done: set[str] = set()
    for start in after:
        path: list[str] = []
        todo = [(start, iter(after[start]))] if start not in done else []
        path.extend(name for name, _ in todo)
        while todo:
            name, others = todo[-1]
            other = next((one for one in others if one in after and one not in done), None)
            if other is None:
                done.add(name)
                todo.pop()
                path.pop()
            elif other in path:
                return [*path[path.index(other) :], other]
            else:
                todo.append((other, iter(after[other])))
                path.append(other)
    return []


def _as_decided(one: Predecessor, decided: Mapping[str, tuple[JobState, Reason | None]]) -> Predecessor:
    if one.job_uuid not in decided:
        return one
    state, reason = decided[one.job_uuid]
    return one._replace(state=state, reason=reason)


def _lost(after: Iterable[Predecessor]) -> Predecessor | None:
    """The first job that can never complete."""
    return next((one for one in after if one.state is None or one.state in TERMINAL - {JobState.completed}), None)


def _why_lost(one: Predecessor) -> str:
    if one.state is None:
        return f"job {one.job_uuid!r}, which it waited for, was deleted before it completed"
    reason = f" ({one.reason})" if one.reason else ""
    return f"job {one.job_uuid!r}, which it waited for, {_WORDS[one.state]}{reason}"


_WORDS = {JobState.failed: "failed", JobState.cancelled: "was cancelled"}


def _progress(one: Predecessor) -> str:
    state = one.state.value if one.state else "deleted"
    return f"{state}, step {one.step or 0} of {one.total_steps}" if one.total_steps else state
