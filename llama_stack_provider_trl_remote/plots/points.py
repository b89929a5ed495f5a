"""Metric points of jobs, from a service or out of a data directory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llama_stack_provider_trl.errors import InvalidRequest

from ..client import JOBS, ServiceClient, job_path

if TYPE_CHECKING:
    from llama_stack_provider_trl.jobs.store.reader import JobReader

_MOST_TRIED = 100


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


async def newest_points(client: ServiceClient, metrics: Sequence[str]) -> dict[str, list[PlotPoint]]:
    """As `fetch_points`, of the job of a service that was queued last and has one of the metrics. Raises
    InvalidRequest: it has no jobs."""
    names = _newest([job["job_uuid"] for job in (await client.get_all(JOBS))["data"]], client.url)
    for name in names:
        if _has(points := await fetch_points(client, name), metrics):
            return {name: points}
    return {names[0]: await fetch_points(client, names[0])}


def stored_points(data_dir: Path, job_uuids: Sequence[str], metrics: Sequence[str]) -> dict[str, list[PlotPoint]]:
    """Every metric point of jobs in a data directory, by step. Its database is read while others write it. Raises
    InvalidRequest: this is no data directory, or it has no job; JobNotFound; StoreError: its database cannot be read,
    or is of another release.

    Args:
        job_uuids: none: the job that was queued last and has one of the metrics.
    """
    from llama_stack_provider_trl.jobs.store.database import Database, require_database
    from llama_stack_provider_trl.jobs.store.reader import JobReader

    database = require_database(data_dir)
    with closing(Database(database)) as opened:
        reader = JobReader(opened)
        if not job_uuids:
            names = _newest(reader.names(), str(data_dir))
            job_uuids = [next((name for name in names if _has(_stored(reader, name), metrics)), names[0])]
        return {name: _stored(reader, name) for name in job_uuids}


def _stored(reader: JobReader, job_uuid: str) -> list[PlotPoint]:
    return [PlotPoint(p.kind, p.step, p.epoch, p.time.timestamp(), p.metrics) for p in reader.points(job_uuid)]


def _newest(names: Sequence[str], where: str) -> Sequence[str]:
    """The newest first, as many as are looked at for one with a metric."""
    if not names:
        raise InvalidRequest("JOB", None, f"{where} has no jobs yet.")
    return names[: -_MOST_TRIED - 1 : -1]


def _has(points: Sequence[PlotPoint], metrics: Sequence[str]) -> bool:
    return any(not {metric, f"eval_{metric}"}.isdisjoint(point.metrics) for point in points for metric in metrics)
