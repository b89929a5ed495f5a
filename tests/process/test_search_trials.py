"""Searches with real trainings: pruned trials, winners that are the undisturbed jobs, kills at every step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.jobs.decisions.states import TERMINAL
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.submission import keep_rows, submit
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.launch.ports import PortRange
from llama_stack_provider_trl.requests.bodies import SupervisedFineTuneRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.job import Algorithm, DataFormat, DatasetRef
from llama_stack_provider_trl.stack.responses import status_response
from tests.census import assert_clean
from tests.process.supervised import World
from tests.tiny import tiny_model
from tests.training import SFT_ROWS
from tests.zygote import ForkLauncher

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]
LR = "training_config.optimizer_config.lr"
RATES = [1e-5, 3e-3, 1e-4, 1e-3]
STEPS = 8
POINTS = (
    *("search-rung-decided", "search-rung-recorded", "search-trial-cancelled", "search-trial-resumed"),
    "search-ending",
)
Json = dict[str, Any]


def request(job_uuid: str, rate: float | None = None, search: Json | None = None) -> SupervisedFineTuneRequest:
    """8 steps with an adapter, which is begun with random numbers, and dropout, which needs them at every step."""
    return SupervisedFineTuneRequest.model_validate(
        {
            "job_uuid": job_uuid,
            "model": str(tiny_model()),
            "algorithm_config": {"type": "LoRA", "rank": 4, "alpha": 8, "lora_attn_modules": ["q_proj", "v_proj"]},
            "training_config": {
                "n_epochs": 2,
                "data_config": {"dataset_id": "rows", "batch_size": 2, "validation_dataset_id": "held-out"},
                "optimizer_config": {} if rate is None else {"lr": rate},
            },
            "hyperparam_search_config": search or {},
        }
    )


def halving(rates: list[float], eta: int = 2, min_steps: int = 1) -> Json:
    pruning = {"method": "successive_halving", "eta": eta, "min_steps": min_steps}
    return {"method": "grid", "parameters": {LR: rates}, "pruning": pruning}


class Searching(World):
    """Jobs by request, and a supervisor that is replaced after each error, as one of a process that was killed is."""

    def submit(self, request: SupervisedFineTuneRequest, **options: Any) -> bool:
        settings = Settings(data_dir=self.root, devices=("cpu",))
        parsed = ProviderOptions.parse({"lora_dropout": 0.1, "preflight": "off", **options})
        return asyncio.run(submit(request, parsed, request.digest(parsed), settings, self.store, self.rows))

    async def rows(
        self, dataset_id: str, algorithm: Algorithm, data_format: DataFormat | None
    ) -> tuple[DatasetRef, list[str]]:
        rows = SFT_ROWS[:8] if dataset_id == "rows" else SFT_ROWS[8:]
        return keep_rows(self.root / "datasets", dataset_id, rows, algorithm, data_format)

    def restart(self) -> None:
        self.store.close()
        self.store = Store(self.root / "jobs.sqlite3", self.clock)
        self.supervisor = Supervisor(self.store, self.launcher, ["cpu"], self.root, hang_timeout=120, ports=PortRange())

    def tick(self) -> None:
        try:
            super().tick()
        except RuntimeError as error:
            if "fault at" not in str(error):
                raise
            self.restart()

    def ended(self, name: str) -> bool:
        return self.state(name) in TERMINAL

    def table(self, name: str) -> Json:
        job = self.store.get(name)
        found = status_response(job, self.store.checkpoints(name), searched=self.store.searches.of_job(name))
        return {**found.resources_allocated["search"], "state": job.state.value}


@pytest.fixture(scope="module")
def zygote() -> Iterator[ForkLauncher]:
    launcher = ForkLauncher()
    yield launcher
    launcher.close()


@pytest.fixture
def world(tmp_path: Path, zygote: ForkLauncher) -> Iterator[Searching]:
    found = Searching(tmp_path, zygote)
    yield found
    zygote.reset()
    found.store.close()


def test_a_search_that_is_killed_at_every_step_ends_with_the_weights_of_the_job_that_was_never_compared(
    world: Searching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(faults.VARIABLE, str(tmp_path / "faults"))
    (tmp_path / "faults").mkdir()
    for point in POINTS:
        (tmp_path / "faults" / point).write_text("error")
    assert world.submit(request("search", search=halving(RATES)))
    assert not world.submit(request("search", search=halving(RATES)))
    world.finish("search")
    assert sorted(path.name for path in (tmp_path / "faults").iterdir()) == sorted(f"{one}.taken" for one in POINTS)
    table = world.table("search")
    assert [one["state"] for one in table["trials"]] == ["cancelled", "completed", "cancelled", "cancelled"]
    assert [one["step"] for one in table["trials"]] == [1, STEPS, 1, 2]
    assert table["trials"][3]["pruned"].startswith("pruned at step 2: eval_loss ")
    assert (table["steps"], table["best"]["values"]) == (STEPS + 1 + 1 + 2, {LR: 3e-3})

    # The winner paused at two rungs, and at one more when it had won; two of these evaluations are no planned ones.
    world.submit(request("alone", rate=3e-3))
    world.finish("alone")
    alone, winner = world.outcome("alone"), world.outcome("search-trial-2")
    assert [tried.start_step for tried in world.store.attempts("search-trial-2")] == [0, 1, 2, 4]
    assert winner.weights == alone.weights
    assert [one for one in winner.points if one in alone.points] == alone.points
    listed = [one.path for one in world.store.checkpoints("search")]
    assert listed == [one.path for one in world.store.checkpoints("search-trial-2")]
    assert all(path.exists() for path in listed)
    assert_clean(world.root)
