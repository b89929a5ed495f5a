"""The exporter's cursor: each point of the store is in the tracker once, whatever is killed or repeated."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.errors import StoreError
from llama_stack_provider_trl.export.follower import Follower, shown_config
from llama_stack_provider_trl.export.points import Step, name_of
from llama_stack_provider_trl.export.process import ExporterProcess, exporter_environment
from llama_stack_provider_trl.export.tracker import CopyLost, Target
from llama_stack_provider_trl.export.wandb import UploadFailed, Uploads, errors_of
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.records import ExportRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.requests.trackers import TrackerChoice, TrackerSettings
from llama_stack_provider_trl.specs.events import Evaluated, Event, Finished, Prepared, Progress, Started
from llama_stack_provider_trl.system.process import child_environment
from tests.fakes import FakeClock, job_spec

STARTED = Started(pid=1, device="cpu", versions={})


class Killed(BaseException):
    """Takes the place of SIGKILL: nothing catches it."""


class Memory:
    """A tracker that keeps what it gets, and cuts off what it got beyond the position of a repeated write."""

    at_end = False

    def __init__(self) -> None:
        self.copies: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self.ended: dict[str, JobState] = {}
        self.failure: BaseException | None = None
        self.written = 0

    def write(self, target: Target, position: dict[str, Any], steps: Iterable[Step]) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        if position and target.name not in self.copies:
            raise CopyLost("it is gone")
        copy = self.copies.setdefault(target.name, [])
        for name in list(self.copies):
            if name != target.name:
                del self.copies[name]
        del copy[position.get("size", 0) :]
        copy += [(step.step, step.values) for step in steps]
        self.written += 1
        return {"size": len(copy)}

    def finish(self, target: Target, position: dict[str, Any], state: JobState) -> None:
        self.ended[target.name] = state


class Keyed(Memory):
    """A tracker that keeps the first it gets for a step, and removes nothing from a copy: as MLflow and trackio do."""

    def write(self, target: Target, position: dict[str, Any], steps: Iterable[Step]) -> dict[str, Any]:
        copy = self.copies.get(target.name, [])
        new = [step for step in steps if step.step not in dict(copy)]
        return super().write(target, {"size": len(copy)} if copy else {}, new)


@pytest.fixture
def tracker() -> Memory:
    return Memory()


@pytest.fixture
def follower(store: Store, tracker: Memory, clock: FakeClock) -> Follower:
    return Follower(store, "tensorboard", lambda: tracker, {"MLFLOW_TRACKING_PASSWORD": "hush-hush"}, clock)


@pytest.fixture
def job(store: Store) -> str:
    store.add_job(job_spec("job-1"), "digest", trackers=[TrackerChoice("tensorboard", "project", "run")])
    begin(store, 1)
    return "job-1"


def begin(store: Store, attempt: int, start_step: int = 0) -> None:
    if attempt > 1:
        store.transition("job-1", attempt - 1, JobState.in_progress, JobState.scheduled)
    assert store.launch("job-1", attempt, "cpu", Path(f"/runs/{attempt}"))
    prepared = Prepared(
        total_steps=9, start_step=start_step, num_rows=8, trainable_parameters=1, total_parameters=1, effective={}
    )
    report(store, attempt, STARTED, prepared)


def report(store: Store, attempt: int, *events: Event) -> None:
    offset = store.outcome("job-1", attempt).offset
    assert store.apply_events("job-1", attempt, events, offset + 1)


def train(store: Store, attempt: int, steps: Sequence[int], loss: float = 0.0) -> None:
    for step in steps:
        metrics = {"loss": loss + step}
        report(store, attempt, Progress(step=step, epoch=0.0, metrics=metrics, peak_memory_bytes=1, time=step))


def complete(store: Store, attempt: int) -> None:
    report(store, attempt, Finished(step=9))
    assert store.transition("job-1", attempt, JobState.in_progress, JobState.completed)


def losses(tracker: Memory) -> list[tuple[int, float]]:
    (copy,) = tracker.copies.values()
    return [(step, values["train/loss"]) for step, values in copy]


def export(store: Store) -> ExportRecord:
    (record,) = store.exports.of_job("job-1")
    return record


def drain(follower: Follower) -> None:
    while follower.advance_all():
        pass


def test_the_newest_step_of_a_job_waits_until_nothing_can_be_added_to_it(
    store: Store, follower: Follower, tracker: Memory, job: str
) -> None:
    train(store, 1, [1, 2])
    drain(follower)
    assert losses(tracker) == [(1, 1.0)]
    assert (export(store).behind, export(store).up_to_date, export(store).finished) == (0, True, False)
    report(store, 1, Evaluated(step=2, epoch=0.0, metrics={"eval_loss": 7.0}))
    complete(store, 1)
    assert export(store).behind == 2
    drain(follower)
    (copy,) = tracker.copies.values()
    assert copy[1][1].items() >= {"train/loss": 2.0, "eval/loss": 7.0}.items()
    assert list(tracker.ended.values()) == [JobState.completed]
    assert export(store).finished
    assert store.exports.due(["tensorboard"]) == []


def test_a_resumed_attempt_supersedes_what_the_tracker_has_beyond_its_checkpoint(
    store: Store, follower: Follower, tracker: Memory, job: str
) -> None:
    train(store, 1, [1, 2, 3, 4, 5])
    drain(follower)
    begin(store, 2, start_step=2)
    train(store, 2, [3, 4, 5, 6], loss=0.5)
    drain(follower)
    assert losses(tracker) == [(1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5), (5, 5.5)]
    assert export(store).generation == 2


def test_an_attempt_that_repeats_nothing_begins_no_other_copy(
    store: Store, follower: Follower, tracker: Memory, job: str
) -> None:
    train(store, 1, [1, 2, 3])
    drain(follower)
    begin(store, 2, start_step=3)
    train(store, 2, [4, 5])
    drain(follower)
    assert losses(tracker) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert export(store).generation == 1


@pytest.mark.parametrize("kind", [Memory, Keyed])
@pytest.mark.parametrize("instant", ["intended", "accepted", "ended"])
@pytest.mark.parametrize("resumed_at", [None, 0, 2, 3])
def test_a_kill_at_any_instant_leaves_every_point_once(
    store: Store,
    job: str,
    kind: type[Memory],
    instant: str,
    resumed_at: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside the exporter the training is killed, and resumes before or behind what was being sent."""

    def die(point: str) -> None:
        if point == f"export-tensorboard-{instant}":
            raise Killed

    tracker = kind()
    follower = Follower(store, "tensorboard", lambda: tracker, {})
    train(store, 1, [1, 2])
    drain(follower)
    train(store, 1, [3, 4])
    if instant == "ended":
        complete(store, 1)
    monkeypatch.setattr(faults, "reach", die)
    with pytest.raises(Killed):
        drain(follower)
    monkeypatch.undo()
    if resumed_at is not None and instant != "ended":
        begin(store, 2, start_step=resumed_at)
        train(store, 2, range(resumed_at + 1, 6), loss=0.5)
        complete(store, 2)
    elif instant != "ended":
        complete(store, 1)
    drain(Follower(store, "tensorboard", lambda: tracker, {}))
    assert losses(tracker) == [(point.step, point.metrics["loss"]) for point in store.points("job-1")]
    assert export(store).finished


