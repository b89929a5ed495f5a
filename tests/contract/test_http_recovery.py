"""Llama Stack is killed with SIGKILL in every state that a job can be in, and started again on the same data."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import requests

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.files import is_whole
from llama_stack_provider_trl.jobs.records import JobRecord
from llama_stack_provider_trl.jobs.states import JobState
from llama_stack_provider_trl.jobs.store import DATABASE, Store
from llama_stack_provider_trl.process import FileLock
from tests.census import assert_clean, census
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.stack import SFT, Json, LlamaStack, poll

pytestmark = [pytest.mark.contract, pytest.mark.timeout(400)]

ROWS = QUESTIONS[:6]
OPTIONS = {"save_steps": 2}
STEPS = 6
"""Two epochs of three steps: what comes after a pause at step 4 is shuffled anew and cut short."""
PASSES = 0.7
"""Seconds in which a supervisor makes a few passes over all jobs."""


class CrashingStack(LlamaStack):
    """A server that takes faults, dies of SIGKILL with all its workers, and leaves its trainings alone."""

    def __init__(self, root: Path, workers: int = 1) -> None:
        super().__init__(root)
        self.faults = root / "faults"
        self.faults.mkdir()
        self.store = Store(self.data_dir / DATABASE)
        self.supervisor_lock = FileLock(self.data_dir / "supervisor.lock")
        if workers > 1:
            config = root / "run.yaml"
            text = config.read_text()
            assert text.count("\nserver:\n") == 1
            config.write_text(text.replace("\nserver:\n", f"\nserver:\n  workers: {workers}\n"))

    def launch(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(faults.VARIABLE, str(self.faults))
            super().launch()

    def kill(self) -> None:
        """SIGKILL to the server and its workers, which share its process group; every training has its own."""
        assert self.server is not None
        os.killpg(self.pid, signal.SIGKILL)
        assert self.server.wait(10) == -signal.SIGKILL
        poll(lambda: not _group_lives(self.pid), "the workers are gone", timeout=10, pause=0.01)

    def wait_killed(self) -> None:
        """The server has been killed by a fault."""
        assert self.server is not None
        assert self.server.wait(60) == -signal.SIGKILL

    def wait_supervising(self) -> None:
        """The server that was started last has taken over, and has had a look at all jobs."""
        mine = f"supervisor (pid {self.pid})"
        poll(lambda: self.supervisor_lock.holder() == mine, f"{mine} holds the lock", timeout=60)
        time.sleep(PASSES)

    @contextmanager
    def unsupervised(self) -> Iterator[None]:
        """No server that is started meanwhile can supervise: jobs are taken, and stay in the queue."""
        assert self.supervisor_lock.acquire("a test")
        try:
            yield
        finally:
            self.supervisor_lock.release()

    def arm(self, point: str, action: str) -> None:
        (self.faults / point).write_text(action)

    def taken(self, point: str) -> bool:
        return (self.faults / f"{point}.taken").exists()

    def wait_taken(self, point: str) -> None:
        poll(
            lambda: self.taken(point),
            f"a process reaches {point}; the jobs: {self.store.list()}",
            timeout=60,
            pause=0.02,
        )

    def go(self, point: str) -> None:
        (self.faults / f"{point}.go").touch()

    def disarm(self) -> None:
        """Nobody is held any longer, and no fault is armed."""
        for path in list(self.faults.iterdir()):
            if path.suffix == ".taken":
                path.with_suffix(".go").touch()
            elif path.suffix != ".go":
                path.unlink()
        if not self.runs():
            self.launch()
        self.wait_until_it_answers()
        survivors = self.end_jobs()
        for path in self.faults.iterdir():
            path.unlink()
        assert not survivors, f"processes outlived their jobs: {survivors}"

    def train(self, job_uuid: str) -> str:
        """Submit the job that all tests here train, under this name."""
        return self.submit(SFT, _request(job_uuid), options=OPTIONS)

    def state(self, job_uuid: str) -> JobState:
        return self.store.get(job_uuid).state

    def reach(self, job_uuid: str, *states: JobState) -> JobRecord:
        """The job once it is in one of these states, as the store tells."""

        def look() -> JobRecord | None:
            job = self.store.get(job_uuid)
            return job if job.state in states else None

        job = poll(look, f"job {job_uuid} becomes {' or '.join(states)}", timeout=90)
        assert job is not None
        return job


@contextmanager
def crashing_stack(root: Path, workers: int = 1) -> Iterator[CrashingStack]:
    """A server that is not started yet; in the end no process of its jobs is left."""
    stack = CrashingStack(root, workers)
    try:
        yield stack
        stack.disarm()
        assert_clean(stack.data_dir)
    finally:
        stack.store.close()
        if stack.server is not None and _group_lives(stack.pid):
            os.killpg(stack.pid, signal.SIGKILL)
            stack.server.wait()
        for process in stack.processes():
            with suppress(Exception):
                process.kill()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashingStack]:
    with crashing_stack(tmp_path_factory.mktemp("recovery")) as stack:
        stack.start()
        stack.register("rows", ROWS)
        yield stack


@pytest.fixture(scope="module")
def undisturbed(shared: CrashingStack) -> str:
    """sha256 of the weights that a job ends with when nothing happens to it."""
    return _digest(shared.wait(shared.train("undisturbed"), "completed"))


@pytest.fixture
def victim(shared: CrashingStack, undisturbed: str) -> Iterator[CrashingStack]:
    """The server of all tests here that need no second one; it runs, and none of its jobs does."""
    yield shared
    shared.disarm()


def test_a_queue_is_worked_off_after_a_kill_without_a_single_request(victim: CrashingStack, undisturbed: str) -> None:
    victim.kill()
    jobs = _queue_two_and_die(victim)
    victim.launch()
    _assert_worked_off(victim, jobs, undisturbed)


def test_of_two_workers_that_were_killed_one_supervises_again_and_the_other_follows_it(
    tmp_path: Path, undisturbed: str
) -> None:
    with crashing_stack(tmp_path, workers=2) as stack:
        jobs = _queue_two_and_die(stack)
        stack.arm("step-3", "hold")
        stack.launch()
        stack.wait_taken("step-3")
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


def test_llama_stack_dies_between_any_two_acts_of_its_supervisor(victim: CrashingStack, undisturbed: str) -> None:
    acts = {
        "supervisor-attempt-recorded": JobState.launching,
        "supervisor-task-started": JobState.launching,
        "supervisor-concluding": JobState.in_progress,
    }
    for point in acts:
        victim.arm(point, "kill")
    job = "dies-between"
    # The answer may come too late for a client, or half of it; the job does not.
    with suppress(requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
        victim.train(job)
    for point, state in acts.items():
        victim.wait_killed()
        assert victim.taken(point)
        assert victim.state(job) is state
        victim.launch()
    victim.wait_until_it_answers()
    _assert_as_undisturbed(victim, job, undisturbed)


def test_a_job_trains_on_while_llama_stack_is_killed_again_and_again(victim: CrashingStack, undisturbed: str) -> None:
    staged = {
        "step-1": [],
        "saving-2": [".saving"],
        "step-3": [],  # between two checkpoints
        "exporting-final": ["final.tmp"],
    }
    for point in staged:
        victim.arm(point, "hold")
    job = victim.train("held")
    for point, names in staged.items():
        victim.wait_taken(point)
        before = census(victim.data_dir)
        assert before.running, point
        assert [path.name for path in before.staged] == names, point

        victim.kill()
        assert census(victim.data_dir) == before, point
        victim.launch()
        victim.wait_supervising()
        assert census(victim.data_dir) == before, "who begins to supervise must leave what is at work alone"
        victim.go(point)
    victim.wait_until_it_answers()
    _assert_as_undisturbed(victim, job, undisturbed)


def test_a_cancel_is_carried_out_although_llama_stack_dies_right_after_it_and_again_at_the_end_of_the_job(
    victim: CrashingStack,
) -> None:
    victim.arm("saving-4", "hold")
    job = victim.train("cancelled")
    victim.wait_taken("saving-4")
    assert victim.cancel(job).status_code == 200
    victim.kill()
    assert victim.state(job) is JobState.cancelling

    victim.arm("supervisor-concluding", "kill")
    victim.launch()
    victim.wait_killed()
    assert victim.state(job) is JobState.cancelling
    victim.start()
    _assert_cancelled(victim, job)


def test_a_cancel_of_which_the_supervisor_has_not_heard_is_carried_out_after_a_kill(victim: CrashingStack) -> None:
    victim.arm("saving-4", "hold")
    job = victim.train("cancelled-unheard")
    victim.wait_taken("saving-4")
    victim.kill()
    victim.store.request_cancel(job)  # all that is left where the server dies right after it has taken a cancel
    time.sleep(PASSES)
    assert census(victim.data_dir).running
    assert victim.state(job) is JobState.cancelling
    victim.start()
    _assert_cancelled(victim, job)


def test_a_job_that_was_told_to_pause_pauses_after_a_kill_and_goes_on_as_if_nothing_had_happened(
    victim: CrashingStack, undisturbed: str
) -> None:
    victim.arm("step-3", "hold")
    job = victim.train("paused")
    victim.wait_taken("step-3")
    victim.store.request_pause(job)
    victim.kill()
    assert victim.state(job) is JobState.pausing
    victim.start()
    victim.wait_supervising()
    victim.go("step-3")

    paused = victim.reach(job, JobState.paused, JobState.completed, JobState.failed)
    assert paused.state is JobState.paused, paused.message
    assert_clean(victim.data_dir)
    steps = [checkpoint.step for checkpoint in victim.store.checkpoints(job)]
    assert steps in ([2, 3], [2, 4])
    _assert_checkpoints_stand(victim.status(job))

    victim.store.request_resume(job)
    _assert_as_undisturbed(victim, job, undisturbed, attempts=2)
    assert victim.store.attempts(job)[1].start_step == steps[-1]


def test_a_job_waits_for_a_device_that_another_llama_stack_holds_and_says_so_before_and_after_a_kill(
    victim: CrashingStack, tmp_path: Path, undisturbed: str
) -> None:
    (tmp_path / "locks").symlink_to(victim.root / "locks")  # the second server's TRL_LOCK_DIR is the first one's
    with crashing_stack(tmp_path) as second:
        victim.arm("step-1", "hold")
        first_job = victim.train("first-holder")
        second.start()  # while the first one's training imports torch
        second.register("rows", ROWS)
        victim.wait_taken("step-1")
        job = second.train("second-waiter")
        _wait_for_detail(second, job, f"held by task {first_job}-1 ")
        second.kill()
        second.start()
        second.wait_supervising()
        shown = _wait_for_detail(second, job, f"held by task {first_job}-1 ")
        assert str(victim.data_dir.resolve()) in shown["resources_allocated"]["detail"]
        assert shown["status"] == "scheduled"
        assert not second.store.points(job)

        victim.go("step-1")
        _assert_as_undisturbed(victim, first_job, undisturbed)
        _assert_as_undisturbed(second, job, undisturbed)


def _request(job_uuid: str) -> Json:
    body = sft(job_uuid, "rows")
    body["training_config"]["n_epochs"] = STEPS * 2 // len(ROWS)
    return body


def _queue_two_and_die(stack: CrashingStack) -> list[str]:
    """Start the server, queue two jobs while it may not supervise, and kill it."""
    with stack.unsupervised():
        stack.start()
        jobs = [_train_at_any_worker(stack, name) for name in ("first-in-the-queue", "second-in-the-queue")]
        stack.kill()
    assert [stack.state(job) for job in jobs] == [JobState.scheduled, JobState.scheduled]
    return jobs


def _train_at_any_worker(stack: CrashingStack, job: str) -> str:
    """Submit a job; a worker of Llama Stack does not know the datasets that another one has registered just now."""

    def send() -> bool:
        stack.register("rows", ROWS)
        answer = stack.post(SFT, _request(job), options=OPTIONS)
        assert answer.status_code == 200 or "Dataset 'rows' not found" in answer.text, answer.text
        return answer.status_code == 200

    poll(send, f"a worker takes job {job}", timeout=20)
    return job


def _assert_worked_off(stack: CrashingStack, jobs: list[str], digest: str) -> None:
    """The jobs complete one after the other; nothing is asked of the server before they have."""
    for job in jobs:
        ended = stack.reach(job, JobState.completed, JobState.failed)
        assert ended.state is JobState.completed, ended.message
    first, second = (stack.store.get(job) for job in jobs)
    assert first.completed_at is not None
    assert second.started_at is not None
    assert first.completed_at <= second.started_at
    for job in jobs:
        _assert_as_undisturbed(stack, job, digest)


def _assert_as_undisturbed(stack: CrashingStack, job: str, digest: str, attempts: int = 1) -> None:
    """The job completes, with the weights and the metrics of one that was left alone, and leaves nothing behind."""
    status = stack.wait(job, "completed")
    assert_clean(stack.data_dir)
    resources = status["resources_allocated"]
    assert (resources["attempt"], resources["retries_used"]) == (attempts, 0), resources
    assert resources["warnings"] == []
    points = [(point.kind, point.step) for point in stack.store.points(job)]
    assert points == [("train", step) for step in range(1, STEPS + 1)]
    assert [checkpoint.step for checkpoint in stack.store.checkpoints(job)] == [2, 4, STEPS]
    _assert_checkpoints_stand(status)
    assert _digest(status) == digest


def _assert_cancelled(stack: CrashingStack, job: str) -> None:
    status = stack.wait(job, "cancelled", timeout=20)
    assert_clean(stack.data_dir)
    assert status["resources_allocated"]["attempt"] == 1
    assert [checkpoint.step for checkpoint in stack.store.checkpoints(job)] == [2]
    _assert_checkpoints_stand(status)
    assert [point.step for point in stack.store.points(job)] == sorted({p.step for p in stack.store.points(job)})


def _assert_checkpoints_stand(status: Json) -> None:
    for checkpoint in status["checkpoints"]:
        assert is_whole(Path(checkpoint["path"])), f"{checkpoint['path']} is listed"


def _digest(status: Json) -> str:
    final = Path(status["checkpoints"][-1]["path"])
    assert final.name == "final"
    return hashlib.sha256((final / "model.safetensors").read_bytes()).hexdigest()


def _wait_for_detail(stack: CrashingStack, job: str, text: str) -> Json:
    def look() -> Json | None:
        status = stack.status(job)
        return status if text in status["resources_allocated"]["detail"] else None

    status = poll(look, f"the status of {job} says {text!r}", timeout=20)
    assert status is not None
    return status


def _supervising_pid(stack: CrashingStack) -> int | None:
    found = re.fullmatch(r"supervisor \(pid (\d+)\)", stack.supervisor_lock.holder())
    return int(found[1]) if found else None


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
