"""Totals over all jobs that ever were, and what the running ones report: what monitoring reads.

A total is raised in the transaction that stores what it counts (`schema.sql` has two as triggers). So the totals
survive every kill, count nothing twice, and keep what deleted jobs have done. Their number depends on the number of
algorithms and reasons, not of jobs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ....specs.events import ProgressValues
from ..database import Database

FINISHED = "jobs_finished"
"""Jobs by algorithm, outcome (the state in which they ended) and reason (empty but for failed ones)."""
ATTEMPTS = "attempts_ended"
"""Attempts by how they ended: the reason of a failure, else completed, paused, cancelled or moved (to another node)."""
TOKENS = "tokens"
"""Tokens that were trained on, by algorithm; a step that is done again counts once."""
WAIT = "queue_wait"
"""Seconds from the submission of a job, or the end of its wait for other jobs, to its first attempt."""
WEBHOOKS = "webhooks"
"""Webhooks by outcome: delivered or given_up."""
CHECKPOINT = "checkpoint_write"
"""Seconds from the copy of a checkpoint in memory to its announcement, by kind."""
BOUNDS: Mapping[str, Sequence[float]] = {
    WAIT: (1, 5, 15, 60, 300, 900, 3600, 14400, 43200, 86400, 604800),
    CHECKPOINT: (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800),
}
"""Total that is a histogram -> upper bounds of its buckets, in seconds. Beyond the last one is infinity."""

type Labels = tuple[str, ...]


class Running(NamedTuple):
    """A job that may have processes, and what its current attempt has reported."""

    job_uuid: str
    algorithm: str
    places: tuple[str, ...]
    """Its devices, in the form of an attempt's record."""
    step: int
    total_steps: int | None
    """None: its training has not begun."""
    values: ProgressValues


class Totals:
    """Reads the totals of a job database. Every method may raise StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> Mapping[str, Mapping[Labels, float]]:
        """Total -> labels -> value. The last label of a histogram is a bucket's bound, or `sum`."""
        found: dict[str, dict[Labels, float]] = {}
        for row in self._database.select("select_totals", {}):
            found.setdefault(row["name"], {})[tuple(json.loads(row["labels"]))] = row["value"]
        return found

    def running(self) -> Sequence[Running]:
        """The jobs that may have processes, oldest first."""
        return [
            Running(
                job_uuid=row["job_uuid"],
                algorithm=row["algorithm"],
                places=tuple(row["places"].split(",")),
                step=row["step"],
                total_steps=row["total_steps"],
                values=ProgressValues.model_validate_json(row["progress"]),
            )
            for row in self._database.select("select_running", {})
        ]


def observed(name: str, seconds: float, *labels: str) -> Iterator[dict[str, Any]]:
    """The values of the statements `count` that add an observation to a histogram."""
    bound = next((bound for bound in BOUNDS[name] if seconds <= bound), None)
    bucket = "+Inf" if bound is None else f"{bound:g}"
    for last, value in ((bucket, 1.0), ("sum", seconds)):
        yield {"name": name, "labels": json.dumps([*labels, last], separators=(",", ":")), "value": value}
