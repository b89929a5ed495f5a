"""Reads what a training reported beside its points: answers to the prompts of `samples`, and warnings."""

from __future__ import annotations

from collections.abc import Sequence

from .reader import JobReader
from .records import SamplesRecord
from .row_mapping import samples_record


def read_samples(
    jobs: JobReader, job_uuid: str, limit: int = -1, offset: int = 0
) -> tuple[Sequence[SamplesRecord], int]:
    """Sets of answers in the order in which they were taken, and their number without `limit` and `offset`."""
    rows = jobs.database.select("select_samples", {"job_uuid": job_uuid, "limit": limit, "offset": offset})
    (count,) = jobs.database.select("count_samples", {"job_uuid": job_uuid})
    return [samples_record(row) for row in rows], count["sets"]


def read_warnings(jobs: JobReader, job_uuid: str) -> Sequence[tuple[int, str]]:
    """Warnings that were reported while a job trained, in that order, each with the last step before it."""
    rows = jobs.database.select("select_warnings", {"job_uuid": job_uuid})
    return [(row["step"], row["message"]) for row in rows]
