"""Jobs that reserve cores train on one CPU at the same time, each on its own cores, whatever is killed meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from llama_stack_provider_trl.launch.runner import RunnerStatus
from llama_stack_provider_trl.system.files import RunDir
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import JOBS, TrainingService, running
from tests.contract.stack import SFT, Json, poll
from tests.required import lacking

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


def cancel(service: TrainingService, *names: str) -> None:
    for name in names:
        assert service.post(f"{JOBS}/{name}/cancel").ok
    for name in names:
        service.wait(name, "cancelled")


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