def test_a_tracker_that_lost_its_copy_gets_it_again(
    store: Store, follower: Follower, tracker: Memory, job: str
) -> None:
    train(store, 1, [1, 2, 3])
    drain(follower)
    tracker.copies.clear()
    train(store, 1, [4])
    drain(follower)
    assert [step for step, _ in losses(tracker)] == [1, 2, 3]


def test_a_tracker_that_is_down_is_tried_less_and_less_and_catches_up(
    store: Store, follower: Follower, tracker: Memory, clock: FakeClock, job: str
) -> None:
    train(store, 1, [1, 2, 3])
    tracker.failure = ConnectionError("https://me:hush-hush@tracker refused\nwith hush-hush")
    waits = []
    for _ in range(12):
        before = clock.now
        while not _tries(follower, tracker):
            clock.now += 0.5
        waits.append(clock.now - before)
    assert waits[1:5] == [1.0, 2.0, 4.0, 8.0]
    assert max(waits) == 300.0
    shown = export(store)
    assert (shown.behind, shown.up_to_date) == (2, False)
    assert shown.error == "ConnectionError: https://***@tracker refused with ***"
    tracker.failure = None
    clock.now += 300
    drain(follower)
    assert (export(store).error, export(store).behind) == ("", 0)


def _tries(follower: Follower, tracker: Memory) -> bool:
    """Whether a pass tries to send."""
    calls: list[int] = []
    write = tracker.write
    tracker.write = lambda *given: (calls.append(1), write(*given))[1]  # type: ignore[method-assign]
    follower.advance_all()
    tracker.write = write  # type: ignore[method-assign]
    return bool(calls)


