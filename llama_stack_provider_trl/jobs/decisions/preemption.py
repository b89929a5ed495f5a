"""Decides which running jobs save and wait, so that a critical one starts. Pure functions, as `placement`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from .demands import CRITICAL, Queued
from .placement import Free, Giving, Node, Obtainable, Offers, Slot, nodes_wanted, refusing, wish_of

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
    """Jobs that are to save and wait, and what others get of them."""

    victims: Mapping[str, str] = {}
    """Job that is paused -> the critical one that gets its devices."""
    reserved: Mapping[str, str] = {}
    """Place -> the critical job that waits for it."""
    starts: Mapping[str, tuple[str, ...]] = {}
    """Critical jobs for which others have saved -> the places at which they start now."""
    compared: int = 0
    """Nodes that were examined for jobs."""


def preempt(
    queued: Iterable[Queued],
    running: Collection[Preemptible],
    nodes: Sequence[Node],
    holders: Mapping[str, str],
    now: float,
    obtainable: Sequence[Obtainable] = (),
    known: Offers | None = None,
    *,
    expected: Sequence[Node] = (),
    promised: Mapping[str, str] = {},
    most: float = math.inf,
) -> Preemption:
    """Choose the running jobs whose devices critical jobs get that find too few free ones.

    Of the jobs below `critical`, those come first that give their devices up in any case, then those of the lowest
    priority, then those that have started last. Only jobs that hold something which the critical one gets are chosen:
    none where it could not start all the same. A waiting job counts by its requested priority: one that has grown to
    critical by waiting gets free devices, and pauses none.

    Free devices that a job with an earlier claim gets, or that are kept for it, are not free for a later critical one,
    which has others save instead. What these give up is for that critical job, whoever has an earlier claim: else that
    one would start there, only to be the next that is paused. Each job that runs gives way to one critical job at most,
    which is not paused: so it delays a job with an earlier claim once.

    Args:
        nodes: the service's own machine first.
        holders: place -> job that has it.
        now: seconds since the epoch.
        obtainable: what pools may give.
        expected: machines that pools have been asked for, which jobs with an earlier claim may wait for.
        promised: `reserved` as it was before.
        most: nodes to examine; later critical jobs are left out.
    """
    candidates = sorted(
        (one for one in running if one.is_ending or _may_pause(one, now)),
        key=lambda one: (not one.is_ending, one.priority, -one.launched_at),
    )
    first = [job for job in queued if job.claim(now)[0] <= -CRITICAL]
    critical = {job.job_uuid for job in first if job.priority >= CRITICAL}
    promised = {place_: job_uuid for place_, job_uuid in promised.items() if job_uuid in critical}
    if not critical or not (candidates or promised):
        return Preemption()
    known = {} if known is None else known
    joined = Giving(nodes, holders, now, obtainable, known=known)
    every, known = ([*nodes, *expected], {}) if expected else (nodes, known)
    giving = Giving(every, [*holders, *promised], now, obtainable, known=known)
    now_free, slots = joined.free, joined.free.slots
    held_by = {one.job_uuid: slots(one.places) for one in running}
    # Not what a job has saved on a node that has yet to report it: nothing else has to be paused for that.
    held = _all(held_by.values())
    promised_to: dict[str, set[Slot]] = {}
    for place_, job_uuid in promised.items():
        promised_to.setdefault(job_uuid, set()).update(slots([place_]))
    victims: dict[str, str] = {}
    reserved: dict[str, str] = {}
    starts: dict[str, tuple[str, ...]] = {}
    unserved, refuse = set(), refusing(nodes)
    for job in sorted(first, key=lambda job: job.claim(now)):
        if joined.compared + giving.compared > most:
            break
        own = promised_to.pop(job.job_uuid, set())
        # All candidates together were too little for another job with the same wish, and there are no more now.
        if job.priority < CRITICAL or (not own and wish_of(job, refuse) in unserved):
            giving.give(job)
            continue
        free, kept = giving.free.without(own - held), _all(promised_to.values())
        holding = {one.job_uuid: held_by[one.job_uuid] - kept for one in candidates}
        chosen, places = _fewest(job, candidates, joined, free, holding)
        if not places:
            unserved.add(wish_of(job, refuse))
            giving.give(job)
            continue
        if chosen:
            names = {one.job_uuid for one in chosen}
            victims |= {one.job_uuid: job.job_uuid for one in chosen if one.priority < CRITICAL}
            candidates = [one for one in candidates if one.job_uuid not in names]
            given_up = _all(holding[name] for name in names)
            held -= given_up
            free = free.without(given_up)
        if chosen or own:
            giving.change(free)
            reserved |= dict.fromkeys(places, job.job_uuid)
            if now_free.are_free(slots(places)):
                starts[job.job_uuid] = places
        giving.take(places)
    return Preemption(victims, reserved, starts, joined.compared + giving.compared)


def _all(sets: Iterable[Iterable[Slot]]) -> set[Slot]:
    return {slot for one in sets for slot in one}


def _may_pause(one: Preemptible, now: float) -> bool:
    return one.priority < CRITICAL and (one.attempt == 1 or now - one.launched_at >= LEAST_RUN)


def _fewest(
    job: Queued, candidates: Sequence[Preemptible], joined: Giving, free: Free, holding: Mapping[str, set[Slot]]
) -> tuple[list[Preemptible], tuple[str, ...]]:
    """The jobs to pause, with the places that the job gets then; no place: it could not start.

    Args:
        holding: job -> what becomes free when it is paused.
    """
    machines: set[str] | None = None

    def places_without(ended: Sequence[Preemptible]) -> tuple[str, ...]:
        return joined.found(job, free.without(_all(holding[one.job_uuid] for one in ended)), machines)

    if places := places_without([]):
        return [], places
    if not places_without(candidates):
        return [], ()
    chosen: list[Preemptible] = []
    rest = list(candidates)
    while not places:
        least, most = 0, len(rest)  # too few of them, and enough
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (least, middle) if places_without([*chosen, *rest[:middle]]) else (middle, most)
        # Without the last of these the job could not start, whichever of those before it are paused.
        *rest, last = rest[:most]
        chosen.append(last)
        if nodes_wanted(job) == 1:  # so it starts on a machine of that one
            machines = {where for where, _ in holding[last.job_uuid]}
            rest = [one for one in rest if any(where in machines for where, _ in holding[one.job_uuid])]
        places = places_without(chosen)
    return chosen, places
