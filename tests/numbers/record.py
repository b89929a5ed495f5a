"""Runs the jobs on a training service, and records what each of them made."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.contract.service import JOBS, TrainingService, running_service
from tests.contract.stack import ENDED, Json, poll
from tests.numbers.content import LEFT_OUT, Reader, exact, is_varying, leaves
from tests.numbers.jobs import DATASETS, Job
from tests.tiny import CACHE

SECONDS_PER_JOB = 300.0
"""On a machine with other work."""


def record(jobs: Sequence[Job]) -> Json:
    """What the jobs make, one after the other, each by name; and the machine on which they were trained."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="trl-numbers-") as directory:
        root = Path(directory)
        reader = Reader({root: "ROOT", CACHE: "MODELS"})
        with running_service(root, retry_backoff=0.1) as service:
            for name, rows in DATASETS.items():
                service.register(name, rows)
            made: Json = {}
            for job in jobs:
                began = time.monotonic()
                found = _made(service, reader, job)
                made |= found
                print(f"{job.name:20} {time.monotonic() - began:5.1f} s  {found[job.name]['state']}", flush=True)
    return {"machine": machine(), "jobs": made, "contents": reader.contents}


def machine() -> dict[str, str]:
    """What the bits of a training depend on beside its code."""
    packages = ("torch", "transformers", "trl", "peft", "accelerate")
    return {"cpu": _cpu(), "python": platform.python_version(), **{name: version(name) for name in packages}}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _made(service: TrainingService, reader: Reader, job: Job) -> dict[str, dict[str, str]]:
    """What a job, and each trial of a search, made; of one that was refused, the refusal."""
    if job.killed_at:
        service.arm(job.killed_at, "kill")
    answer = service.post(job.path, {"job_uuid": job.name, **job.body}, options=job.options)
    if answer.status_code != 200:
        return {job.name: {"state": f"refused: {answer.text}"}}
    poll(lambda: service.status(job.name)["status"] in ENDED, f"job {job.name} ends", SECONDS_PER_JOB)
    assert not job.killed_at or service.taken(job.killed_at), f"no process of {job.name} came to {job.killed_at}"
    search = service.status(job.name)["resources_allocated"].get("search") or {}
    trials = [trial["job_uuid"] for trial in search.get("trials", ())]
    return {name: dict(_entries(service, reader, name)) for name in (job.name, *trials)}


def _entries(service: TrainingService, reader: Reader, job_uuid: str) -> Iterable[tuple[str, str]]:
    """What is recorded of a job: name -> text."""
    status = service.status(job_uuid)
    allocated = status["resources_allocated"]
    config = allocated["effective_config"]
    yield "state", allocated["state"]
    yield "attempts", str(allocated["attempt"])
    for name in ("error", "warnings", "result", "search"):
        yield from leaves(reader.cleaned(allocated.get(name)), name)
    yield "configuration", reader.of_json(config)
    yield from _points(service.get(f"{JOBS}/{job_uuid}/metrics").json()["data"])
    samples = service.get(f"{JOBS}/{job_uuid}/samples").json()
    yield "samples", reader.of_json(samples)
    directory = Path(config["checkpoint_dir"])
    for file in sorted(path for path in directory.rglob("*") if path.is_file() and path.name not in LEFT_OUT):
        yield f"file {file.relative_to(directory)}", reader.digest(file)


def _points(points: Iterable[Json]) -> Iterable[tuple[str, str]]:
    for point in points:
        metrics: dict[str, Any] = {"epoch": point["epoch"], **point["metrics"]}
        for name, value in metrics.items():
            if not is_varying(name):
                yield f"{point['kind']} step {point['step']} {name}", exact(value)