def test_a_job_that_fails_to_be_exported_delays_no_other(
    store: Store, follower: Follower, tracker: Memory, job: str
) -> None:
    store.add_job(job_spec("job-2"), "other", trackers=[TrackerChoice("tensorboard", "project", "run")])
    assert store.launch("job-2", 1, "cpu", Path("/runs/2"))
    point = Progress(step=1, epoch=0.0, metrics={"loss": 1.0}, peak_memory_bytes=1)
    store.apply_events("job-2", 1, [STARTED, point, point.model_copy(update={"step": 2})], 1)
    train(store, 1, [1, 2])
    write = tracker.write

    def refuse_one(target: Target, position: dict[str, Any], steps: Iterable[Step]) -> dict[str, Any]:
        if target.job_uuid == "job-1":
            raise ValueError("a name that this tracker does not take")
        return write(target, position, steps)

    tracker.write = refuse_one  # type: ignore[method-assign]
    drain(follower)
    (other,) = store.exports.of_job("job-2")
    assert (other.step, export(store).step) == (1, -1)


def test_a_deleted_job_takes_its_exports_along(store: Store, follower: Follower, job: str) -> None:
    train(store, 1, [1])
    complete(store, 1)
    record = export(store)
    store.delete("job-1")
    assert store.exports.due(["tensorboard"]) == []
    assert not store.exports.accept(record, 1, {})


def test_an_exporter_that_lost_its_lock_changes_nothing(store: Store, follower: Follower, job: str) -> None:
    before = export(store)
    train(store, 1, [1, 2, 3])
    drain(follower)
    assert not store.exports.intend(before, 9, 1)
    assert not store.exports.accept(before, 9, {})
    assert not store.exports.restart(before, 1)
    assert export(store).step == 2


def test_what_a_training_calls_its_metrics_is_a_name_in_every_tracker() -> None:
    assert name_of("train", "rewards/accuracies") == "train/rewards/accuracies"
    assert name_of("validation", "eval_loss") == "eval/loss"
    assert name_of("train", "../../etc/\n$x") == "train/_/_/etc/__x"
    assert name_of("train", "//") == "train/_/_/_"
    assert len(name_of("train", "x" * 10_000)) == 200


def test_trackers_are_shown_no_path_of_this_machine() -> None:
    shown = shown_config(job_spec("job-1"))
    assert shown["job_uuid"] == "job-1"
    assert shown["optimizer.learning_rate"] == job_spec().train.optimizer.learning_rate
    assert not [value for value in shown.values() if isinstance(value, str) and "/" in value and value[0] == "/"]


# The process


class Spawned:
    """A process that is not one."""

    def __init__(self, argv: list[str], **more: Any) -> None:
        self.argv, self.more, self.status = argv, more, None
        self.stdin = BytesIO()

    def poll(self) -> Any:
        return self.status

    def wait(self, timeout: float | None = None) -> None:
        assert self.stdin.closed


@pytest.fixture
def spawned() -> list[Spawned]:
    return []


@pytest.fixture
def process(store: Store, tmp_path: Path, clock: FakeClock, spawned: list[Spawned]) -> ExporterProcess:
    def spawn(argv: list[str], **more: Any) -> Spawned:
        spawned.append(Spawned(argv, **more))
        return spawned[-1]

    trackers = TrackerSettings.model_validate({"tensorboard": {}})
    environ = {"PATH": "/bin", "TRL_SERVICE_TOKEN": "t"}
    return ExporterProcess(store.exports, tmp_path, trackers, environ, clock, spawn)


