"""Decides whether a loaned machine is for jobs, or for its owner. Pure: loads and times are passed in."""

from __future__ import annotations

from dataclasses import dataclass

from ..wire import OwnerUse

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
