"""Decides which running jobs save and wait, so that a critical one starts. Pure functions, as `placement`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .demands import CRITICAL, Queued
from .placement import Node, Obtainable, Offers, place, refusing, wish_of

LEAST_RUN = 3600.0
"""Seconds that every attempt but a job's first one trains before it is paused: a job that is paused again and again
advances by an hour each time."""


class Preemptible(NamedTuple):
    """A job with devices, which it may have to give up."""

    job_uuid: str
    priority: int
    places: tuple[str, ...]
    attempt: int
    launched_at: float
    """Start of its attempt, seconds since the epoch."""
    is_ending: bool = False
    """Whether it gives its devices up in any case: it is paused or cancelled, or was chosen before."""


class Preemption(NamedTuple):
    """Jobs that are to save and wait."""

    victims: Mapping[str, str] = {}
    """Job that is paused -> the critical one that gets its devices."""
    reserved: Mapping[str, str] = {}
    """Place -> the critical job that waits for it."""


def preempt(
    queued: Iterable[Queued],
    running: Iterable[Preemptible],
    nodes: Sequence[Node],
    holders: Mapping[str, str],
    now: float,
    obtainable: Sequence[Obtainable] = (),
    known: Offers | None = None,
) -> Preemption:
    """Choose the running jobs whose devices critical jobs get that find too few free ones.

    Of the jobs below `critical`, those come first that give their devices up in any case, then those of the lowest
    priority, then those that have started last. Only jobs that hold something which the critical one gets are chosen:
    none where it could not start all the same. A waiting job counts by its requested priority: one that has grown to
    critical by waiting gets free devices, and pauses none.

    Args:
        nodes: the service's own machine first.
        holders: place -> job that has it.
        now: seconds since the epoch.
        obtainable: what pools may give.
        known: see `place`.
    """
    victims: dict[str, str] = {}
    reserved: dict[str, str] = {}
    held = dict(holders)
    known = {} if known is None else known
    unserved, refuse = set(), refusing(nodes)
    candidates = sorted(
        (one for one in running if one.is_ending or _may_pause(one, now)),
        key=lambda one: (not one.is_ending, one.priority, -one.launched_at),
    )
    for job in sorted((job for job in queued if job.priority >= CRITICAL), key=lambda job: job.claim(now)):
        if not candidates:
            break
        if (wish := wish_of(job, refuse)) in unserved:
            continue  # all candidates together were too little for another such job, and there are no more now
        chosen, places = _fewest(job, candidates, nodes, held, now, obtainable, known)
        if chosen:
            names = {one.job_uuid for one in chosen}
            victims |= {one.job_uuid: job.job_uuid for one in chosen if one.priority < CRITICAL}
            reserved |= dict.fromkeys(places, job.job_uuid)
            held = {place_: holder for place_, holder in held.items() if holder not in names}
            candidates = [one for one in candidates if one.job_uuid not in names]
        if not places:
            unserved.add(wish)
        held |= dict.fromkeys(places, job.job_uuid)
    return Preemption(victims, reserved)


def _may_pause(one: Preemptible, now: float) -> bool:
    return one.priority < CRITICAL and (one.attempt == 1 or now - one.launched_at >= LEAST_RUN)


def _fewest(
    job: Queued,
    candidates: Sequence[Preemptible],
    nodes: Sequence[Node],
    holders: Mapping[str, str],
    now: float,
    obtainable: Sequence[Obtainable],
    known: Offers,
) -> tuple[list[Preemptible], tuple[str, ...]]:
    """The jobs to pause, with the places that the job gets then; no place: it could not start."""

    def places_without(ended: Sequence[Preemptible]) -> tuple[str, ...]:
        names = {one.job_uuid for one in ended}
        left = [place_ for place_, holder in holders.items() if holder not in names]
        return place([job], nodes, left, now, obtainable, known=known).get(job.job_uuid, ())

    chosen: list[Preemptible] = []
    rest = list(candidates)
    while not (places := places_without(chosen)):
        least, most = 0, len(rest)  # too few of them, and enough
        if not places_without([*chosen, *rest]):
            return [], ()
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (least, middle) if places_without([*chosen, *rest[:middle]]) else (middle, most)
        # Without the last of these the job could not start, whichever of those before it are paused.
        *rest, last = rest[:most]
        chosen.append(last)
    return chosen, places