def tend(process: ExporterProcess, clock: FakeClock, seconds: float) -> None:
    for _ in range(int(seconds * 5)):
        process.tend()
        clock.now += 0.2


def test_an_exporter_runs_while_there_is_something_to_export(
    store: Store, process: ExporterProcess, spawned: list[Spawned], clock: FakeClock, tmp_path: Path
) -> None:
    tend(process, clock, 5)
    assert spawned == []
    store.add_job(job_spec("job-1"), "digest", trackers=[TrackerChoice("tensorboard", "project", "run")])
    tend(process, clock, 5)
    assert spawned == [], "a job that waits has no points"
    begin(store, 1)
    tend(process, clock, 5)
    (one,) = spawned
    assert json.loads(one.stdin.getvalue())["data_dir"] == str(tmp_path)
    assert one.argv == [sys.executable, "-P", "-m", "llama_stack_provider_trl.export"]
    process.stop()
    assert one.stdin.closed


def test_an_exporter_that_was_killed_is_started_again_at_once_and_one_that_cannot_run_less_and_less(
    store: Store, process: ExporterProcess, spawned: list[Spawned], clock: FakeClock, job: str
) -> None:
    tend(process, clock, 20)
    spawned[0].status = -9
    tend(process, clock, 3)
    assert len(spawned) == 2
    for _ in range(600):
        spawned[-1].status = 1
        tend(process, clock, 1)
    assert 20 < len(spawned) < 30, "twice a minute in the end"


def test_the_exporter_gets_the_credentials_of_its_trackers_and_a_training_gets_none() -> None:
    environ = {
        **{"PATH": "/bin", "HF_HOME": "/hf", "HF_TOKEN": "h", "TRL_SERVICE_TOKEN": "s", "AWS_SECRET_ACCESS_KEY": "a"},
        **{"WANDB_API_KEY": "w", "MLFLOW_TRACKING_PASSWORD": "m", "MLFLOW_TRACKING_TOKEN": "m", "TRACKIO_X": "t"},
    }
    assert child_environment(environ, {}).keys() == {"PATH", "HF_HOME", "HF_TOKEN"}
    local = TrackerSettings.model_validate({"tensorboard": {}, "wandb": {}, "trackio": {}})
    found = exporter_environment(environ, local)
    assert not set("hsawmt") & set(found.values())
    assert found.items() >= {"PATH": "/bin", "HF_HOME": "/hf", "MLFLOW_DISABLE_TELEMETRY": "true"}.items()
    mlflow = exporter_environment(environ, TrackerSettings.model_validate({"mlflow": {}}))
    assert mlflow.keys() - found.keys() == {"MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"}
    online = exporter_environment(environ, TrackerSettings.model_validate({"wandb": {"mode": "online"}}))
    assert online.keys() - found.keys() == {"WANDB_API_KEY"}


def test_an_upload_to_wandb_needs_a_key_and_its_errors_are_found_in_what_it_prints() -> None:
    with pytest.raises(UploadFailed, match="WANDB_API_KEY is not set: set it in the environment of the service"):
        Uploads(None, None, {"WANDB_BASE_URL": "http://127.0.0.1:1"})
    uploaded = "wandb: Syncing 1 run(s):\nwandb:   run-a.wandb\nwandb: [p/a] Finished syncing run-a.wandb\n"
    assert errors_of(uploaded) == []
    failed = (
        "wandb: Syncing\nwandb: ERROR Find detailed error logs at: /x\nwandb: ERROR permission denied\nError: No key\n"
    )
    assert errors_of(failed) == ["permission denied", "No key"]


def test_an_error_of_the_store_is_no_error_of_a_tracker(
    store: Store, follower: Follower, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise StoreError("the disk is full")

    train(store, 1, [1, 2])
    monkeypatch.setattr(store.exports, "intend", fail)
    monkeypatch.setattr(store.exports, "fail", fail)
    with pytest.raises(StoreError):
        follower.advance_all()
