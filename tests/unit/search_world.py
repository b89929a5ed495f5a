"""A search whose trials are played."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.submission import Submitter, keep_rows, submit
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.requests.bodies import SupervisedFineTuneRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.search import resolve_search
from llama_stack_provider_trl.requests.settings import Request, Settings
from llama_stack_provider_trl.specs.events import Evaluated, Paused, Prepared, Started
from llama_stack_provider_trl.specs.job import Algorithm, DataFormat, DatasetRef
from llama_stack_provider_trl.stack.responses import status_response
from tests.fakes import FakeClock, FakeLauncher

LR, RANK = "training_config.optimizer_config.lr", "algorithm_config.rank"


HALVING = {"method": "successive_halving", "eta": 2, "min_steps": 2}


ROWS = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(6)]


def sft(search: Any, **changes: Any) -> SupervisedFineTuneRequest:
    data = {"dataset_id": "rows", "batch_size": 2, "validation_dataset_id": "held-out"}
    body = {"job_uuid": "s", "model": "org/base", "training_config": {"n_epochs": 1, "data_config": data}}
    return SupervisedFineTuneRequest.model_validate({**body, "hyperparam_search_config": search, **changes})


def trials_of(search: Any, options: ProviderOptions | None = None, **changes: Any) -> list[dict[str, Any]]:
    found = resolve_search(sft(search, **changes), options or ProviderOptions())
    assert found is not None
    return [trial.values for trial in found.trials]


class World:
    """A data directory with a supervisor whose passes are made by hand."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = FakeClock()
        self.launcher = FakeLauncher()
        self.reads: list[str] = []
        self.store = Store(self.root / "jobs.sqlite3", self.clock)
        self.restart()

    def restart(self) -> None:
        """Another process continues: nothing but the store decides."""
        self.store.close()
        self.store = Store(self.root / "jobs.sqlite3", self.clock)
        self.supervisor = Supervisor(self.store, self.launcher, ["cpu"], self.root)

    async def rows(
        self, dataset_id: str, algorithm: Algorithm, data_format: DataFormat | None
    ) -> tuple[DatasetRef, list[str]]:
        self.reads.append(dataset_id)
        return keep_rows(self.root / "datasets", dataset_id, ROWS, algorithm, data_format)

    def submit(self, request: Request, owner: Submitter | None = None, **given: Any) -> bool:
        options = ProviderOptions.parse({"preflight": "off", **given})
        settings = Settings(data_dir=self.root, devices=("cpu",))
        digest = request.digest(options)
        return asyncio.run(submit(request, options, digest, settings, self.store, self.rows, owner))

    def tick(self) -> None:
        self.clock.advance(5)
        self.supervisor.tick()

    def run(self, number: int, *events: Any, name: str = "s") -> None:
        """Begin the next attempt at a trial and let it report; the last event ends it."""
        self.tick()
        task = f"{name}-trial-{number}-{self.store.get(f'{name}-trial-{number}').attempt}"
        self.launcher.emit(task, Started(pid=1, device="cpu", versions={}), *events)
        self.launcher.exit(task, 0)
        self.tick()

    def to_rung(self, number: int, loss: float) -> None:
        self.run(number, prepared(), Evaluated(step=2, epoch=1.0, metrics={"eval_loss": loss}), Paused(step=2))

    def state(self, number: int | None = None) -> JobState:
        return self.store.get("s" if number is None else f"s-trial-{number}").state

    def shown(self, name: str = "s") -> dict[str, Any]:
        job = self.store.get(name)
        found = status_response(job, self.store.checkpoints(name), searched=self.store.searches.of_job(name))
        return found.model_dump(mode="json")


def prepared(start: int = 0) -> Prepared:
    return Prepared(
        **{"total_steps": 8, "start_step": start, "num_rows": 6, "trainable_parameters": 1, "total_parameters": 2},
        effective={},
    )
