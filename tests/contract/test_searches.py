"""Searches on a real service: their table, cancel and delete; by hand what pruning of 12 trials spends and finds."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from llama_stack_provider_trl.config import TrlConfig
from llama_stack_provider_trl.jobs import submission
from llama_stack_provider_trl.jobs.decisions.states import TERMINAL
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.post_training import TrlPostTraining
from llama_stack_provider_trl.requests.bodies import SupervisedFineTuneRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.job import DataFormat, DatasetRef, RowUse
from llama_stack_provider_trl_remote.service.context import Service
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from tests.contract.crashing import CrashingService
from tests.contract.payloads import sft
from tests.contract.service import JOBS, TrainingService, refusal, running, running_service
from tests.contract.stack import SFT, Json, poll
from tests.fakes import job_spec
from tests.required import IN_FULL

pytestmark = pytest.mark.contract
STEPS, TRIALS, ETA, FIRST = 18, 12, 3, 2
POINTS = (
    *("search-rung-decided", "search-rung-recorded", "search-trial-cancelled", "search-trial-resumed"),
    "search-ending",
)
ROWS = [{"prompt": f"What is {n} plus {n}?", "completion": f"{n} plus {n} is {2 * n}."} for n in range(16)]


def submit(service: TrainingService, job_uuid: str, pruning: Json | None) -> None:
    body = sft(job_uuid, "rows")
    body["training_config"]["n_epochs"] = 3
    body["training_config"]["data_config"]["validation_dataset_id"] = "held-out"
    body["algorithm_config"] = {"type": "LoRA", "rank": 4, "alpha": 16, "lora_attn_modules": ["q_proj", "v_proj"]}
    body["algorithm_config"]["apply_lora_to_mlp"] = True
    rates = [1e-5, 2e-4, 5e-6, 1e-6, 5e-5, 2e-3, 5e-4, 1e-3, 2e-5, 1e-4, 5e-7, 2e-6]
    parameters = {"training_config.optimizer_config.lr": rates}
    body["hyperparam_search_config"] = {"method": "grid", "parameters": parameters, "pruning": pruning}
    options = {"eval_steps": FIRST, "preflight": "off", "lora_dropout": 0.1}
    service.submit(SFT, body, options=options)


def table(service: CrashingService, job_uuid: str) -> list[Json]:
    """The trials of a search that has ended, without their names."""
    found = service.status(job_uuid)["resources_allocated"]["search"]
    return [{**one, "job_uuid": ""} for one in found["trials"]]


def finish(service: CrashingService, job_uuid: str) -> None:
    poll(lambda: service.recorded(job_uuid) in TERMINAL, f"{job_uuid} ends", timeout=600)
    assert service.recorded(job_uuid) == "completed", service.store.get(job_uuid).message


def digest(service: CrashingService, job_uuid: str) -> str:
    file = service.store.get(job_uuid).spec.checkpoint_dir / "final" / "adapter_model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.timeout(180)
def test_a_search_is_shown_cancelled_and_deleted_with_its_trials(tmp_path: Path) -> None:
    with running_service(tmp_path) as service:
        service.register("rows", ROWS[:12])
        service.register("held-out", ROWS[12:])
        service.arm("step-1", "hold")
        submit(service, "tune", None)
        service.wait_taken("step-1", 60)
        found = service.status("tune")
        assert (found["status"], found["resources_allocated"]["device"]) == ("in_progress", None)
        table = found["resources_allocated"]["search"]
        assert [one["job_uuid"] for one in table["trials"]] == [f"tune-trial-{n}" for n in range(1, TRIALS + 1)]
        page = service.get("/jobs/tune", prefix="").text
        assert '<a href="/jobs/tune-trial-12">tune-trial-12</a>' in page
        assert ">Pause<" not in page
        assert 'Trial 12 of the search <a href="/jobs/tune">' in service.get("/jobs/tune-trial-12", prefix="").text
        assert "tune-trial-3" in service.get("/?flat=yes", prefix="").text
        assert "is a search" in refusal(service.post(f"{JOBS}/tune/pause"), 409)
        assert service.delete(f"{JOBS}/tune").status_code == 409
        service.cancel("tune")
        service.wait_state("tune", "cancelled")  # the trial does not go on before: it would end in a moment
        service.go("step-1")
        assert {one["state"] for one in service.status("tune")["resources_allocated"]["search"]["trials"]} == {
            "cancelled"
        }
        assert "is a trial of the search 'tune'" in refusal(service.delete(f"{JOBS}/tune-trial-1"), 409)
        assert service.delete(f"{JOBS}/tune", checkpoints=True).status_code == 204
        assert service.get("/post-training/jobs").json()["data"] == []
        assert list((service.data_dir / "jobs").iterdir()) == []


def inline(data_dir: Path) -> tuple[Store, Supervisor, Settings]:
    made = TrlPostTraining(TrlConfig(data_dir=data_dir, device="cpu"), {})
    return made.store, made.supervisor, made.settings


def remote(data_dir: Path) -> tuple[Store, Supervisor, Settings]:
    made = Service(ServiceSettings(data_dir=data_dir, device="cpu"))
    return made.store, made.supervisor, made.for_jobs


@pytest.mark.parametrize("provider", [inline, remote])
def test_both_providers_add_later_trials(
    provider: Callable[[Path], tuple[Store, Supervisor, Settings]], tmp_path: Path
) -> None:
    store, supervisor, settings = provider(tmp_path)

    async def rows(dataset_id: str, use: RowUse, data_format: DataFormat | None) -> tuple[DatasetRef, list[str]]:
        return submission.keep_rows(tmp_path / "datasets", dataset_id, ROWS, use, data_format)

    with closing(store):
        store.add_job(job_spec(job_uuid="before", checkpoint_dir=tmp_path / "checkpoints" / "out"), "digest")
        store.request_pause("before")  # so that none of the trials starts
        body = sft("tune", "rows")
        body["training_config"]["data_config"]["validation_dataset_id"] = "held-out"
        ranges = {"training_config.optimizer_config.lr": {"min": 1e-6, "max": 1e-2, "log": True}}
        body["hyperparam_search_config"] = {"method": "bayesian", "parameters": ranges, "trials": 6}
        request, options = SupervisedFineTuneRequest.model_validate(body), ProviderOptions(after=["before"])
        asyncio.run(submission.submit(request, options, "digest", settings, store, rows))
        assert store.names() == ["before", "tune", "tune-trial-1"]
        store.request_cancel("tune-trial-1")

        def added() -> bool:
            supervisor.tick()
            return len(store.names()) > 3

        poll(added, "a thread has resolved the next trial", timeout=30, pause=0.05)
        assert store.names() == ["before", "tune", "tune-trial-1", "tune-trial-2"]
        assert store.get("tune-trial-2").spec.data.dataset == store.get("tune").spec.data.dataset


@pytest.mark.timeout(1500)
@IN_FULL
def test_halving_finds_the_best_of_a_full_grid_over_kills(tmp_path: Path) -> None:
    service = CrashingService(tmp_path)
    with closing(service.store), running(service):
        service.register("rows", ROWS[:12])
        service.register("held-out", ROWS[12:])
        began = time.monotonic()
        submit(service, "full", None)
        finish(service, "full")
        losses = [
            {step: found["eval_loss"] for step, found in service.store.evaluations(f"full-trial-{number}")}
            for number in range(1, TRIALS + 1)
        ]
        last = [one[STEPS] for one in losses]
        best = min(range(TRIALS), key=lambda number: last[number])
        # The early order predicts the end: the best one is among those that pass each rung.
        for step, kept in [(FIRST, TRIALS // ETA), (FIRST * ETA, 1)]:
            assert best in sorted(range(TRIALS), key=lambda number: losses[number][step])[:kept], step

        pruning = {"method": "successive_halving", "eta": ETA, "min_steps": FIRST}
        submit(service, "halved", pruning)
        finish(service, "halved")
        found = service.status("halved")["resources_allocated"]["search"]
        assert found["best"]["job_uuid"] == f"halved-trial-{best + 1}"
        assert found["steps"] <= 0.45 * TRIALS * STEPS
        assert digest(service, f"halved-trial-{best + 1}") == digest(service, f"full-trial-{best + 1}")

        for point in POINTS:
            service.arm(point, "kill")
        submit(service, "killed", pruning)
        for point in POINTS:
            poll(lambda: not service.runs(), f"the service is killed at {point}", timeout=300)
            service.launch()
        service.wait_until_it_answers()
        finish(service, "killed")
        assert table(service, "killed") == table(service, "halved")
        assert digest(service, f"killed-trial-{best + 1}") == digest(service, f"full-trial-{best + 1}")
        print(f"{found['steps']} of {TRIALS * STEPS} steps, best trial {best + 1}, {time.monotonic() - began:.0f} s")
