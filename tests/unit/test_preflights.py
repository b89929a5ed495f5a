"""Preflights of the service: nothing of an earlier service's stays."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import JobFailure, RowsRemoved
from llama_stack_provider_trl.launch.base import Observation, TaskSpec, TaskState
from llama_stack_provider_trl.specs.job import DatasetRef
from llama_stack_provider_trl.specs.memory import PARTS, MemoryEstimate
from llama_stack_provider_trl.system.process import machine_memory
from llama_stack_provider_trl_remote.cli.terminal import preflight_lines
from llama_stack_provider_trl_remote.service.http.bodies import MemoryVerdict
from llama_stack_provider_trl_remote.service.settings import ServiceSettings
from llama_stack_provider_trl_remote.service.views.preflights import Preflights
from tests import nvml
from tests.fakes import FakeLauncher, job_spec


def test_what_an_earlier_service_left_running_is_ended_though_it_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = TaskSpec("preflight-left", tmp_path / "preflights" / "left", ())
    left.run_dir.mkdir(parents=True)
    launcher = FakeLauncher()
    launcher.start(left)
    # What it writes while its directory is removed keeps the directory there.
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors: None)
    Preflights(ServiceSettings(data_dir=tmp_path), launcher, "cpu", 1).prepare()
    assert launcher.poll(left).state is TaskState.exited


def test_a_preflight_whose_request_ends_while_it_is_started_is_ended_as_soon_as_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_starting, may_start, in_thread = threading.Event(), threading.Event(), asyncio.to_thread
    called: list[str] = []

    class Slow(FakeLauncher):
        def start(self, task: TaskSpec) -> None:
            is_starting.set()
            may_start.wait()
            super().start(task)

    async def noted(function: Any, *arguments: Any) -> Any:
        called.append(function.__name__)
        return await in_thread(function, *arguments)

    launcher = Slow()
    preflights = Preflights(ServiceSettings(data_dir=tmp_path), launcher, "cpu", 1)
    preflights.prepare()

    async def check() -> None:
        request = asyncio.create_task(preflights.run(job_spec(checkpoint_dir=tmp_path)))
        await in_thread(is_starting.wait)
        monkeypatch.setattr("asyncio.to_thread", noted)
        request.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        before = list(called)
        may_start.set()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert (before, called) == ([], ["_clean_up"])  # nothing is removed that is about to be written

    asyncio.run(check())
    (task,) = launcher.tasks.values()
    assert (launcher.started, task.seen.state) == ([task.spec.task_id], TaskState.exited)
    assert [*(tmp_path / "preflights").iterdir()] == []


@pytest.mark.parametrize(("is_there", "begins"), [(True, True), (False, True), (False, False)])
def test_a_preflight_whose_rows_were_deleted_meanwhile_is_to_be_sent_again(
    tmp_path: Path, is_there: bool, begins: bool
) -> None:
    class Failing(FakeLauncher):
        def start(self, task: TaskSpec) -> None:
            if not begins:  # a part of the rows is copied before
                raise FileNotFoundError(rows)
            super().start(task)

        def poll(self, task: TaskSpec) -> Observation:
            return Observation(TaskState.exited, exit_code=1)

    rows = tmp_path / "rows.jsonl"
    if is_there:
        rows.touch()
    spec = job_spec(checkpoint_dir=tmp_path, dataset=DatasetRef(dataset_id="a", path=rows, sha256="0" * 64, num_rows=1))
    preflights = Preflights(ServiceSettings(data_dir=tmp_path), Failing(), "cpu", 1)
    preflights.prepare()
    with pytest.raises(JobFailure if is_there else RowsRemoved):
        asyncio.run(preflights.run(spec))


@pytest.mark.parametrize(
    ("device", "configured", "expected"), [("cuda:0", None, 80 << 30), ("cuda:0", 24.0, 24 << 30), ("cpu", None, None)]
)
def test_a_preflight_which_sees_no_gpu_gets_the_memory_of_the_one_that_its_job_would_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, configured: float | None, expected: int | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml.install(monkeypatch, ("GPU-aa", 80 << 30, "NVIDIA H100"))
    settings = ServiceSettings(data_dir=tmp_path, device_memory_gb=configured)
    requested = Preflights(settings, FakeLauncher(), device, 1)._requested(job_spec(checkpoint_dir=tmp_path))
    assert (requested.memory_bytes, requested.device) == (expected, device.partition(":")[0])
    assert requested.machine_memory_bytes == machine_memory()


def test_the_cpu_memory_of_machines_elsewhere_is_not_taken_to_be_that_of_the_service(tmp_path: Path) -> None:
    preflights = Preflights(ServiceSettings(data_dir=tmp_path), FakeLauncher(), "cuda", 1)
    assert preflights._requested(job_spec(checkpoint_dir=tmp_path)).machine_memory_bytes is None


def test_the_answer_of_a_preflight_has_every_part_of_the_estimate() -> None:
    estimate = MemoryEstimate(*range(1, 11))
    assert sum(getattr(estimate, part) for part in PARTS) == estimate.total == sum(range(1, 11))
    beside = {"fits", "device", "devices", "estimate_bytes", "limit_bytes", "largest_batch", "nearest", "message"}
    beside |= {"ranks_per_machine", "machine_limit_bytes", "gradient_sync", "kept_attention"}
    assert [name for name in MemoryVerdict.model_fields if name not in beside] == list(estimate.shown())


def test_a_preflight_shows_every_part_that_has_memory_and_the_rest_beside_them() -> None:
    estimate = MemoryEstimate(**{name: (number + 1) << 30 for number, name in enumerate(PARTS)}, host=1 << 40)
    memory = {"device": "cuda", "devices": 1, "estimate_bytes": estimate.total, "limit_bytes": 1 << 36}
    counts = dict.fromkeys(
        ("trained", "num_rows", "examples", "truncated", "dropped", "median_tokens", "max_tokens"), 1
    )
    steps = dict.fromkeys(("total_steps", "epochs", "steps_per_epoch", "global_batch"), 1)
    found = {
        **{"fits": True, "message": "The job fits.", "warnings": [], "steps": steps},
        **{"data": {**counts, "histogram": [], "mixture": []}, "disk": {"needed_bytes": 0, "free_bytes": 0}},
    }
    (line,) = [
        text for text in preflight_lines({**found, "memory": {**memory, **estimate.shown()}}) if "memory" in text
    ]
    parts = line.partition(": ")[2].partition(", and ")[0]
    assert [part.split()[0] for part in parts.split(", ")] == list(PARTS)
    assert "and 1024" in line
    (line,) = [
        text
        for text in preflight_lines({**found, "memory": {**memory, **estimate.shown(), "loading_bytes": 0}})
        if "memory" in text
    ]
    assert "loading" not in line


@pytest.mark.parametrize(("limit", "expected"), [(64 << 30, "48.00 GiB of 64.00 GiB for 8"), (None, "48.00 GiB for 8")])
def test_a_preflight_shows_the_cpu_memory_of_a_machine(limit: int | None, expected: str) -> None:
    estimate = MemoryEstimate(*[0] * 9, machine=48 << 30, page_cache=130 << 30)
    memory = {"device": "cuda", "devices": 8, "estimate_bytes": 0, "limit_bytes": 1, **estimate.shown()}
    counts = dict.fromkeys(
        ("trained", "num_rows", "examples", "truncated", "dropped", "median_tokens", "max_tokens"), 1
    )
    found = {
        **{"message": "The job fits.", "warnings": [], "data": {**counts, "histogram": [], "mixture": []}},
        "steps": dict.fromkeys(("total_steps", "epochs", "steps_per_epoch", "global_batch"), 1),
        "disk": {"needed_bytes": 0, "free_bytes": 0},
    }
    of_older_service = preflight_lines({**found, "memory": {k: v for k, v in memory.items() if "machine" not in k}})
    lines = preflight_lines({**found, "memory": {**memory, "ranks_per_machine": 8, "machine_limit_bytes": limit}})
    (line,) = [line for line in lines if line not in of_older_service]
    assert line == f"host    {expected} ranks of a machine; files of weights in its page cache: 130.00 GiB"
