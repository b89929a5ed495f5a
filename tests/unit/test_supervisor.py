from __future__ import annotations

import errno
import logging
import re
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from llama_stack_provider_trl.errors import JobConflict, StoreError
from llama_stack_provider_trl.jobs.decisions.demands import Queued
from llama_stack_provider_trl.jobs.decisions.placement import place
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.decisions.waits import why_waits
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision import supervisor
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.launch.base import Ended, Observation, TaskSpec, TaskState
from llama_stack_provider_trl.launch.ports import PortRange
from llama_stack_provider_trl.specs.events import (
    CheckpointDamaged,
    CheckpointSaved,
    Evaluated,
    Failed,
    Finished,
    Paused,
    Prepared,
    Progress,
    Reason,
    Started,
)
from llama_stack_provider_trl.specs.job import AttemptSpec, ResumeFrom, ShardingSpec
from llama_stack_provider_trl.stack.responses import resources
from llama_stack_provider_trl.system.files import RunDir, write_manifest
from llama_stack_provider_trl.system.process import FileLock
from tests.fakes import FakeClock, FakeLauncher, job_spec

STARTED = Started(pid=1, device="cpu", versions={})
FINISHED = Finished(step=4)
PATIENCE = 6


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six passes in place of 300: each writes and reads files."""
    monkeypatch.setattr(supervisor, "PATIENCE", PATIENCE)


@dataclass
class World:
    """A data directory, its store, a launcher, and a supervisor whose passes are made by hand."""

    root: Path
    clock: FakeClock
    store: Store
    launcher: FakeLauncher
    supervisor: Supervisor

    def add(self, *names: str, **changes: object) -> None:
        for name in names:
            self.store.add_job(
                job_spec(name, **{"checkpoint_dir": self.root / "checkpoints" / "out" / name, **changes}), "digest"
            )

    def tick(self) -> None:
        self.supervisor.tick()

    def job(self, name: str = "a") -> JobRecord:
        return self.store.get(name)

    def state(self, name: str = "a") -> JobState:
        return self.job(name).state

    def run(self, name: str = "a") -> str:
        """Bring a job in progress; returns the id of its task."""
        self.add(name)
        self.tick()
        self.launcher.emit(f"{name}-1", STARTED)
        self.tick()
        assert self.state(name) is JobState.in_progress
        return f"{name}-1"

    def finish(self, task_id: str, *before: Started) -> None:
        """Let a training complete."""
        self.launcher.emit(task_id, *before, FINISHED)
        self.launcher.exit(task_id, 0)
        self.tick()

    def retry(self) -> None:
        """Kill the first attempt of job a, and let the next one begin after its wait."""
        self.launcher.exit("a-1", -9)
        self.tick()
        self.clock.advance(60)
        self.tick()

    def attempt(self, number: int) -> AttemptSpec:
        """What an attempt of job a has to do."""
        path = RunDir(self.root / "jobs" / "a" / "attempts" / str(number)).spec
        return AttemptSpec.model_validate_json(path.read_text())

    def spoil_events(self, task_id: str) -> None:
        """Make the event file one that cannot be read."""
        events = RunDir(self.launcher.tasks[task_id].spec.run_dir).events
        events.unlink()
        events.mkdir()

    def restart(self) -> None:
        """Another process takes over: nothing is left but the store, the run directories and the processes."""
        self.supervisor = Supervisor(self.store, self.launcher, ["cpu"], self.root)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    clock = FakeClock()
    store, launcher = Store(tmp_path / "jobs.db", clock), FakeLauncher()
    yield World(tmp_path, clock, store, launcher, Supervisor(store, launcher, ["cpu"], tmp_path))
    store.close()


# From the queue to the result


def test_a_job_goes_from_the_queue_to_its_result(world: World) -> None:
    world.add("a")
    world.tick()
    assert (world.state(), world.launcher.started) == (JobState.launching, ["a-1"])
    world.launcher.emit("a-1", STARTED, Progress(step=4, epoch=1.0, metrics={"loss": 2.0}, peak_memory_bytes=1))
    world.tick()
    assert (world.state(), world.job().progress.loss) == (JobState.in_progress, 2.0)
    world.launcher.emit("a-1", FINISHED)
    world.tick()
    assert world.state() is JobState.in_progress  # its process has not ended yet
    world.launcher.exit("a-1", 0)
    world.tick()
    assert world.state() is JobState.completed
    assert (world.job().reason, world.job().message) == (None, "")


def test_the_training_process_finds_its_spec_with_the_device_filled_in(world: World) -> None:
    world.add("a", device="auto")
    world.tick()
    run_dir = world.root / "jobs" / "a" / "attempts" / "1"
    spec = AttemptSpec.model_validate_json(RunDir(run_dir).spec.read_text())
    assert (spec.job.device, spec.attempt, spec.run_dir, spec.task_id) == ("cpu", 1, run_dir, "a-1")
    assert spec.age == world.job().age > 0
    assert world.launcher.tasks["a-1"].spec == TaskSpec("a-1", run_dir, ("cpu",))
    assert world.job().spec.device == "auto"  # what was requested stays on record


def test_a_waiting_job_that_is_deleted_while_it_is_placed_keeps_no_other_from_its_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.supervisor = Supervisor(world.store, world.launcher, ["cuda:0", "cuda:1"], world.root)
    world.add("a", "b", device="cuda")

    def place_late(*arguments: Any) -> Any:
        placed = place(*arguments)
        world.store.request_cancel("a")
        world.store.delete("a")
        return placed

    monkeypatch.setattr("llama_stack_provider_trl.jobs.supervision.placing.place", place_late)
    world.tick()
    assert world.launcher.started == ["b-1"]


def test_a_job_that_another_process_ends_during_a_pass_is_left_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.run()

    def poll(task: TaskSpec) -> Observation:
        world.store.transition("a", 1, JobState.in_progress, JobState.failed, Reason.internal, "ended elsewhere")
        return Observation(TaskState.exited, 1)

    monkeypatch.setattr(world.launcher, "poll", poll)
    world.supervisor.tick()
    assert (world.state(), world.job().message) == (JobState.failed, "ended elsewhere")
    assert "could not be handled" not in caplog.text


def test_one_device_trains_one_job_at_a_time_oldest_first(world: World) -> None:
    world.add("a", "b", "c")
    world.tick()
    assert world.launcher.started == ["a-1"]
    world.finish("a-1", STARTED)
    assert world.launcher.started == ["a-1", "b-1"]
    assert [world.state(name) for name in "abc"] == [JobState.completed, JobState.launching, JobState.scheduled]


def test_a_device_that_another_process_holds_is_named_in_the_status(world: World) -> None:
    world.add("a")
    world.tick()
    world.launcher.wait_for_device("a-1", "waiting for device cpu, held by task x-1")
    world.tick()
    assert (world.state(), world.job().detail) == (JobState.launching, "waiting for device cpu, held by task x-1")


def test_many_events_are_read_in_one_pass(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_stack_provider_trl.jobs.supervision.supervisor._EVENT_BYTES", 300)
    task = world.run()
    points = [Progress(step=n, epoch=0.1, metrics={"loss": 1.0}, peak_memory_bytes=1) for n in range(1, 51)]
    world.launcher.emit(task, *points)
    world.tick()
    assert len(world.store.points("a")) == 50


# Ends


def test_a_failed_event_becomes_the_reason_and_the_message(world: World) -> None:
    task = world.run()
    world.launcher.emit(
        task, Failed(reason=Reason.invalid_dataset, message="row 3 has no chosen", traceback="KeyError")
    )
    world.launcher.exit(task, 1)
    world.tick()
    assert (world.state(), world.job().reason) == (JobState.failed, Reason.invalid_dataset)
    assert world.job().message == "row 3 has no chosen\nEnd of the traceback:\nKeyError"


def test_a_crash_shows_the_end_of_the_log(world: World) -> None:
    task = world.run()
    world.launcher.print(task, "loading\nIllegal instruction\n")
    world.launcher.exit(task, -4)
    world.tick()
    assert world.job().reason is Reason.rank_failed
    assert "SIGILL" in world.job().message
    assert world.job().message.endswith("Illegal instruction")


def test_exit_0_without_a_result_is_a_failure(world: World) -> None:
    world.launcher.exit(world.run(), 0)
    world.tick()
    assert (world.state(), world.job().reason) == (JobState.failed, Reason.no_result)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("no runner"), Reason.launch_failed),
        (OSError(errno.ENOSPC, "No space left on device"), Reason.disk_full),
    ],
)
def test_a_launch_that_fails_is_the_end_of_the_job_only(world: World, error: OSError, reason: Reason) -> None:
    world.add("a")
    world.launcher.refuse = error
    world.tick()
    assert (world.state(), world.job().reason) == (JobState.failed, reason)
    assert str(error) in world.job().message
    world.launcher.refuse = None
    world.add("b")
    world.tick()
    assert world.state("b") is JobState.launching


def test_a_removed_run_directory_is_a_lost_task_and_not_a_job_that_runs_forever(world: World) -> None:
    task = world.run()
    del world.launcher.tasks[task]
    world.tick()
    assert (world.state(), world.job().reason) == (JobState.failed, Reason.node_lost)
    assert "was removed" in world.job().message


# Cancelling


def test_a_cancel_ends_the_processes_and_then_the_job(world: World) -> None:
    world.launcher.obedient = False
    task = world.run()
    world.store.request_cancel("a")
    world.tick()
    assert world.launcher.tasks[task].cancels == 1
    assert world.state() is JobState.cancelling  # they live still
    world.launcher.exit(task, -15)
    world.tick()
    assert world.state() is JobState.cancelled
    assert world.job().reason is None


def test_the_intent_is_on_record_before_any_signal_is_sent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run()
    states: list[JobState] = []
    monkeypatch.setattr(world.launcher, "cancel", lambda task: states.append(world.state()))
    world.store.request_cancel("a")
    assert states == []
    world.tick()
    assert states == [JobState.cancelling]


def test_a_cancel_that_comes_after_the_result_does_not_take_it_back(world: World) -> None:
    task = world.run()
    world.launcher.emit(task, FINISHED)
    world.store.request_cancel("a")
    world.tick()
    world.tick()
    assert world.state() is JobState.completed


def test_a_waiting_job_that_is_cancelled_never_starts(world: World) -> None:
    world.add("a", "b")
    world.tick()
    world.store.request_cancel("b")
    world.launcher.exit("a-1", 1)
    world.tick()
    assert world.state("b") is JobState.cancelled
    assert world.launcher.started == ["a-1"]


def test_a_cancelled_job_gives_its_device_to_the_next(world: World) -> None:
    world.run("a")
    world.add("b")
    world.store.request_cancel("a")
    world.tick()
    world.tick()
    assert [world.state(name) for name in "ab"] == [JobState.cancelled, JobState.launching]


# Restarts


def test_a_restarted_supervisor_resumes_a_running_training(world: World) -> None:
    task = world.run()
    world.restart()
    world.tick()
    assert world.launcher.started == [task]
    world.finish(task)
    assert world.state() is JobState.completed


def test_a_training_that_ended_between_two_supervisors_is_decided_by_its_events(world: World) -> None:
    task = world.run()
    world.launcher.emit(task, FINISHED)
    world.launcher.exit(task, None)
    world.restart()
    world.tick()
    assert world.state() is JobState.completed


def test_a_crash_between_the_record_and_the_start_is_made_good(world: World) -> None:
    world.add("a")
    world.store.launch("a", 1, "cpu", world.root / "jobs" / "a" / "attempts" / "1")
    world.restart()
    world.tick()
    assert world.launcher.started == ["a-1"]


def test_a_job_cancelled_between_the_record_and_the_start_never_starts(world: World) -> None:
    world.add("a")
    world.store.launch("a", 1, "cpu", world.root / "jobs" / "a" / "attempts" / "1")
    world.store.request_cancel("a")
    world.restart()
    world.tick()
    world.tick()
    assert (world.state(), world.launcher.started) == (JobState.cancelled, [])


def test_what_an_earlier_database_left_under_the_same_name_is_not_taken_for_this_job(world: World) -> None:
    stale = world.root / "jobs" / "a" / "attempts" / "1"
    stale.mkdir(parents=True)
    RunDir(stale).events.write_text(FINISHED.model_dump_json() + "\n")
    world.add("a")
    world.tick()
    world.launcher.exit("a-1", 1)
    world.tick()
    assert world.state() is JobState.failed
    assert (stale.with_name("1.stale-1") / "events.jsonl").exists()


# Trouble


def test_trouble_with_one_job_does_not_stop_the_others(world: World, caplog: pytest.LogCaptureFixture) -> None:
    task = world.run("a")
    world.supervisor._devices = ("cpu", "cuda:0")
    world.add("b", device="cuda:0")
    world.spoil_events(task)
    world.tick()
    assert (world.state("a"), world.state("b")) == (JobState.in_progress, JobState.launching)
    assert "job a: it could not be handled" in caplog.text


def test_a_job_that_is_nothing_but_trouble_fails_and_its_processes_are_ended(world: World) -> None:
    task = world.run()
    world.spoil_events(task)
    for _ in range(PATIENCE - 1):
        world.tick()
    assert world.state() is JobState.in_progress
    world.tick()
    assert (world.state(), world.job().reason) == (JobState.failed, Reason.internal)
    assert world.launcher.tasks[task].cancels == 1


def test_a_cancelled_job_that_is_nothing_but_trouble_frees_its_device_and_is_logged_twice(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    task = world.run()
    world.add("b")
    world.spoil_events(task)
    world.store.request_cancel("a")
    for _ in range(PATIENCE + 1):
        world.tick()
    assert (world.state("a"), world.job("a").reason) == (JobState.failed, Reason.internal)
    assert world.state("b") is JobState.launching
    assert caplog.text.count("job a: it could not be handled") == 2


def test_a_result_that_cannot_be_stored_stops_neither_other_jobs_nor_what_runs_beside(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    full, beside = Mock(side_effect=StoreError("the result: No space left on device")), Mock()
    world.supervisor = Supervisor(
        world.store, world.launcher, ["cpu", "cuda:0"], world.root, completing=full, beside=beside
    )
    world.supervisor._acquire()
    task = world.run("a")
    world.launcher.emit(task, FINISHED)
    world.launcher.exit(task, 0)
    world.add("b", device="cuda:0")
    world.add("c", after=["a"])
    for _ in range(3):
        world.supervisor._pass()
    assert (world.state("a"), world.state("b"), world.state("c")) == (
        JobState.in_progress,
        JobState.launching,
        JobState.scheduled,
    )
    assert beside.call_count == 3
    assert caplog.text.count("No space left on device") == 1
    full.side_effect = None
    world.tick()
    assert world.state("a") is JobState.completed
    world.supervisor._lock.release()


def test_a_job_is_not_failed_before_its_processes_are_seen_to_have_ended(world: World) -> None:
    world.launcher.obedient = False
    task = world.run()
    world.add("b")
    world.spoil_events(task)
    for _ in range(PATIENCE + 5):
        world.tick()
    assert world.launcher.tasks[task].cancels > 0
    assert (world.state("a"), world.state("b")) == (JobState.in_progress, JobState.scheduled)
    assert "is being ended" in world.job().detail
    world.launcher.exit(task, -9)
    world.tick()
    world.tick()
    assert (world.state("a"), world.job("a").reason) == (JobState.failed, Reason.internal)
    assert world.state("b") is JobState.launching


def test_a_job_whose_processes_cannot_be_seen_is_not_failed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run()
    with monkeypatch.context() as broken:
        broken.setattr(world.launcher, "poll", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        for _ in range(2 * PATIENCE):
            world.tick()
        assert world.state() is JobState.in_progress
    world.tick()
    assert (world.state(), world.job().reason) == (JobState.failed, Reason.internal)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_process_without_descriptors_or_memory_gives_no_job_up(
    world: World, monkeypatch: pytest.MonkeyPatch, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    task = world.run()
    with monkeypatch.context() as exhausted:
        exhausted.setattr(world.launcher, "poll", Mock(side_effect=OSError(number, "no more of them")))
        for _ in range(2 * PATIENCE):
            world.tick()
    assert (world.state(), world.launcher.tasks[task].cancels) == (JobState.in_progress, 0)
    assert caplog.text.count("no more of them") == 1
    world.finish(task)
    assert world.state() is JobState.completed


def test_a_job_that_cannot_be_started_for_want_of_descriptors_starts_later(world: World) -> None:
    world.add("a", retries=0)
    world.launcher.refuse = OSError(errno.EMFILE, "Too many open files")
    for _ in range(2 * PATIENCE):
        world.tick()
    assert (world.state(), world.store.attempts("a")[-1].reason) == (JobState.launching, None)
    world.launcher.refuse = None
    world.tick()
    assert world.launcher.started == ["a-1"]


def test_a_checkpoint_that_cannot_be_opened_for_want_of_descriptors_stays_listed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.add("a", retries=1)
    world.tick()
    saved = save(world, "a-1", 2)
    world.launcher.exit("a-1", -9)
    world.tick()
    world.clock.advance(60)
    with monkeypatch.context() as exhausted:
        exhausted.setattr(Path, "read_text", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        world.tick()
    assert [checkpoint.path for checkpoint in world.store.checkpoints("a")] == [saved]
    world.tick()
    assert world.store.attempts("a")[-1].resume_from == saved


def test_passing_trouble_is_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run()
    calls = 0

    def poll(task: TaskSpec) -> Observation:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise OSError("stale file handle")
        return FakeLauncher.poll(world.launcher, task)

    monkeypatch.setattr(world.launcher, "poll", poll)
    for _ in range(4 * PATIENCE):
        world.tick()
    assert world.state() is JobState.in_progress


def test_a_name_that_is_no_directory_name_fails_its_job_only(world: World) -> None:
    world.add("../../etc", "b")
    for _ in range(PATIENCE):
        world.tick()
    assert world.job("../../etc").reason is Reason.internal
    world.tick()
    assert world.state("b") is JobState.launching


def test_a_database_that_fails_for_a_while_costs_no_job(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    task = world.run()
    world.launcher.emit(task, Progress(step=1, epoch=0.1, metrics={}, peak_memory_bytes=1))

    def fail(*_: object) -> bool:
        raise StoreError("job database: database or disk is full")

    with monkeypatch.context() as full:
        full.setattr(world.store, "apply_events", fail)
        for _ in range(2 * PATIENCE):
            world.supervisor._pass()
    assert caplog.text.count("disk is full") == 1
    world.tick()
    assert (world.state(), world.job().progress.step) == (JobState.in_progress, 1)


# The thread


def test_one_supervisor_per_data_directory(world: World) -> None:
    other = Supervisor(world.store, world.launcher, ["cpu"], world.root)
    world.supervisor.start()
    other.start()
    try:
        assert world.supervisor.supervising
        assert not other.supervising
    finally:
        other.stop()
        world.supervisor.stop()
    assert FileLock(world.root / "supervisor.lock").acquire("the next one")


def test_a_stopped_supervisor_leaves_trainings_running_and_reports_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    task = world.run()
    world.supervisor.start()
    world.supervisor.stop()
    assert world.launcher.tasks[task].cancels == 0
    assert "trainings continue" in caplog.text


# Tries


def crash(world: World, attempt: int, exit_code: int | None = -9) -> None:
    world.launcher.emit(f"a-{attempt}", STARTED)
    world.tick()
    world.launcher.exit(f"a-{attempt}", exit_code)
    world.tick()


def save(world: World, task_id: str, step: int) -> Path:
    """Play a rank that saves a whole checkpoint."""
    path = world.root / "checkpoints" / "out" / "a" / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "weights").write_text("x")
    write_manifest(path)
    event = CheckpointSaved(kind="step", step=step, epoch=1, path=path, train_loss=1.0)
    world.launcher.emit(task_id, STARTED, event)
    world.tick()
    return path


@pytest.mark.parametrize(("chosen", "waits"), [(None, (1.0, 2.0)), (7.5, (7.5, 15.0)), (400.0, (400.0, 600.0))])
def test_a_killed_training_is_tried_again_after_a_wait_and_fails_after_the_last_retry(
    world: World, chosen: float | None, waits: tuple[float, float]
) -> None:
    world.add("a", retries=2, retry_backoff=chosen)
    world.tick()
    for attempt, wait in enumerate(waits, 1):
        crash(world, attempt)
        assert (world.state(), world.job().reason) == (JobState.scheduled, None)
        assert "rank_failed" in world.job().detail
        world.clock.advance(wait - 0.1)
        world.tick()
        assert len(world.launcher.started) == attempt
        world.clock.advance(0.2)
        world.tick()
        assert world.launcher.started[-1] == f"a-{attempt + 1}"
    crash(world, 3)
    assert (world.state(), world.job().reason) == (JobState.failed, Reason.rank_failed)
    assert [tried.reason for tried in world.store.attempts("a")] == [Reason.rank_failed] * 3


def test_a_job_that_waits_for_a_free_port_reports_it(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        world.supervisor = Supervisor(world.store, world.launcher, ["cpu"], world.root, ports=PortRange(port, 1))
        world.add("a", ranks=2, retries=1)
        world.tick()
        assert (world.state(), world.launcher.started) == (JobState.scheduled, [])
        assert f"every port from {port} to {port} is in use; set master_port" in world.job().detail
        world.clock.advance(60)
        world.tick()
    assert (world.state(), world.job().reason) == (JobState.failed, Reason.launch_failed)
    assert "the ports from master_port on" in world.job().advice


PREPARED = Prepared(total_steps=8, start_step=0, num_rows=1, trainable_parameters=1, total_parameters=1)
OUT_OF_MEMORY = Failed(reason=Reason.out_of_memory, message="out of memory on cuda:0")


def run_out_of_memory(world: World, attempt: int, *events: object) -> None:
    world.tick()
    world.launcher.emit(f"a-{attempt}", STARTED, *events, OUT_OF_MEMORY)  # type: ignore[arg-type]
    world.launcher.exit(f"a-{attempt}", 1)
    world.tick()


def trained(world: World, attempt: int) -> tuple[int, int, int | None]:
    """batch_size, gradient_accumulation_steps and max_validation_steps of an attempt."""
    job = world.attempt(attempt).job
    return job.data.batch_size, job.train.gradient_accumulation_steps, job.data.max_validation_steps


def test_a_job_that_runs_out_of_memory_continues_once_with_a_smaller_batch(world: World) -> None:
    limits = {"oom_retry": True, "retries": 1}
    world.add("a", batch_size=6, gradient_accumulation_steps=2, max_validation_steps=5, **limits)
    world.tick()
    saved = save(world, "a-1", 2)
    run_out_of_memory(world, 1, PREPARED)
    assert (world.state(), world.launcher.started, world.job().retries_used) == (JobState.launching, ["a-1", "a-2"], 0)
    assert "ran out of memory: the next ones train with batch_size 3" in world.job().warnings[-1]
    world.tick()
    crash(world, 2)  # whatever else befalls it, the batch stays small
    world.clock.advance(60)
    world.tick()
    assert [trained(world, attempt) for attempt in (1, 2, 3)] == [(6, 2, 5), (3, 4, 10), (3, 4, 10)]
    shown = resources(world.job(), world.store.attempts("a"))["attempts"]
    assert [attempt.get("batch_size") for attempt in shown] == [None, 3, 3]
    assert shown[1]["resumed_from"] == str(saved)
    run_out_of_memory(world, 3, PREPARED)
    assert (world.state(), world.job().reason) == (JobState.failed, Reason.out_of_memory)


@pytest.mark.parametrize(
    ("changes", "events"),
    [
        ({"oom_retry": False}, [PREPARED]),
        ({"oom_retry": True, "batch_size": 1}, [PREPARED]),
        ({"oom_retry": True}, []),  # it could not even load the model
    ],
)
def test_out_of_memory_is_the_end_where_a_smaller_batch_cannot_help(
    world: World, changes: dict[str, object], events: list[object]
) -> None:
    world.add("a", retries=3, **changes)
    run_out_of_memory(world, 1, *events)
    assert (world.state(), world.job().reason, world.job().warnings) == (JobState.failed, Reason.out_of_memory, ())
    assert "Lower batch_size" in world.job().advice


@pytest.mark.parametrize(("size", "smaller"), [(2, 1), (8, 4), (9, 3), (7, 1), (15, 5)])
def test_a_smaller_batch_divides_the_larger_one(size: int, smaller: int) -> None:
    found = job_spec("a", batch_size=size, gradient_accumulation_steps=3).in_smaller_parts()
    assert found is not None
    assert (found.data.batch_size, found.data.batch_size * found.train.gradient_accumulation_steps) == (
        smaller,
        size * 3,
    )


def test_ranks_that_chose_whole_gradients_and_ran_out_of_memory_keep_parts(world: World) -> None:
    chosen = {"ranks": 2, "sharding": ShardingSpec(), "gradient_accumulation_steps": 4, "gradient_sync": "auto"}
    smaller = job_spec("a", **{**chosen, "batch_size": 2}).in_smaller_parts()
    assert smaller is not None
    assert (smaller.data.batch_size, smaller.train.gradient_accumulation_steps, smaller.train.gradient_sync) == (
        1,
        8,
        "micro_step",
    )
    alone = job_spec("a", **{**chosen, "batch_size": 1}).in_smaller_parts()
    assert alone == job_spec("a", **{**chosen, "batch_size": 1, "gradient_sync": "micro_step"})
    for other in ({"gradient_sync": "step"}, {"gradient_accumulation_steps": 1}, {"ranks": 1}):
        assert job_spec("a", **{**chosen, "batch_size": 1, **other}).in_smaller_parts() is None


def test_a_job_that_ran_out_of_memory_with_whole_gradients_reports_how_it_continues(world: World) -> None:
    changes = {"ranks": 2, "sharding": ShardingSpec(), "gradient_accumulation_steps": 4, "batch_size": 1}
    world.supervisor = Supervisor(world.store, world.launcher, ["cpu"], world.root, ports=PortRange(29500, 100))
    world.add("a", oom_retry=True, gradient_sync="auto", **changes)
    run_out_of_memory(world, 1, PREPARED)
    assert "train with gradient_sync micro_step instead of gradient_sync auto" in world.job().warnings[0]


@pytest.mark.parametrize("merged", [True, False])
def test_merged_micro_batches_that_ran_out_of_memory_are_split(world: World, merged: bool) -> None:
    prepared = PREPARED.model_copy(update={"effective": {"merged_micro_steps": 8} if merged else {}})
    sizes = {"batch_size": 1, "gradient_accumulation_steps": 8}
    world.add("a", oom_retry=True, retries=0, merge_micro_batches="always", **sizes)
    run_out_of_memory(world, 1, prepared)
    assert (world.state() is JobState.launching) == merged  # a job with a batch of 1 has nothing else to split
    if merged:
        change = "train with merge_micro_batches never instead of merge_micro_batches always"
        assert change in world.job().warnings[0]
        assert trained(world, 2) == (1, 8, None)
    larger = job_spec("a", device="auto", batch_size=4, gradient_accumulation_steps=2).in_smaller_parts()
    assert larger == job_spec(
        "a", device="auto", batch_size=2, gradient_accumulation_steps=4, gradient_sync="micro_step",
        merge_micro_batches="never",
    )  # fmt: skip


@pytest.mark.parametrize("kept", ["used", "not used: its device does not have the memory"])
def test_a_job_that_kept_outputs_of_attention_and_ran_out_of_memory_keeps_none(world: World, kept: str) -> None:
    prepared = PREPARED.model_copy(update={"effective": {"kept_attention": kept}})
    world.supervisor = Supervisor(world.store, world.launcher, ["cuda:0"], world.root, ports=PortRange(29500, 100))
    world.add("a", oom_retry=True, retries=0, batch_size=1, gradient_checkpointing=True, device="cuda")
    run_out_of_memory(world, 1, prepared)
    assert (world.state() is JobState.launching) == (kept == "used")
    if kept == "used":
        assert "train with keep_attention never instead of keep_attention auto" in world.job().warnings[0]
    chosen = {"batch_size": 1, "gradient_checkpointing": True, "gradient_sync": "micro_step", "device": "cuda"}
    assert job_spec("a", **chosen, keep_attention="always").in_smaller_parts() is None


@pytest.mark.parametrize("size", [1, 4])
def test_a_job_that_ran_out_of_memory_adds_in_a_fixed_order_within_what_any_job_takes(world: World, size: int) -> None:
    world.add("a", oom_retry=True, retries=0, batch_size=size, gradient_accumulation_steps=1)
    run_out_of_memory(world, 1, PREPARED.model_copy(update={"effective": {"accumulator_bytes": 1 << 30}}))
    assert world.state() is JobState.launching
    change = "batch_size 2" if size == 4 else "no more than 512 MiB for attention's additions in a fixed order"
    assert f"the next ones train with {change}" in world.job().warnings[0]
    assert "which repeat up to rounding; oom_retry false forbids it" in world.job().warnings[0]
    assert [world.attempt(number).has_run_out for number in (1, 2)] == [False, True]


def test_a_failure_that_a_retry_cannot_fix_is_not_retried(world: World) -> None:
    world.add("a", retries=2)
    world.tick()
    world.launcher.emit("a-1", STARTED, Failed(reason=Reason.invalid_dataset, message="row 3"))
    world.launcher.exit("a-1", 1)
    world.tick()
    assert world.state() is JobState.failed


def test_a_retry_continues_from_the_newest_whole_checkpoint(world: World) -> None:
    world.add("a", retries=1)
    world.tick()
    good, damaged = save(world, "a-1", 2), save(world, "a-1", 4)
    (damaged / "weights").unlink()
    world.retry()
    spec = world.attempt(2)
    assert spec.resume_from == good
    assert [checkpoint.path for checkpoint in world.store.checkpoints("a")] == [good]
    assert str(damaged) in world.job().warnings[-1]


def test_a_checkpoint_from_which_two_attempts_died_without_a_step_is_given_up_for_the_one_before(world: World) -> None:
    world.add("a", retries=9)
    world.tick()
    older, newer = save(world, "a-1", 2), save(world, "a-1", 4)
    for attempt in (1, 2, 3):
        world.launcher.exit(f"a-{attempt}", 1)
        world.tick()
        world.clock.advance(60)
        world.tick()
    assert [tried.resume_from for tried in world.store.attempts("a")] == [None, newer, newer, older]
    assert str(newer) in world.job().warnings[-1]


def test_an_attempt_has_older_checkpoints_to_fall_back_to_and_names_from_which_it_continued(world: World) -> None:
    world.add("a", retries=1)
    world.tick()
    oldest, older, newest = (save(world, "a-1", step) for step in (2, 4, 6))
    world.retry()
    spec = world.attempt(2)
    assert spec.resume_candidates == (newest, older, oldest)
    prepared = Prepared(
        **{"total_steps": 8, "start_step": 4, "resumed_from": older, "num_rows": 1},
        **{"trainable_parameters": 1, "total_parameters": 1},
    )
    world.launcher.emit("a-2", STARTED, CheckpointDamaged(path=newest, message="a bit has flipped"), prepared)
    world.tick()
    assert [checkpoint.path for checkpoint in world.store.checkpoints("a")] == [oldest, older]
    assert world.job().warnings[-1] == "a bit has flipped"
    attempt = world.store.attempts("a")[-1]
    assert (attempt.resume_from, attempt.start_step) == (older, 4)


@pytest.mark.parametrize(("steps", "then"), [(0, "refuse"), (3, "warn")])
def test_an_estimate_of_its_memory_does_not_refuse_a_job_that_has_trained_before(
    world: World, steps: int, then: str
) -> None:
    world.add("a", retries=1)
    world.tick()
    points = [Progress(step=n + 1, epoch=0.1, metrics={}, peak_memory_bytes=1) for n in range(steps)]
    world.launcher.emit("a-1", STARTED, PREPARED, *points)
    world.tick()
    world.retry()
    first, second = (world.attempt(number) for number in (1, 2))
    assert (first.job.preflight, second.job.preflight) == ("refuse", then)


def test_a_job_that_begins_with_another_jobs_checkpoint_falls_back_to_it(world: World) -> None:
    given = world.root / "jobs" / "a" / "resume" / "checkpoint-9"
    begin = ResumeFrom(job_uuid="b", checkpoint=given.name, path=given)
    world.add("a", retries=1, resume_from=begin)
    world.tick()
    attempt = world.store.attempts("a")[-1]
    assert (attempt.resume_from, attempt.start_step) == (given, 9)
    own = save(world, "a-1", 12)
    world.launcher.exit("a-1", -9)
    world.tick()
    world.clock.advance(60)
    given.mkdir(parents=True)
    write_manifest(given)
    world.tick()
    spec = world.attempt(2)
    assert spec.resume_candidates == (own, given)


def test_points_beyond_the_checkpoint_are_measured_again_and_count_once(world: World) -> None:
    world.add("a", retries=1)
    world.tick()
    points = [Progress(step=n, epoch=0.1, metrics={"loss": 1.0}, peak_memory_bytes=1) for n in (1, 2, 3, 4)]
    world.launcher.emit("a-1", STARTED, *points)
    save(world, "a-1", 2)
    world.retry()
    prepared = PREPARED.model_copy(update={"start_step": 2})
    again = Progress(step=3, epoch=0.1, metrics={"loss": 7.0}, peak_memory_bytes=1)
    world.launcher.emit("a-2", STARTED, prepared, again)
    world.tick()
    assert [(point.step, point.metrics["loss"]) for point in world.store.points("a")] == [(1, 1.0), (2, 1.0), (3, 7.0)]
    assert world.job().progress.step == 3


def test_old_checkpoints_leave_the_list_and_the_disk_and_the_newest_stay(world: World) -> None:
    world.add("a", keep_last=2)
    world.tick()
    paths = [save(world, "a-1", step) for step in (2, 4, 6)]
    assert [checkpoint.path for checkpoint in world.store.checkpoints("a")] == paths[1:]
    assert [path.exists() for path in paths] == [False, True, True]


def test_the_checkpoints_of_a_job_that_keeps_all_are_not_listed_for_each_new_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.add("a", save_steps=2)
    world.tick()
    save(world, "a-1", 2)
    listed = Mock()
    monkeypatch.setattr(Store, "checkpoints", listed)
    save(world, "a-1", 4)
    monkeypatch.undo()
    assert not listed.called
    assert [checkpoint.step for checkpoint in world.store.checkpoints("a")] == [2, 4]


@pytest.mark.parametrize(
    ("changes", "stay"), [({"keep_last": 1}, [2, 6]), ({"save_steps": 6}, [2, 6]), ({}, [2, 4, 6])]
)
def test_the_best_checkpoint_stays_beside_those_that_are_kept(
    world: World, changes: dict[str, Any], stay: list[int]
) -> None:
    world.add("a", best_checkpoint="eval_loss", n_epochs=2, **changes)
    world.tick()
    world.launcher.emit("a-1", STARTED, Prepared(total_steps=8, num_rows=4, trainable_parameters=1, total_parameters=1))
    for step, loss in ((1, 3.0), (2, 1.0), (4, 2.0), (6, 1.0)):
        world.launcher.emit("a-1", Evaluated(step=step, epoch=1.0, metrics={"eval_loss": loss}))
        save(world, "a-1", step)
    assert [checkpoint.step for checkpoint in world.store.checkpoints("a")] == stay
    final = CheckpointSaved(
        kind="final", step=2, epoch=1, path=world.root / "checkpoints" / "out" / "a" / "final", train_loss=1.0
    )
    world.launcher.emit("a-1", final, Finished(step=6))
    world.tick()
    kept = [checkpoint.step for checkpoint in world.store.checkpoints("a") if checkpoint.kind == "step"]
    assert kept == stay


def test_the_best_checkpoint_stays_while_a_better_one_is_being_written(world: World) -> None:
    world.add("a", best_checkpoint="eval_loss", keep_last=1)
    world.tick()
    for step, loss in ((2, 1.0), (4, 2.0)):
        world.launcher.emit("a-1", Evaluated(step=step, epoch=1.0, metrics={"eval_loss": loss}))
    save(world, "a-1", 2)
    world.launcher.emit("a-1", Evaluated(step=5, epoch=1.0, metrics={"eval_loss": 0.5}))
    save(world, "a-1", 4)  # written in the background, it is there after the evaluation of the next
    assert [checkpoint.step for checkpoint in world.store.checkpoints("a")] == [2, 4]
    save(world, "a-1", 5)
    assert [checkpoint.step for checkpoint in world.store.checkpoints("a")] == [4, 5]


def test_without_options_a_checkpoint_from_within_an_epoch_stays_until_there_is_a_newer_one(world: World) -> None:
    world.add("a", n_epochs=2)
    world.tick()
    prepared = Prepared(total_steps=8, num_rows=4, trainable_parameters=1, total_parameters=1)
    world.launcher.emit("a-1", STARTED, prepared)
    paths = [save(world, "a-1", step) for step in (2, 3, 4, 6)]
    assert [checkpoint.step for checkpoint in world.store.checkpoints("a")] == [4, 6]
    assert [path.exists() for path in paths] == [False, False, True, True]


def test_a_job_with_a_higher_priority_is_next(world: World) -> None:
    world.add("a", "b")
    world.add("c", priority=2)
    world.tick()
    assert world.launcher.started == ["c-1"]


def test_a_full_disk_keeps_a_job_from_starting(world: World) -> None:
    world.add("a", min_free_bytes=1 << 60)
    world.tick()
    assert (world.state(), world.job().reason) == (JobState.failed, Reason.disk_full)
    assert "min_free_disk_mb" in world.job().message


# Pauses


def test_a_training_that_cannot_receive_the_order_to_pause_trains_on_and_reports_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(task: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    world.run("a")
    world.store.request_pause("a")
    with monkeypatch.context() as patch:
        patch.setattr(world.launcher, "pause", full)
        for _ in range(PATIENCE + 1):
            world.tick()
    assert world.state() is JobState.pausing
    assert "No space left on device" in world.job().detail
    world.tick()
    assert world.launcher.tasks["a-1"].pauses == 1


def test_a_pause_saves_frees_the_device_and_is_no_retry(world: World) -> None:
    task = world.run("a")
    world.add("b")
    world.store.request_pause("a", "ada")
    world.tick()
    assert (world.launcher.tasks[task].pauses, world.state()) == (1, JobState.pausing)
    world.restart()
    world.tick()
    world.launcher.emit(task, Paused(step=3))
    world.launcher.exit(task, 0)
    world.tick()
    assert [world.state(name) for name in "ab"] == [JobState.paused, JobState.launching]
    detail = resources(world.job())["detail"]
    assert re.fullmatch(r"until it is resumed, requested by ada at 20\d\d-\S+ \S+ UTC", detail), (
        "who, when, how it goes on"
    )
    world.store.request_cancel("b", by="grace")
    world.tick()
    assert world.job("b").message.startswith("requested by grace at 20")
    world.store.request_resume("a")
    world.tick()
    world.tick()
    assert (world.state("a"), world.launcher.started[-1]) == (JobState.launching, "a-2")
    assert world.job().retries_used == 0


def test_a_training_that_dies_while_it_pauses_is_paused(world: World) -> None:
    task = world.run()
    world.store.request_pause("a")
    world.launcher.exit(task, -9)
    world.tick()
    assert world.state() is JobState.paused


def test_a_waiting_job_is_paused_at_once_and_a_cancel_ends_it(world: World) -> None:
    world.add("a", "b")
    world.tick()
    assert world.store.request_pause("b").state is JobState.paused
    assert world.store.request_cancel("b").state is JobState.cancelled
    with pytest.raises(JobConflict, match="cancelled"):
        world.store.request_pause("b")
    with pytest.raises(JobConflict, match="another job_uuid"):
        world.store.request_resume("b")


def test_a_job_that_is_still_pausing_cannot_be_resumed_yet(world: World) -> None:
    world.run()
    world.store.request_pause("a")
    with pytest.raises(JobConflict, match="still saving"):
        world.store.request_resume("a")


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (Ended.hung, Reason.hung),
        (Ended.timed_out, Reason.timed_out),
        (Ended.out_of_memory, Reason.out_of_memory),
        (Ended.too_many_processes, Reason.rank_failed),
    ],
)
def test_what_the_runner_ended_has_its_reason(world: World, ended: Ended, reason: Reason) -> None:
    task = world.run()
    world.launcher.exit(task, -15, ended=ended, stacks="in all_reduce")
    world.tick()
    assert (world.state(), world.job().reason) == (JobState.failed, reason)
    assert ("in all_reduce" in world.job().message) == (ended is Ended.hung)


# What no job owns


def test_a_training_that_no_job_owns_is_ended_at_the_start(world: World) -> None:
    task = world.run()
    lost = TaskSpec("lost-1", world.root / "jobs" / "lost" / "attempts" / "1", ("cpu",))
    world.launcher.start(lost)
    world.restart()
    world.tick()
    assert world.launcher.tasks["lost-1"].seen.state is TaskState.exited
    assert world.launcher.tasks[task].seen.state is TaskState.running


def test_a_damaged_record_is_left_alone_and_the_others_continue(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.run("a")
    world.add("b")
    with closing(sqlite3.connect(world.store.path)) as connection, connection:
        connection.execute("UPDATE jobs SET spec = '{}' WHERE job_uuid = 'a'")
    world.tick()
    world.tick()
    assert caplog.text.count("job 'a' gets no device") == 1
    assert world.store.names() == ["a", "b"]
    assert world.state("b") is JobState.launching  # on its device
    with pytest.raises(StoreError, match="damaged"):
        world.store.get("a")


def test_a_damaged_record_in_the_queue_does_not_keep_its_device_from_the_others(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.add("a", "b")
    with closing(sqlite3.connect(world.store.path)) as connection, connection:
        connection.execute("UPDATE jobs SET spec = 'no JSON' WHERE job_uuid = 'a'")
    with pytest.raises(StoreError, match="record of job 'a' is damaged"):
        world.tick()
    world.tick()
    assert (world.state("b"), caplog.text.count("job 'a' gets no device")) == (JobState.launching, 1)


def test_a_poll_at_which_nothing_has_changed_decides_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []

    def noted(job: Queued, *rest: Any) -> str:
        requested.append(job.job_uuid)
        return why_waits(job, *rest)

    monkeypatch.setattr("llama_stack_provider_trl.jobs.supervision.placing.why_waits", noted)
    task = world.run()
    world.add("b")
    for _ in range(5):
        world.tick()
    # Once to report it, and once more since the reported text is part of what it sees.
    assert requested == ["b", "b"]
    world.add("c", priority=1)
    world.tick()
    assert world.job("c").detail == "waiting for cpu (held by a)"
    world.finish(task)
    assert world.state("c") is JobState.launching


def test_a_job_that_could_not_be_begun_is_begun_at_the_next_poll(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add("a")
    with monkeypatch.context() as broken:
        broken.setattr(world.store, "launch", Mock(side_effect=OSError("a file system that hangs")))
        world.tick()
        assert world.state("a") is JobState.scheduled
    world.tick()
    assert world.state("a") is JobState.launching


def test_of_many_that_wait_each_names_its_holder(world: World) -> None:
    task = world.run()
    world.add("b", "c")
    world.add("d", device="mps")
    world.tick()
    assert {world.job(name).detail for name in "bc"} == {"waiting for cpu (held by a)"}
    assert "which this node does not have" in world.job("d").detail
    world.finish(task)
    assert (world.state("b"), world.job("b").detail) == (JobState.launching, "")
    assert world.job("c").detail == "waiting for cpu (held by b)"
