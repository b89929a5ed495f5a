"""trackio: its local database of a project, one run per copy.

A row has an id, of the copy and the step: the database leaves out one that it has. A copy is begun again as another
run, and the runs of earlier copies are deleted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import batched
from pathlib import Path
from typing import Any

from ..jobs.decisions.states import JobState
from .points import Step
from .tracker import Target

_MOST_ROWS = 1000
"""Rows of one transaction of trackio."""


class Trackio:
    """Writes to trackio's databases in `directory`. Imports trackio. Raises ImportError: trackio is not installed."""

    at_end = False

    def __init__(self, directory: Path) -> None:
        os.environ["TRACKIO_DIR"] = str(directory)  # read by the import
        # trackio's own `log` returns before anything is stored.
        from trackio.sqlite_storage import SQLiteStorage

        self._storage = SQLiteStorage

    def write(self, target: Target, position: dict[str, Any], steps: Iterable[Step]) -> dict[str, Any]:
        """See `Tracker.write`. Raises sqlite3.Error, OSError."""
        if not position:
            self._delete_earlier(target)
        for rows in batched(steps, _MOST_ROWS):
            self._storage.bulk_log(
                project=target.project,
                run=target.run,
                run_id=target.name,
                metrics_list=[row.values for row in rows],
                steps=[row.step for row in rows],
                timestamps=[datetime.fromtimestamp(row.time, UTC).isoformat() for row in rows],
                log_ids=[f"{target.name}-{row.step}" for row in rows],
                config=None if position else {**target.config, "_Created": target.scheduled_at.isoformat()},
            )
        return {"run_id": target.name}

    def finish(self, target: Target, position: dict[str, Any], state: JobState) -> None:
        """See `Tracker.finish`: a run has no end."""

    def _delete_earlier(self, target: Target) -> None:
        for run in self._copies(target) - {target.name}:  # which exist: trackio would take another of the same name
            self._storage.delete_run(target.project, target.run, run_id=run)
        if self._copies(target) - {target.name}:
            raise OSError(f"trackio has not deleted the earlier copy of run {target.run!r}: it is tried again")

    def _copies(self, target: Target) -> set[str]:
        runs = [str(run["id"]) for run in self._storage.get_run_records(target.project)]
        return {run for run in runs if run.startswith(f"{target.key}-")}
