"""Jobs that reserve cores train on one CPU at the same time, each on its own cores, whatever is killed meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from llama_stack_provider_trl.launch.runner import RunnerStatus
from llama_stack_provider_trl.system.files import RunDir
from tests.census import assert_clean
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import JOBS, TrainingService, running
from tests.contract.stack import SFT, Json, poll
from tests.required import IN_FULL, lacking

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]

ENDLESS = 5000
"""Epochs: such a job trains until it is cancelled."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingService]:
    """One that may use two cores."""
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        lacking("two cores that a process can be bound to")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    try:
        with running(TrainingService(tmp_path_factory.mktemp("service"), retry_backoff=0.2)) as service:
            service.register("questions", QUESTIONS)
            yield service
    finally:
        os.sched_setaffinity(0, before)


def submit(service: TrainingService, name: str, epochs: int = ENDLESS, cores: int | None = 1) -> str:
    body = sft(name, "questions")
    body["training_config"] |= {"n_epochs": epochs, "dtype": "fp32"}
    reserved = {} if cores is None else {"resources": {"reserve_cpus": cores}}
    options = {"save_steps": 5, "keep_last": 1, "retries": 1, "preflight": "off", **reserved}
    return service.submit(SFT, body, options=options)


def trains(service: TrainingService, name: str, beyond: int = 0, attempt: int = 1) -> Json:
    """The status of a job that has done more steps than these, in this attempt."""

    def probe() -> Json | None:
        status = service.status(name)
        seen = status["resources_allocated"]
        is_it = status["status"] == "in_progress" and seen["attempt"] == attempt
        return status if is_it and seen["progress"]["step"] > beyond else None

    status = poll(probe, f"{name} trains", timeout=120)
    assert status is not None
    return status


def detail(service: TrainingService, name: str) -> str:
    return str(service.status(name)["resources_allocated"]["detail"])


def trainer(service: TrainingService, name: str, attempt: int = 1) -> RunnerStatus:
    status = RunnerStatus.read(RunDir(service.data_dir / "jobs" / name / "attempts" / str(attempt)).runner_status)
    assert status is not None
    assert status.runner is not None
    assert status.trainer is not None
    return status


def affinity(service: TrainingService, name: str) -> list[set[int]]:
    """The cores that each process of a job may use, but for its runner."""
    runner = trainer(service, name).runner
    assert runner is not None
    return [os.sched_getaffinity(one.pid) for one in psutil.Process(runner.pid).children(recursive=True)]


def cancel(service: TrainingService, *names: str) -> None:
    for name in names:
        assert service.post(f"{JOBS}/{name}/cancel").ok
    for name in names:
        service.wait(name, "cancelled")


@IN_FULL  # CI: cores and kills in tests/process/test_engine_local.py, what waits for them in tests/unit/test_cores.py
def test_two_jobs_with_reserved_cores_share_the_cpu_and_everything_that_is_killed_leaves_it_so(
    service: TrainingService,
) -> None:
    first, second = submit(service, "first"), submit(service, "second")
    third, whole = submit(service, "third"), submit(service, "whole", cores=None)
    found = [trains(service, name, beyond=2) for name in (first, second)]
    assert [status["status"] for status in found] == ["in_progress"] * 2
    assert [status["resources_allocated"]["device"] for status in found] == ["cpu:0", "cpu:1"]
    assert found[0]["resources_allocated"]["effective_config"]["resources"]["reserve_cpus"] == 1
    numbers = sorted(os.sched_getaffinity(service.pid))
    for name, core in zip((first, second), numbers, strict=True):
        assert affinity(service, name), name
        assert all(cores == {core} for cores in affinity(service, name)), name
    full = "waiting for cores: needs 1 of 2 cores, free: 0 (held by first, second)"
    poll(lambda: detail(service, third) == full, full, timeout=10)
    held = "waiting for cpu (held by first, second)"
    poll(lambda: detail(service, whole) == held, held, timeout=10)
    assert service.get("/nodes").json()["data"][0]["jobs"] == {"cpu:0": first, "cpu:1": second}
    page = " ".join(service.get("/nodes", prefix="").text.split())
    assert "cpu: 0 of " in page
    assert f'cpu:1: <a href="/jobs/{second}">' in page

    # The service: a new one counts their cores, and they stay taken.
    service.kill()
    service.start()
    for name, status in zip((first, second), found, strict=True):
        trains(service, name, beyond=status["resources_allocated"]["progress"]["step"])
    assert (detail(service, third), detail(service, whole)) == (full, held)

    # A runner: its core is free again, its job is tried again and has its steps once. The other job notices nothing.
    cancel(service, third, whole)
    runner = trainer(service, second).runner
    assert runner is not None
    os.kill(runner.pid, signal.SIGKILL)
    reached = found[1]["resources_allocated"]["progress"]["step"]
    again = trains(service, second, beyond=reached, attempt=2)
    assert again["resources_allocated"]["device"] == "cpu:1"
    steps = [point["step"] for point in service.get(f"{JOBS}/{second}/metrics").json()["data"]]
    assert steps == sorted(set(steps))
    trains(service, first)
    cancel(service, first, second)
    assert_clean(service.data_dir)


def test_a_job_has_the_numbers_of_a_whole_cpu_on_reserved_cores(service: TrainingService) -> None:
    one, two, whole = submit(service, "one", 2), submit(service, "two", 2), submit(service, "alone", 2, cores=None)
    for name in (one, two, whole):
        service.wait(name, "completed")
    first, second, third = (
        [point["metrics"]["loss"] for point in service.get(f"{JOBS}/{name}/metrics").json()["data"]]
        for name in (one, two, whole)
    )
    assert first
    assert first == second  # the same number of threads
    assert third == pytest.approx(first, rel=1e-4)


def test_a_job_is_refused_cores_that_its_processes_do_not_fit_on(service: TrainingService) -> None:
    options = {"resources": {"reserve_cpus": 1}, "nproc_per_node": 2}
    answer = service.post(SFT, sft("refused", "questions"), options=options)
    assert answer.status_code == 400
    assert "each of the 2 processes of nproc_per_node needs a core" in answer.json()["detail"]
