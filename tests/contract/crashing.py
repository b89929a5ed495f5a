"""Servers that are killed with SIGKILL in every state that a job can be in, and what must be true of the job after it.

The same acts for an inline provider, whose jobs are one process, and for the training service, whose jobs are two
ranks.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.system.data_dir import DATABASE
from llama_stack_provider_trl.system.files import is_whole
from llama_stack_provider_trl.system.process import FileLock
from tests.census import assert_clean, census
from tests.contract.payloads import QUESTIONS, promised, sft
from tests.contract.service import TrainingService
from tests.contract.stack import DPO, SFT, Json, LlamaStack, Server, poll

PASSES = 0.7
"""Seconds in which a supervisor makes a few passes over all jobs."""
STARTING = {
    "supervisor-attempt-recorded": JobState.launching,
    "supervisor-task-started": JobState.launching,
}
"""Points of a supervisor at which it dies while it starts a task, and the state of the job then."""
CONCLUDING = {"supervisor-concluding": JobState.in_progress}


class Outcome(NamedTuple):
    """What a job has in the end; two trainings of one request have the same."""

    sha256: str
    """Of the exported weights."""
    losses: list[tuple[str, int, float]]
    """Kind, step and loss of every metric point."""


class Crashing(Server):
    """A server that takes faults, dies of SIGKILL with all its workers, and leaves its trainings alone."""

    steps: int
    """Of the job that all tests train. What comes after its first pause is shuffled again."""
    save_steps: int
    patience: float
    """Seconds until a training that was started has made its first step, or has ended, on a busy machine."""

    def __init__(self, root: Path, **more: Any) -> None:
        super().__init__(root, **more)
        self.faults.mkdir()
        self.store = Store(self.data_dir / DATABASE)
        self.supervisor_lock = FileLock(self.data_dir / "supervisor.lock")

    @property
    def held(self) -> Mapping[str, list[str]]:
        """Points at which a training is held, in order, and what it has staged then."""
        return {
            "step-1": [],
            f"saving-{self.save_steps}": [".saving"],
            self.between: [],
            "exporting-final": ["final.tmp"],
        }

    @property
    def between(self) -> str:
        """The point between two checkpoints."""
        return f"step-{self.save_steps + 1}"

    @property
    def second_save(self) -> str:
        return f"saving-{2 * self.save_steps}"

    def train(self, job_uuid: str) -> str:
        """Submit the job that all tests train, under this name."""
        raise AssertionError("each server has its own request")

    def kill(self) -> None:
        """SIGKILL to the server and its workers, which share its process group; every training has its own."""
        assert self.process is not None
        os.killpg(self.pid, signal.SIGKILL)
        assert self.process.wait(60) == -signal.SIGKILL
        poll(lambda: not _group_lives(self.pid), "the workers are gone", timeout=10, pause=0.01)

    def kill_if_it_lives(self) -> None:
        if self.process is not None and _group_lives(self.pid):
            os.killpg(self.pid, signal.SIGKILL)
            self.process.wait()

    def wait_killed(self) -> None:
        """The server has been killed by a fault."""
        assert self.process is not None
        assert self.process.wait(self.patience) == -signal.SIGKILL

    def restart(self) -> None:
        """Start the server again, and send it no request; returns when it has polled all jobs."""
        self.launch()
        mine = f"supervisor (pid {self.pid})"
        poll(lambda: self.supervisor_lock.holder() == mine, f"{mine} holds the lock", timeout=60, pause=0.02)
        time.sleep(PASSES)

    @contextmanager
    def unsupervised(self) -> Iterator[None]:
        """No server that is started meanwhile can supervise: jobs are taken, and stay in the queue."""
        assert self.supervisor_lock.acquire("a test")
        try:
            yield
        finally:
            self.supervisor_lock.release()

    def disarm(self) -> None:
        """No process is held any longer, no fault is armed, the server runs and no job does."""
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

    def recorded(self, job_uuid: str) -> JobState:
        """The state of a job, as the store reports."""
        return self.store.get(job_uuid).state

    def reach(self, job_uuid: str, *states: JobState) -> JobRecord:
        """The job once it is in one of these states, as the store reports."""

        def probe() -> JobRecord | None:
            job = self.store.get(job_uuid)
            return job if job.state in states else None

        job = poll(probe, f"job {job_uuid} becomes {' or '.join(states)}", timeout=self.patience)
        assert job is not None
        return job

    def outcome(self, job_uuid: str) -> Outcome:
        """Of a completed job."""
        final = self.store.checkpoints(job_uuid)[-1].path
        assert final.name == "final"
        points = self.store.points(job_uuid)
        losses = [(str(point.kind), point.step, float(point.metrics["loss"] or 0)) for point in points]
        return Outcome(hashlib.sha256((final / "model.safetensors").read_bytes()).hexdigest(), losses)


class CrashingStack(Crashing, LlamaStack):
    """Trains one process for two epochs of three steps."""

    steps, save_steps, patience = 6, 2, 90.0
    rows = QUESTIONS[:6]

    def __init__(self, root: Path, workers: int = 1) -> None:
        super().__init__(root)
        if workers > 1:
            self.programs = (*self.programs, Path(__file__).with_name("forked_workers.py"))
            text = self._config.read_text()
            assert text.count("\nserver:\n") == 1
            self._config.write_text(text.replace("\nserver:\n", f"\nserver:\n  workers: {workers}\n"))

    def request(self, job_uuid: str) -> Json:
        body = sft(job_uuid, "rows")
        body["training_config"]["n_epochs"] = self.steps * 2 // len(self.rows)
        return body

    def train(self, job_uuid: str) -> str:
        return self.submit(SFT, self.request(job_uuid), options={"save_steps": self.save_steps})


class CrashingService(Crashing, TrainingService):
    """Trains two ranks on the promised payload and a dataset `pairs` of 24 rows: three epochs of three steps."""

    steps, save_steps = 9, 3
    patience = 150.0
    """Most of a job of two ranks are imports. A quiet machine with 2 cores takes 20 s."""

    def launch(self) -> None:
        if self.log.exists():  # which is begun again
            assert "Traceback" not in self.log.read_text(), self.log_tail()
        super().launch()

    def train(self, job_uuid: str) -> str:
        return self.submit(DPO, promised(job_uuid, "pairs"), options={"save_steps": self.save_steps})


@contextmanager
def crashing_stack(root: Path, workers: int = 1) -> Iterator[CrashingStack]:
    """A Llama Stack that is not started yet; in the end no process of its jobs is left."""
    stack = CrashingStack(root, workers)
    try:
        yield stack
        stack.disarm()
        assert_clean(stack.data_dir)
    finally:
        stack.store.close()
        stack.kill_if_it_lives()
        with suppress(Exception):
            stack.kill_tasks()


def die_at(server: Crashing, job: str, acts: Mapping[str, JobState]) -> None:
    """The server dies of a fault at each of these points, which are armed, and is started again each time."""
    for point, state in acts.items():
        server.wait_killed()
        assert server.taken(point)
        assert server.recorded(job) is state
        server.launch()


def kill_while_held(server: Crashing, point: str) -> None:
    """Kill the server and start it again while a training is held at a point. It stays held."""
    server.wait_taken(point, server.patience)
    poll(
        lambda: [path.name for path in census(server.data_dir).staged] == server.held[point],
        f"at {point}, and once the checkpoint before is written, staged is {server.held[point]}",
        timeout=30,
    )
    before = census(server.data_dir)
    assert before.running, point
    server.kill()
    assert census(server.data_dir) == before, point
    server.restart()
    assert census(server.data_dir) == before, "who begins to supervise must leave what is at work alone"


def pause_and_kill(server: Crashing, job: str) -> int:
    """Kill the server when it has the order to pause the job that is held between two checkpoints; the job pauses.

    Returns:
        The step at which it paused.
    """
    server.store.request_pause(job)
    server.kill()
    assert server.recorded(job) is JobState.pausing
    server.restart()
    server.go(server.between)
    paused = server.reach(job, JobState.paused, JobState.completed, JobState.failed)
    assert paused.state is JobState.paused, paused.message
    assert_clean(server.data_dir)
    first, last = (checkpoint.step for checkpoint in server.store.checkpoints(job))
    assert first == server.save_steps
    assert last in (first + 1, first + 2)
    server.wait_until_it_answers()
    assert_checkpoints_stand(server.status(job))
    return last


def cancel_and_kill(server: Crashing, job: str) -> None:
    """Kill the server right after a cancel of the job that is held in its second checkpoint, and again when it
    concludes the job; the job is cancelled."""
    server.wait_taken(server.second_save, server.patience)
    assert server.cancel(job).status_code == 200
    server.kill()
    assert server.recorded(job) is JobState.cancelling
    server.arm("supervisor-concluding", "kill")
    server.launch()
    die_at(server, job, {"supervisor-concluding": JobState.cancelling})
    server.wait_until_it_answers()
    assert_cancelled(server, job)


def assert_as_undisturbed(server: Crashing, job: str, expected: Outcome, paused_at: int | None = None) -> None:
    """The job completes, with the weights and the metrics of one that was left alone, and leaves nothing behind.

    Args:
        paused_at: the step at which it was paused; it has a checkpoint and a second attempt from there.
    """
    status = server.wait(job, "completed", timeout=server.patience)
    assert_clean(server.data_dir)
    resources = status["resources_allocated"]
    starts = [attempt.start_step for attempt in server.store.attempts(job)]
    assert starts == ([0] if paused_at is None else [0, paused_at])
    assert resources["retries_used"] == 0
    assert resources["warnings"] == []
    assert [(kind, step) for kind, step, _ in expected.losses] == [("train", n + 1) for n in range(server.steps)]
    saved = {*range(server.save_steps, server.steps + 1, server.save_steps), paused_at or server.steps}
    assert [checkpoint.step for checkpoint in server.store.checkpoints(job)] == sorted(saved)
    assert_checkpoints_stand(status)
    assert server.outcome(job) == expected


def assert_cancelled(server: Crashing, job: str) -> None:
    status = server.wait(job, "cancelled", timeout=20)
    assert_clean(server.data_dir)
    assert status["resources_allocated"]["attempt"] == 1
    assert [checkpoint.step for checkpoint in server.store.checkpoints(job)] == [server.save_steps]
    assert_checkpoints_stand(status)
    steps = [point.step for point in server.store.points(job)]
    assert steps == sorted(set(steps))


def assert_checkpoints_stand(status: Json) -> None:
    for checkpoint in status["checkpoints"]:
        assert is_whole(Path(checkpoint["path"])), f"{checkpoint['path']} is listed"


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
