"""Measures how much of a loaned machine its owner uses, the CPU time of processes that are not the agent's, and decides
whether it is for jobs."""

from __future__ import annotations

import logging
import os
import pwd
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from llama_stack_provider_trl.launch.runner import RunnerStatus
from llama_stack_provider_trl.system.files import RunDir
from llama_stack_provider_trl.system.process import RUN_DIR_MARK, carries

from ..wire import OwnerUse
from .load import cpu_seconds

log = logging.getLogger(__name__)
_FIELDS = ["ppid", "create_time", "uids", "cpu_times"]


class ProcessTime(NamedTuple):
    """A process and the CPU seconds of it and of its children that have ended."""

    pid: int
    parent: int
    created: float
    uid: int
    seconds: float


Processes = Mapping[int, ProcessTime]


class OwnerWatch:
    """Follows the owner's load on this machine.

    Args:
        processes: all processes of the machine.
        busy: seconds that all its cores together were busy, and in all.
    """

    def __init__(
        self,
        terms: LoanTerms,
        processes: Callable[[], Processes] | None = None,
        busy: Callable[[], tuple[float, float]] = cpu_seconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loan = Loan(terms)
        self._uid = None if terms.user is None else pwd.getpwnam(terms.user).pw_uid
        self._processes, self._busy, self._clock = processes or _processes, busy, clock
        self._before: tuple[float, Processes, tuple[float, float]] | None = None
        self._trouble = ""

    @property
    def use(self) -> OwnerUse:
        return self._loan.use

    def is_overdue(self) -> bool:
        """Whether trainings that have not saved and ended by now are to be ended."""
        return self._loan.is_overdue(self._clock())

    def measure(self, run_dirs: Iterable[Path]) -> bool:
        """Measure the load since the call before. Returns whether `use` has changed.

        Args:
            run_dirs: of the tasks here, whose processes are not the owner's.
        """
        try:
            return self._measure(run_dirs)
        except Exception as error:  # whatever it is: a machine that cannot be measured is its owner's
            if str(error) != self._trouble:
                log.warning("the load of this machine's owner cannot be measured: %s", error)
            self._trouble, self._before = str(error), None
            return self._loan.lose_sight()

    def _measure(self, run_dirs: Iterable[Path]) -> bool:
        now, found, busy = self._clock(), self._processes(), self._busy()
        before, self._before = self._before, (now, found, busy)
        if before is None or now <= before[0]:
            return False
        ours = tree([os.getpid(), *_runners(run_dirs)], found)
        load = owner_load(before[1], found, ours, self._uid, busy[0] - before[2][0], busy[1] - before[2][1])
        return self._loan.note(load, before[0], now)


def owner_load(
    before: Processes, now: Processes, ours: Collection[int], uid: int | None, busy: float, total: float
) -> float:
    """The share of all cores that the owner has used between two measurements, 0 to 1.

    Args:
        ours: processes that are not the owner's.
        uid: of the user whose processes count; None: all that are not ours.
        busy: seconds that all cores together were busy, for the owner or for others.
        total: seconds of all cores together.
    """
    if total <= 0:
        return 0.0
    if uid is None:
        used = busy - spent(before, {pid: one for pid, one in now.items() if pid in ours})
    else:
        used = spent(before, {pid: one for pid, one in now.items() if one.uid == uid and pid not in ours})
    return min(1.0, max(0.0, used / total))


def spent(before: Processes, members: Processes) -> float:
    """CPU seconds of processes since a measurement. What ended meanwhile counts by its parent, if that is a member,
    with all its time: what it had before is subtracted."""
    seconds = 0.0
    for pid, one in members.items():
        known = before.get(pid)
        seconds += one.seconds - (known.seconds if known is not None and known.created == one.created else 0.0)
    for pid, one in before.items():
        if one.parent in members and pid not in members:
            seconds -= one.seconds
    return max(0.0, seconds)


def tree(roots: Iterable[int], processes: Processes) -> set[int]:
    """The processes with these numbers, and all that descend from them."""
    children: dict[int, list[int]] = {}
    for one in processes.values():
        children.setdefault(one.parent, []).append(one.pid)
    found: set[int] = set()
    left = [pid for pid in roots if pid in processes]
    while left:
        if (pid := left.pop()) not in found:
            found.add(pid)
            left += children.get(pid, [])
    return found


def _runners(run_dirs: Iterable[Path]) -> Iterable[int]:
    """The runners of tasks. A training can write `runner.json`: another process than its runner does not count."""
    for run_dir in run_dirs:
        try:
            status = RunnerStatus.read(RunDir(run_dir).runner_status)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if status is not None and status.runner is not None and carries(status.runner, {RUN_DIR_MARK: str(run_dir)}):
            yield status.runner.pid


def _processes() -> Processes:
    found = {}
    for process in psutil.process_iter(_FIELDS):
        info = process.info
        times = info["cpu_times"]
        if times is None:  # no rights to read them
            continue
        ended = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        seconds = times.user + times.system + ended
        uid = -1 if info["uids"] is None else info["uids"].real
        found[process.pid] = ProcessTime(process.pid, info["ppid"] or 0, info["create_time"] or 0.0, uid, seconds)
    return found


BUSY_SECONDS = 4.0
"""Seconds of load above the limit after which the machine is its owner's: a page that loads, or a `git status`, is
shorter."""
CALM = 0.8
"""Share of the limit below which the owner's load must be before jobs come again: a load at the limit would let them
come and go."""
SAVING_SECONDS = 15.0
"""Seconds since the load rose after which a training that has not ended is ended. With the 2 s between two
measurements, before and after, and the 4 s in which a runner ends a task, its devices are free within 30 s."""


@dataclass(frozen=True)
class LoanTerms:
    """When a loaned machine takes jobs."""

    max_load: float = 0.3
    """Share of its cores, 0 to 1, that its owner may use meanwhile."""
    idle_seconds: float = 60.0
    """Seconds of a load below that after which jobs come (again)."""
    user: str | None = None
    """Its owner, whose processes count; None: all processes but those of this agent and its trainings."""


class Loan:
    """What the loads of a loaned machine's owner so far mean for jobs."""

    def __init__(self, terms: LoanTerms) -> None:
        self._terms = terms
        self.use = OwnerUse.unknown
        self._above_since: float | None = None
        self._below_since: float | None = None

    def note(self, load: float, begin: float, end: float) -> bool:
        """Record the owner's mean load from `begin` to `end`, in seconds. Returns whether `use` has changed."""
        before = self.use
        if load > self._terms.max_load:
            self._below_since = None
            self._above_since = begin if self._above_since is None else self._above_since
            if end - self._above_since >= BUSY_SECONDS:
                self.use = OwnerUse.high
        else:
            if self.use is not OwnerUse.high:
                self._above_since = None
            if load > CALM * self._terms.max_load:
                self._below_since = None
            else:
                self._below_since = begin if self._below_since is None else self._below_since
                if end - self._below_since >= self._terms.idle_seconds:
                    self.use, self._above_since = OwnerUse.low, None
        return self.use is not before

    def lose_sight(self) -> bool:
        """Note that the load cannot be measured: no jobs come. Returns whether `use` has changed."""
        before, self._below_since = self.use, None
        if self.use is OwnerUse.low:
            self.use = OwnerUse.unknown
        return self.use is not before

    def is_overdue(self, now: float) -> bool:
        """Whether trainings that have not saved and ended by now are to be ended."""
        return self.use is OwnerUse.high and self._above_since is not None and now - self._above_since >= SAVING_SECONDS
