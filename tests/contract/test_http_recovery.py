"""Llama Stack is killed with SIGKILL in every state that a job can be in, and started again on the same data."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_stack_provider_trl.jobs.decisions.states import JobState
from tests.census import census
from tests.contract.crashing import (
    PASSES,
    CrashingStack,
    Outcome,
    assert_as_undisturbed,
    assert_cancelled,
    crashing_stack,
)
from tests.contract.stack import SFT, Json, poll
from tests.required import IN_FULL

pytestmark = [pytest.mark.contract, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashingStack]:
    with crashing_stack(tmp_path_factory.mktemp("recovery")) as stack:
        stack.start()
        stack.register("rows", stack.rows)
        yield stack


@pytest.fixture(scope="module")
def undisturbed(shared: CrashingStack) -> Outcome:
    """What a job ends with when nothing happens to it."""
    shared.wait(shared.train("undisturbed"), "completed")
    return shared.outcome("undisturbed")


@pytest.fixture
def victim(shared: CrashingStack, undisturbed: Outcome) -> Iterator[CrashingStack]:
    """The server of all tests here that need no second one; it runs, and none of its jobs does."""
    yield shared
    shared.disarm()


def test_a_queue_is_worked_off_after_a_kill_without_a_single_request(
    victim: CrashingStack, undisturbed: Outcome
) -> None:
    victim.kill()
    jobs = _queue_two_and_die(victim)
    victim.launch()
    _assert_worked_off(victim, jobs, undisturbed)


def test_of_two_workers_that_were_killed_one_supervises_again_and_the_other_follows_it(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    with crashing_stack(tmp_path, workers=2) as stack:
        jobs = _queue_two_and_die(stack)
        stack.arm("step-3", "hold")
        stack.launch()
        stack.wait_taken("step-3", 120)
        poll(lambda: not census(stack.data_dir).staged, "the checkpoint before is written", timeout=30)
        before = census(stack.data_dir)

        worker = _supervising_pid(stack)
        assert worker is not None
        assert worker != stack.pid
        os.kill(worker, signal.SIGKILL)
        poll(lambda: _supervising_pid(stack) not in (worker, None), "another worker supervises", timeout=30)
        time.sleep(PASSES)
        assert census(stack.data_dir) == before
        stack.go("step-3")
        _assert_worked_off(stack, jobs, undisturbed)


def test_a_cancel_that_the_supervisor_has_not_read_is_carried_out_after_a_kill(victim: CrashingStack) -> None:
    victim.arm(victim.second_save, "hold")
    job = victim.train("cancelled-unheard")
    victim.wait_taken(victim.second_save)
    victim.kill()
    victim.store.request_cancel(job)  # all that is left where the server dies right after it has taken a cancel
    time.sleep(PASSES)
    assert census(victim.data_dir).running
    assert victim.recorded(job) is JobState.cancelling
    victim.start()
    assert_cancelled(victim, job)


@IN_FULL  # CI: the same locks between processes in tests/process/test_engine_local.py
def test_a_job_waits_for_a_device_that_another_llama_stack_holds_and_reports_it_before_and_after_a_kill(
    victim: CrashingStack, tmp_path: Path, undisturbed: Outcome
) -> None:
    (tmp_path / "locks").symlink_to(victim.root / "locks")  # the second server's TRL_LOCK_DIR is the first one's
    with crashing_stack(tmp_path) as second:
        victim.arm("step-1", "hold")
        first_job = victim.train("first-holder")
        second.start()  # while the first one's training imports torch
        second.register("rows", second.rows)
        victim.wait_taken("step-1")
        job = second.train("second-waiter")
        _wait_for_detail(second, job, f"held by task {first_job}-1 ")
        second.kill()
        second.restart()
        second.wait_until_it_answers()
        shown = _wait_for_detail(second, job, f"held by task {first_job}-1 ")
        assert str(victim.data_dir.resolve()) in shown["resources_allocated"]["detail"]
        assert shown["status"] == "scheduled"
        assert not second.store.points(job)

        victim.go("step-1")
        assert_as_undisturbed(victim, first_job, undisturbed)
        assert_as_undisturbed(second, job, undisturbed)


def _queue_two_and_die(stack: CrashingStack) -> list[str]:
    """Start the server, queue two jobs while it may not supervise, and kill it."""
    with stack.unsupervised():
        stack.start()
        jobs = [_train_at_any_worker(stack, name) for name in ("first-in-the-queue", "second-in-the-queue")]
        stack.kill()
    assert [stack.recorded(job) for job in jobs] == [JobState.scheduled, JobState.scheduled]
    return jobs


def _train_at_any_worker(stack: CrashingStack, job: str) -> str:
    """Submit a job; a worker of Llama Stack does not know the datasets that another one has registered just now."""

    def send() -> bool:
        stack.register("rows", stack.rows)
        answer = stack.post(SFT, stack.request(job), options={"save_steps": stack.save_steps})
        assert answer.status_code == 200 or "Dataset 'rows' not found" in answer.text, answer.text
        return answer.status_code == 200

    poll(send, f"a worker takes job {job}", timeout=20)
    return job


def _assert_worked_off(stack: CrashingStack, jobs: list[str], expected: Outcome) -> None:
    """The jobs complete one after the other; no request is sent to the server before they have."""
    for job in jobs:
        ended = stack.reach(job, JobState.completed, JobState.failed)
        assert ended.state is JobState.completed, ended.message
    first, second = (stack.store.get(job) for job in jobs)
    assert first.completed_at is not None
    assert second.started_at is not None
    assert first.completed_at <= second.started_at
    for job in jobs:
        assert_as_undisturbed(stack, job, expected)


def _wait_for_detail(stack: CrashingStack, job: str, text: str) -> Json:
    def probe() -> Json | None:
        status = stack.status(job)
        return status if text in status["resources_allocated"]["detail"] else None

    status = poll(probe, f"the status of {job} reports {text!r}", timeout=20)
    assert status is not None
    return status


def _supervising_pid(stack: CrashingStack) -> int | None:
    found = re.fullmatch(r"supervisor \(pid (\d+)\)", stack.supervisor_lock.holder())
    return int(found[1]) if found else None
