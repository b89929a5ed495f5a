"""Notices that a database knows none of the jobs whose directories are there."""

from __future__ import annotations

from pathlib import Path

from ...errors import StoreError
from ...system.data_dir import DataDir
from ..store.store import Store

_NAMED = 3


def refuse_lost_jobs(store: Store, data_dir: Path) -> None:
    """Return if the database of a data directory knows a job, or there is nothing to know. Closes it otherwise.

    A database that was removed, or is not the one of this directory, would begin again, without a word. Raises
    StoreError: it has no job, and the directory has directories of jobs.
    """
    if not sum(store.count().values()) and (lost := lost_jobs(data_dir)) is not None:
        store.close()
        raise StoreError(lost)


def lost_jobs(data_dir: Path) -> str | None:
    """What is there of jobs that a database without jobs does not know, as a sentence; None: nothing."""
    place = DataDir(data_dir)
    if not (names := place.job_names()):
        return None
    named = ", ".join(names[:_NAMED]) + (" ..." if len(names) > _NAMED else "")
    are = "is the directory of a job" if len(names) == 1 else f"are the directories of {len(names)} jobs"
    return (
        f"{place.database} has no jobs, and in {place.jobs} {are} ({named}): put the database of these jobs back, or, "
        f"to begin without them, move the directory away (mv {place.jobs} {place.jobs}.lost) once their trainings have "
        f"ended; each attempt's spec.json there has the job, and their results stay in {place.checkpoints}"
    )
