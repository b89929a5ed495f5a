"""MLflow: one run per copy.

A database of MLflow stores a metric point once, by its run, name, step, time and value: a repeated write changes
nothing. Points cannot be removed from a run, so a copy is begun again in another run, and runs of earlier copies are
deleted. A run is found again by a tag that it has from its creation on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import batched, chain
from pathlib import Path
from typing import Any

from ..jobs.states import JobState
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
    """Writes to the tracking server or database `uri`. Imports mlflow.

    Raises:
        ImportError: mlflow is not installed.
        FileNotFoundError: the directory of the database does not exist.
    """

    at_end = False

    def __init__(self, uri: str) -> None:
        for name, value in _TIMEOUTS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        database = Path(uri.removeprefix(_SQLITE))
        # MLflow itself would try again for minutes.
        if uri.startswith(_SQLITE) and not database.parent.is_dir():
            raise FileNotFoundError(f"{database.parent} does not exist: create it, it is to hold MLflow's database")
        self._client = MlflowClient(tracking_uri=uri)

    def write(self, target: Target, position: dict[str, Any], steps: Iterable[Step]) -> dict[str, Any]:
        """See `Tracker.write`. Raises MlflowException."""
        run_id = position.get("run_id") or self._begin(target)
        for metrics in batched(_metrics(steps), _MOST_VALUES):
            self._client.log_batch(run_id, metrics=metrics, synchronous=True)
        return {"run_id": run_id}

    def finish(self, target: Target, position: dict[str, Any], state: JobState) -> None:
        """See `Tracker.finish`."""
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


def _metrics(steps: Iterable[Step]) -> Iterator[Any]:
    from mlflow.entities import Metric

    for part, step in chain.from_iterable(((part, step.step) for part in step.parts) for step in steps):
        for name, value in part.values.items():
            yield Metric(name, value, int(part.time * 1000), step)
