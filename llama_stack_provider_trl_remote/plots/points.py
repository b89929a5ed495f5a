"""Metric points of jobs, from a service or out of a data directory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from llama_stack_provider_trl.errors import InvalidRequest

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
    """Every metric point of a job of a service, by step. Raises ServiceRefusal: 404, there is no such job;
    ServiceUnreachable."""
    answer = await client.get_all(job_path(job_uuid, "/metrics"))
    return [
        PlotPoint(p["kind"], p["step"], p["epoch"], datetime.fromisoformat(p["time"]).timestamp(), p["metrics"])
        for p in answer["data"]
    ]


async def newest_job(client: ServiceClient) -> str:
    """The job of a service that was queued last. Raises InvalidRequest: it has none."""
    return _newest([job["job_uuid"] for job in (await client.get_all(JOBS))["data"]], client.url)


def stored_points(data_dir: Path, job_uuids: Sequence[str]) -> dict[str, list[PlotPoint]]:
    """Every metric point of jobs in a data directory, by step. Its database is read while others write it. Raises
    InvalidRequest: this is no data directory, or it has no job; JobNotFound; StoreError: its database cannot be read,
    or is of another release.

    Args:
        job_uuids: none: the job that was queued last.
    """
    from llama_stack_provider_trl.jobs.store.database import Database, require_database
    from llama_stack_provider_trl.jobs.store.reader import JobReader

    database = require_database(data_dir)
    with closing(Database(database)) as opened:
        reader = JobReader(opened)
        names = job_uuids or [_newest(reader.names(), str(data_dir))]
        return {
            name: [PlotPoint(p.kind, p.step, p.epoch, p.time.timestamp(), p.metrics) for p in reader.points(name)]
            for name in names
        }


def _newest(names: Sequence[str], where: str) -> str:
    if not names:
        raise InvalidRequest("JOB", None, f"{where} has no jobs yet.")
    return names[-1]
