"""Metric points of jobs, from a service or out of a data directory."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from llama_stack_provider_trl.errors import InvalidRequest, StoreError
from llama_stack_provider_trl.jobs.database import DATABASE, SCHEMA_VERSION, Database
from llama_stack_provider_trl.jobs.reader import JobReader

from ..client import JOBS, ServiceClient, job_path


class PlotPoint(NamedTuple):
    """Metrics after one optimizer step."""

    kind: str
    """train or validation"""
    step: int
    epoch: float
    time: float
    """Seconds since the epoch."""
    metrics: dict[str, float]


async def fetch_points(client: ServiceClient, job_uuid: str) -> list[PlotPoint]:
    """Every metric point of a job of a service, by step.

    Raises:
        ServiceRefusal: 404, there is no such job.
        ServiceUnreachable.
    """
    answer = await client.get(job_path(job_uuid, "/metrics"))
    return [
        PlotPoint(p["kind"], p["step"], p["epoch"], datetime.fromisoformat(p["time"]).timestamp(), p["metrics"])
        for p in answer["data"]
    ]


async def newest_job(client: ServiceClient) -> str:
    """The job of a service that was queued last. Raises InvalidRequest: it has none."""
    return _newest([job["job_uuid"] for job in (await client.get(JOBS))["data"]], client.url)


def stored_points(data_dir: Path, job_uuids: Sequence[str]) -> dict[str, list[PlotPoint]]:
    """Every metric point of jobs in a data directory, by step. Its database is read while others write it.

    Args:
        job_uuids: none: the job that was queued last.

    Raises:
        InvalidRequest: this is no data directory, or it has no job.
        JobNotFound.
        StoreError: its database cannot be read, or is of another release.
    """
    database = data_dir / DATABASE
    if not database.is_file():
        hint = f"it has no {DATABASE}: name the data directory of a service, or that of the inline provider."
        raise InvalidRequest("--data-dir", str(data_dir), hint)
    _require_version(database)
    with closing(Database(database)) as opened:
        reader = JobReader(opened)
        names = job_uuids or [_newest(reader.names(), str(data_dir))]
        return {
            name: [PlotPoint(p.kind, p.step, p.epoch, p.time.timestamp(), p.metrics) for p in reader.points(name)]
            for name in names
        }


def _require_version(database: Path) -> None:
    """Refuse the database of an earlier release, which opening would upgrade under the processes that use it."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(database.resolve()))}?mode=ro", uri=True)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error as error:
        raise StoreError(f"job database {database}: {error}") from error
    if version < SCHEMA_VERSION:
        raise StoreError(
            f"job database {database} has schema version {version}, this program reads {SCHEMA_VERSION}: an earlier "
            "release wrote it; the next start of its service or Llama Stack on this release upgrades it"
        )


def _newest(names: Sequence[str], where: str) -> str:
    if not names:
        raise InvalidRequest("JOB", None, f"{where} has no jobs yet.")
    return names[-1]
