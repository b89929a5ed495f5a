"""The jobs of a database that come after others: what blocks them, and what each supervisor pass does about it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from .... import faults
from ....errors import InvalidRequest
from ....specs.events import Reason
from ....specs.job import JobSpec
from ....specs.work import ROWS
from ...decisions.graph import Blocked, Decisions, Predecessor, decide
from ...decisions.states import TERMINAL, JobState
from ..database import Database, Execute
from ..records import Chain, ChainedJob

log = logging.getLogger(__name__)
AFTER = "provider_options.after"
_BETWEEN = ","
"""Between the names of several checkpoints of one job, all of which another job begins with."""
_LISTED = 100
"""Jobs after a job that its status lists."""
_DETAILS_EVERY = 2.0
"""Seconds between two updates of reasons for waiting: those of a thousand jobs name the step of one."""


class Chains:
    """Every method may raise StoreError."""

    def __init__(
        self, database: Database, now: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._database = database
        self._now, self._clock = now, clock
        self._last_details = -_DETAILS_EVERY

    def of_job(self, job_uuid: str) -> Chain:
        """The jobs before and after a job."""
        values = {"job_uuid": job_uuid, "limit": _LISTED}
        return Chain(*(tuple(map(_chained, self._database.select(f"select_{way}", values))) for way in Chain._fields))

    def blocked(self) -> Sequence[Blocked]:
        """The scheduled jobs that wait for others, the oldest first."""
        rows = self._database.select("select_blocked", {})
        return [_blocked(list(group)) for _, group in groupby(rows, key=lambda row: row["job_uuid"])]

    def needed_checkpoints(self, job_uuid: str) -> set[str]:
        """Names of a job's checkpoints that jobs which have not ended begin with."""
        rows = self._database.select("select_needed_checkpoints", {"job_uuid": job_uuid})
        return {name for row in rows for name in row["base"].split(_BETWEEN)}

    def advance(self, end: Callable[[Blocked, JobState, Reason | None, str], object]) -> None:
        """Release the jobs that wait for none any longer, and end those that can never start. `end` ends a job in a
        state, with its reason and a message."""
        if not (blocked := self.blocked()):
            return
        decided = decide(blocked)
        if decided.ready or decided.ended:
            faults.reach("supervisor-chain-decided")
        self._apply(decided)
        if decided.ready:
            faults.reach("supervisor-job-unblocked")
        for job, state, message in decided.ended:
            end(job, state, Reason.predecessor_failed if state is JobState.failed else None, message)

    def _apply(self, decided: Decisions) -> None:
        now = self._clock()
        details = decided.waiting if now - self._last_details >= _DETAILS_EVERY else ()
        if not decided.ready and not details:
            return
        with self._database.transaction() as execute:
            for job_uuid in decided.ready:
                if execute("unblock_job", {"job_uuid": job_uuid, "now": self._now()}).rowcount:
                    log.info("job %s: the jobs that it comes after have completed", job_uuid)
            for job_uuid, detail in details:
                execute("change_blocked_detail", {"job_uuid": job_uuid, "detail": detail})
        if details:
            self._last_details = now


def insert_predecessors(execute: Execute, spec: JobSpec) -> None:
    """Store what a new job comes after, in the transaction that stores the job. Raises InvalidRequest: one of these
    jobs does not exist, or can never complete."""
    read = spec.jobs_read
    for position, name in enumerate(spec.after):
        found = execute("select_state", {"job_uuid": name}).fetchone()
        if found is None:
            hint = f"there is no job {name!r} here: submit it first, or correct its name"
            raise InvalidRequest(AFTER, list(spec.after), hint)
        state = JobState(found["state"])
        if state in TERMINAL and state is not JobState.completed:
            hint = (
                f"job {name!r} is {state}, so this one could never start: submit that job again under another job_uuid"
            )
            raise InvalidRequest(AFTER, list(spec.after), hint)
        row = {"job_uuid": spec.job_uuid, "predecessor": name, "position": position}
        needed = dict.fromkeys(one.checkpoint for one in read if one.job_uuid == name)
        base = _BETWEEN.join(needed) or None
        if base is None and spec.data.dataset.of_job == name:  # as with a checkpoint, it is needed to the job's end
            base = ROWS
        execute("insert_predecessor", {**row, "cancel_with": int(spec.cancel_with), "base": base})


def _chained(row: Any) -> ChainedJob:
    return ChainedJob(row["job_uuid"], None if row["state"] is None else JobState(row["state"]))


def _blocked(rows: Sequence[Any]) -> Blocked:
    first = rows[0]
    return Blocked(
        first["job_uuid"],
        first["attempt"],
        first["detail"],
        bool(first["cancel_with"]),
        tuple(map(_predecessor, rows)),
    )


def _predecessor(row: Any) -> Predecessor:
    return Predecessor(
        row["predecessor"],
        None if row["state"] is None else JobState(row["state"]),
        None if row["reason"] is None else Reason(row["reason"]),
        row["step"],
        row["total_steps"],
    )
