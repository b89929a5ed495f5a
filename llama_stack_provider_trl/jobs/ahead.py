"""The jobs that run and those that wait, as far as it takes to predict when the latter start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .database import Database
from .demands import AGING, CRITICAL
from .prediction import RunningJob, WaitingJob
from .row_mapping import running_job, waiting_job


class QueueAhead:
    """The queue of a job database, and what runs before it. Every method may raise StoreError."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database, self._clock = database, clock

    def waiting(self, limit: int) -> Sequence[WaitingJob]:
        """The first waiting jobs in the order of the queue, with those that wait for their next attempt."""
        values = {"limit": limit, "now": self._clock(), "aging": AGING, "highest": CRITICAL}
        return [waiting_job(row) for row in self._database.select("select_first_waiting", values)]

    def running(self) -> Sequence[RunningJob]:
        """The jobs that may have processes (`states.ACTIVE`)."""
        return [running_job(row) for row in self._database.select("select_paces", {})]
