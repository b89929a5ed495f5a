"""MLflow: one run per copy.

A database of MLflow stores a metric point once, by its run, name, step, time and value: a repeated write changes
nothing. Points cannot be removed from a run, so a copy is begun again in another run, and runs of earlier copies are
deleted. A run is found again by a tag that it has from its creation on.

A database of SQLite gets its name when it is complete: MLflow creates its tables one by one, and neither continues nor
repeats that where it was killed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from itertools import batched, chain
from pathlib import Path
from typing import Any

from ..jobs.decisions.states import JobState
from .points import Step
from .tracker import Target

_TIMEOUTS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
"""Of one request, unless the environment has others: MLflow itself tries for minutes."""
_KEY, _GENERATION = "llama_stack_trl.key", "llama_stack_trl.generation"
_SQLITE = "sqlite:///"
_MOST_VALUES = 1000
"""Metrics of one request, by MLflow's limits; of parameters 100."""
_STATES = {JobState.completed: "FINISHED", JobState.failed: "FAILED", JobState.cancelled: "KILLED"}


class Mlflow:
    """Writes to the tracking server or database `uri`. Imports mlflow. Raises ImportError: mlflow is not installed;
    FileNotFoundError: the directory of the database does not exist."""

    at_end = False

    def __init__(self, uri: str) -> None:
        for name, value in _TIMEOUTS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        if uri.startswith(_SQLITE):
            database = Path(uri.removeprefix(_SQLITE).partition("?")[0])
            # MLflow itself would try again for minutes.
            if not database.parent.is_dir():
                raise FileNotFoundError(f"{database.parent} does not exist: create it, it is to hold MLflow's database")
            _create(database)
        self._client = MlflowClient(tracking_uri=uri)

    def write(self, target: Target, position: dict[str, Any], steps: Iterable[Step]) -> dict[str, Any]:
        """See `Tracker.write`. Raises MlflowException."""
        run_id = position.get("run_id") or self._begin(target)
        for metrics in batched(_metrics(steps), _MOST_VALUES):
            self._client.log_batch(run_id, metrics=metrics, synchronous=True)
        return {"run_id": run_id}

    def finish(self, target: Target, position: dict[str, Any], state: JobState) -> None:
        run_id = position.get("run_id") or self._begin(target)
        self._client.set_terminated(run_id, _STATES[state])

    def _begin(self, target: Target) -> str:
        """The run of a copy, which may have been created before. Runs of earlier copies are deleted."""
        from mlflow.entities import Param

        experiment = self._experiment(target.project)
        found = self._client.search_runs([experiment], filter_string=f"tags.`{_KEY}` = '{target.key}'")
        ours = [run.info.run_id for run in found if run.data.tags.get(_GENERATION) == str(target.generation)]
        for run in found:
            if run.info.run_id not in ours[:1]:
                self._client.delete_run(run.info.run_id)
        if ours:
            return str(ours[0])
        started = int(target.scheduled_at.timestamp() * 1000)
        tags = {_KEY: target.key, _GENERATION: str(target.generation), "job_uuid": target.job_uuid}
        run = self._client.create_run(experiment, start_time=started, tags=tags, run_name=target.run)
        params = [Param(name, str(value)) for name, value in target.config.items()]
        self._client.log_batch(run.info.run_id, params=params[:100], synchronous=True)
        return str(run.info.run_id)

    def _experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment is not None else self._client.create_experiment(name))


def _create(database: Path) -> None:
    """Create the tables in a file beside it, which gets its name when they are complete. A database that exists, or
    that another process creates at this moment, is left as it is."""
    from mlflow import MlflowClient

    directory = os.open(database.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        if not database.exists():
            unfinished = database.with_name(f".{database.name}.unfinished")
            for left in database.parent.glob(f"{unfinished.name}*"):
                left.unlink()
            MlflowClient(tracking_uri=f"{_SQLITE}{unfinished}").search_experiments(max_results=1)
            unfinished.rename(database)
    finally:
        os.close(directory)


def _metrics(steps: Iterable[Step]) -> Iterator[Any]:
    from mlflow.entities import Metric

    for part, step in chain.from_iterable(((part, step.step) for part in step.parts) for step in steps):
        for name, value in part.values.items():
            yield Metric(name, value, int(part.time * 1000), step)
