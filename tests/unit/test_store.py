from __future__ import annotations

import shutil
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pytest

from llama_stack_provider_trl.errors import JobConflict, JobNotFound, StoreError
from llama_stack_provider_trl.jobs.decisions.states import ACTIVE, JobState
from llama_stack_provider_trl.jobs.store import database
from llama_stack_provider_trl.jobs.store.database import _queries
from llama_stack_provider_trl.jobs.store.reader import read_samples, read_warnings
from llama_stack_provider_trl.jobs.store.records import JobRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.events import (
    Answer,
    CheckpointSaved,
    Evaluated,
    Event,
    Finished,
    Prepared,
    Progress,
    Reason,
    Sampled,
    Started,
    Tokenizing,
    Warned,
)
from tests.fakes import FakeClock, job_spec

STARTED = Started(pid=1, device="cpu", versions={})


def launched(store: Store, job_uuid: str = "job-1", attempt: int = 1) -> JobRecord:
    store.add_job(job_spec(job_uuid), "digest")
    assert store.launch(job_uuid, attempt, "cpu", Path(f"/runs/{job_uuid}/{attempt}"))
    return store.get(job_uuid)


def running(store: Store) -> JobRecord:
    launched(store)
    store.apply_events("job-1", 1, [STARTED], 10)
    return store.get("job-1")


def retried(store: Store) -> JobRecord:
    """A job whose second attempt has begun."""
    running(store)
    store.transition("job-1", 1, JobState.in_progress, JobState.scheduled)
    return launched(store, attempt=2)


def step(number: int, loss: float, time: float = 0.0) -> Progress:
    return Progress(step=number, epoch=number / 10, metrics={"loss": loss}, peak_memory_bytes=100, time=time)


def saved(path: str, number: int) -> CheckpointSaved:
    return CheckpointSaved(kind="step", step=number, epoch=1, path=Path(path), train_loss=1.5)


def seconds(when: datetime | None) -> float:
    assert when is not None
    assert when.tzinfo is UTC
    return when.timestamp()


# Adding


def test_a_new_job_waits_and_keeps_its_effective_configuration(store: Store, clock: FakeClock) -> None:
    assert store.add_job(job_spec(seed=7), "digest", warnings=["epsilon means nothing in DPO"])
    job = store.get("job-1")
    assert (job.state, job.status, job.attempt, job.log_path) == (JobState.scheduled, "scheduled", 0, None)
    assert job.spec == job_spec(seed=7)
    assert seconds(job.scheduled_at) == clock.now
    assert job.warnings == ("epsilon means nothing in DPO",)


def test_what_is_read_at_once_is_of_one_moment(store: Store, tmp_path: Path) -> None:
    launched(store)
    other = Store(tmp_path / "jobs.db")
    with store.snapshot():
        before = store.get("job-1")
        events = [
            Started(pid=1, device="cpu", versions={}),
            CheckpointSaved(kind="step", step=2, epoch=1, path=tmp_path / "checkpoint-2", train_loss=1.0),
        ]
        assert other.apply_events("job-1", 1, events, 100)
        with store.snapshot():
            assert store.get("job-1").started_at is None
        assert (before.started_at, store.checkpoints("job-1")) == (None, [])
    assert store.get("job-1").started_at
    assert len(store.checkpoints("job-1")) == 1
    with pytest.raises(JobNotFound), store.snapshot():
        store.get("nobody")
    assert store.get("job-1")
    other.close()


def test_a_database_that_cannot_be_opened_is_reported_by_a_short_lived_reader_too(tmp_path: Path) -> None:
    store = Store(tmp_path / "data" / "jobs.db")
    shutil.rmtree(tmp_path / "data")

    def read() -> None:
        with store.snapshot():
            store.names()

    with ThreadPoolExecutor(1) as threads, pytest.raises(StoreError, match=r"jobs\.db: unable to open"):
        threads.submit(read).result()  # each thread has a connection of its own
    store.close()


def test_each_connection_keeps_half_a_mib_of_pages(store: Store) -> None:
    with store.database.transaction() as execute:
        connection = execute("count_states", {}).connection
        assert connection.execute("PRAGMA cache_size").fetchone()[0] == -512


def test_a_repeated_request_makes_no_second_job(store: Store) -> None:
    assert store.add_job(job_spec(), "digest", warnings=["w"])
    assert not store.add_job(job_spec(), "digest", warnings=["w"])
    assert len(store.list()) == 1
    assert store.get("job-1").warnings == ("w",)


def test_a_different_request_under_a_taken_name_is_a_conflict_and_changes_nothing(store: Store) -> None:
    store.add_job(job_spec(seed=1), "digest")
    with pytest.raises(JobConflict, match="made from a different request"):
        store.add_job(job_spec(seed=2), "other")
    assert store.get("job-1").spec.data.seed == 1


def test_a_request_can_be_looked_up_before_its_rows_are_read(store: Store) -> None:
    assert not store.holds("job-1", "digest")
    store.add_job(job_spec(), "digest")
    assert store.holds("job-1", "digest")
    with pytest.raises(JobConflict, match="made from a different request"):
        store.holds("job-1", "other")


def test_of_many_equal_requests_at_once_exactly_one_makes_the_job(store: Store) -> None:
    barrier = threading.Barrier(8)

    def add(_: int) -> bool:
        barrier.wait()
        return store.add_job(job_spec(), "digest")

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(add, range(8))) == [False] * 7 + [True]


def test_many_openers_of_a_new_file_all_succeed(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def open_and_add(number: int) -> None:
        barrier.wait()
        store = Store(tmp_path / "jobs.db")
        store.add_job(job_spec(f"job-{number}"), "digest")
        store.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(open_and_add, range(8)))
    store = Store(tmp_path / "jobs.db")
    assert len(store.list()) == 8
    store.close()


def test_jobs_are_listed_in_the_order_in_which_they_came(store: Store) -> None:
    for name in ("b", "a", "c"):
        store.add_job(job_spec(name), "digest")
    assert [job.job_uuid for job in store.list()] == ["b", "a", "c"]
    assert [(job.job_uuid, job.device) for job in store.queue()] == [("b", "cpu"), ("a", "cpu"), ("c", "cpu")]


def test_a_job_that_was_never_added_is_not_found(store: Store) -> None:
    for ask in (store.get, store.checkpoints, store.points, store.request_cancel):
        with pytest.raises(JobNotFound, match="'nope' not found"):
            ask("nope")


# Cancelling


def test_a_waiting_job_is_cancelled_at_once(store: Store, clock: FakeClock) -> None:
    store.add_job(job_spec(), "digest")
    clock.advance(5)
    job = store.request_cancel("job-1")
    assert (job.state, seconds(job.completed_at)) == (JobState.cancelled, clock.now)
    assert store.queue() == []


def test_cancelling_twice_is_as_good_as_once(store: Store) -> None:
    running(store)
    assert store.request_cancel("job-1") == store.request_cancel("job-1")
    store.transition("job-1", 1, JobState.cancelling, JobState.cancelled)
    assert store.request_cancel("job-1").state is JobState.cancelled


@pytest.mark.parametrize("end", [JobState.completed, JobState.failed])
def test_a_job_that_is_over_cannot_be_cancelled(store: Store, end: JobState) -> None:
    running(store)
    store.transition("job-1", 1, JobState.in_progress, end)
    with pytest.raises(JobConflict, match=f"is {end} already"):
        store.request_cancel("job-1")


# Moving on


def test_a_move_from_a_state_that_the_job_has_left_does_not_apply(store: Store) -> None:
    running(store)
    assert not store.transition("job-1", 1, JobState.launching, JobState.failed, Reason.launch_failed, "late")
    assert store.get("job-1").state is JobState.in_progress


def test_a_move_of_an_earlier_attempt_does_not_apply(store: Store) -> None:
    retried(store)
    assert not store.transition("job-1", 1, JobState.launching, JobState.failed)
    assert store.get("job-1").state is JobState.launching


def test_a_move_that_the_table_does_not_know_is_a_bug(store: Store) -> None:
    running(store)
    with pytest.raises(AssertionError, match="completed -> in_progress"):
        store.transition("job-1", 1, JobState.completed, JobState.in_progress)


def test_a_job_is_launched_once_per_attempt(store: Store) -> None:
    job = launched(store)
    assert (job.state, job.attempt, job.device) == (JobState.launching, 1, "cpu")
    assert job.log_path == Path("/runs/job-1/1/rank-0.log")
    assert not store.launch("job-1", 1, "cpu", Path("/elsewhere"))
    assert not store.launch("job-1", 2, "cpu", Path("/elsewhere"))


def test_the_states_that_the_loop_polls_are_those_that_may_have_processes(store: Store) -> None:
    sql = _queries()["select_active"]
    assert {state for state in JobState if f"'{state}'" in sql} == ACTIVE


def test_the_reason_for_waiting_is_cleared_once_a_job_starts(store: Store) -> None:
    launched(store)
    store.set_detail("job-1", JobState.launching, "waiting for device cpu")
    store.set_detail("job-1", JobState.scheduled, "a poll that came late")
    assert store.get("job-1").detail == "waiting for device cpu"
    store.apply_events("job-1", 1, [STARTED], 10)
    assert store.get("job-1").detail == ""


# Events


def test_the_first_heartbeat_puts_a_job_in_progress(store: Store) -> None:
    launched(store)
    assert store.apply_events("job-1", 1, [Started(pid=1, device="cpu", versions={}, time=50.0)], 10)
    job = store.get("job-1")
    assert (job.state, seconds(job.started_at)) == (JobState.in_progress, 50.0)


def test_a_heartbeat_does_not_bring_back_a_job_that_is_being_cancelled(store: Store) -> None:
    launched(store)
    store.request_cancel("job-1")
    store.apply_events("job-1", 1, [STARTED], 10)
    assert store.get("job-1").state is JobState.cancelling


def test_tokenized_rows_are_in_the_progress_of_their_attempt(store: Store) -> None:
    running(store)
    store.apply_events("job-1", 1, [Tokenizing(rows=3, total_rows=8), Tokenizing(rows=6, total_rows=8)], 20)
    progress = store.get("job-1").progress
    assert (progress.tokenized_rows, progress.total_rows, progress.step, progress.eta_seconds) == (6, 8, 0, None)
    store.transition("job-1", 1, JobState.in_progress, JobState.scheduled)
    store.launch("job-1", 2, "cpu", Path("/runs/job-1/2"))
    assert store.get("job-1").progress.tokenized_rows is None


def test_progress_and_the_time_that_is_left_follow_the_events(store: Store) -> None:
    running(store)
    ready = Prepared(total_steps=40, num_rows=8, trainable_parameters=2, total_parameters=3, time=100.0)
    point = step(10, 2.5, time=120.0)
    point.metrics["tokens_per_second"] = 300.0
    store.apply_events("job-1", 1, [ready, point], 20)
    job = store.get("job-1")
    progress = job.progress
    assert (progress.step, progress.total_steps, progress.percent, progress.loss) == (10, 40, 25.0, 2.5)
    assert (progress.tokens_per_second, progress.peak_memory_bytes, progress.epoch) == (300.0, 100, 1.0)
    assert progress.eta_seconds == pytest.approx(60.0)  # 2 s per step, 30 to go
    assert job.effective is not None
    assert job.effective["num_rows"] == 8


def test_a_job_that_ended_early_is_done_to_the_last_of_its_steps(store: Store) -> None:
    running(store)
    ready = Prepared(total_steps=40, num_rows=8, trainable_parameters=2, total_parameters=3, time=100.0)
    store.apply_events("job-1", 1, [ready, step(10, 2.5, time=120.0), Finished(step=10)], 20)
    progress = store.get("job-1").progress
    assert (progress.step, progress.total_steps, progress.percent, progress.eta_seconds) == (10, 10, 100.0, 0.0)


def test_a_job_whose_only_step_is_its_end_is_done_then(store: Store) -> None:
    """A merge, or an evaluation without checks, whose status had 0 % when it was completed."""
    running(store)
    ready = Prepared(total_steps=1, num_rows=8, trainable_parameters=0, total_parameters=3, time=100.0)
    store.apply_events("job-1", 1, [ready], 20)
    assert store.get("job-1").progress.percent == 0.0
    store.apply_events("job-1", 1, [Finished(step=1)], 30)
    progress = store.get("job-1").progress
    assert (progress.step, progress.total_steps, progress.percent) == (1, 1, 100.0)
    assert store.attempts("job-1")[-1].step == 1


def test_a_job_that_has_not_begun_promises_no_time(store: Store) -> None:
    progress = running(store).progress
    assert (progress.eta_seconds, progress.percent) == (None, None)


def test_a_last_point_without_a_loss_does_not_hide_the_last_loss(store: Store) -> None:
    running(store)
    summary = Progress(step=2, epoch=1.0, metrics={"train_runtime": 3.0}, peak_memory_bytes=100)
    store.apply_events("job-1", 1, [step(1, 2.0), summary], 20)
    assert store.get("job-1").progress.loss == 2.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"metrics": {"loss": float("nan")}},
        {"metrics": {"loss": float("inf")}},
        {"metrics": {"grad_norm": 1.0}, "not_finite": ("loss",)},
    ],
)
def test_a_loss_that_is_no_number_replaces_the_last_one_in_the_status_and_in_lists(
    store: Store, wrong: dict[str, Any]
) -> None:
    running(store)
    nan = Progress(step=2, epoch=1.0, peak_memory_bytes=100, **wrong)
    store.apply_events("job-1", 1, [step(1, 2.0), nan], 20)
    progress, ((listed,), _) = store.get("job-1").progress, store.queue_page()
    assert (progress.step, progress.loss, progress.epoch) == (2, None, 1.0)
    assert listed.progress.loss is None
    store.apply_events("job-1", 1, [step(3, 1.0)], 40)
    assert store.get("job-1").progress.loss == 1.0


def test_keys_of_an_event_that_are_unknown_do_not_become_progress(store: Store) -> None:
    running(store)
    odd = Progress.model_validate({**step(1, 2.0).model_dump(), "loss": "none", "eta_seconds": "soon"})
    store.apply_events("job-1", 1, [odd], 20)
    assert (store.get("job-1").progress.loss, store.get("job-1").progress.eta_seconds) == (2.0, None)


def test_an_attempt_that_resumes_has_the_steps_of_its_checkpoint_and_no_values_yet(store: Store) -> None:
    running(store)
    store.apply_events("job-1", 1, [step(4, 2.0)], 20)
    assert store.retry(store.get("job-1"), Reason.rank_failed, "lost", 0.0)
    assert store.launch("job-1", 2, "cpu", Path("/run/2"), (Path("/c/3"), 3))
    progress = store.get("job-1").progress
    assert (progress.step, progress.loss, progress.epoch) == (3, None, None)


def test_events_that_come_twice_count_once(store: Store) -> None:
    running(store)
    events: list[Event] = [step(1, 2.0), saved("/c/1", 1), Warned(message="2 rows were cut")]
    assert store.apply_events("job-1", 1, events, 20)
    assert not store.apply_events("job-1", 1, events, 20)
    assert len(store.points("job-1")) == len(store.checkpoints("job-1")) == 1
    assert store.get("job-1").warnings == ("2 rows were cut",)


def test_a_warning_has_the_step_of_the_training_at_which_it_was_first_reported(store: Store) -> None:
    store.add_job(job_spec(), "digest", ["at the submission"])
    launched(store)
    early = Warned(message="2 rows were cut")
    prepared = Prepared(total_steps=9, num_rows=1, trainable_parameters=1, total_parameters=1)
    late = [Warned(message="little memory is free"), step(3, 2.0), early, Warned(message="it stops early")]
    store.apply_events("job-1", 1, [STARTED, early, prepared, step(2, 2.0), *late], 20)
    assert store.get("job-1").warnings == (
        *("at the submission", "2 rows were cut", "little memory is free", "it stops early"),
    )
    assert read_warnings(store, "job-1") == [(2, "little memory is free"), (3, "it stops early")]


def test_events_of_an_earlier_attempt_are_refused(store: Store) -> None:
    retried(store)
    assert not store.apply_events("job-1", 1, [step(9, 0.1), saved("/c/9", 9), Finished(step=9)], 99)
    assert store.points("job-1") == []
    assert store.checkpoints("job-1") == []
    assert not store.outcome("job-1", 1).finished


def test_a_later_attempt_replaces_the_points_that_it_reaches_again(store: Store) -> None:
    running(store)
    store.apply_events("job-1", 1, [step(1, 5.0), step(2, 4.0)], 20)
    store.transition("job-1", 1, JobState.in_progress, JobState.scheduled)
    store.launch("job-1", 2, "cpu", Path("/runs/2"))
    store.apply_events("job-1", 2, [step(2, 3.0)], 10)
    assert [(point.step, point.metrics["loss"]) for point in store.points("job-1")] == [(1, 5.0), (2, 3.0)]


def test_training_and_validation_points_of_one_step_stand_side_by_side(store: Store) -> None:
    running(store)
    evaluated = Evaluated(step=3, epoch=1.0, metrics={"eval_loss": 1.0})
    store.apply_events("job-1", 1, [step(3, 2.0), evaluated, step(4, 1.0)], 20)
    assert [(point.step, point.kind) for point in store.points("job-1")] == [
        (3, "train"),
        (3, "validation"),
        (4, "train"),
    ]
    assert [point.step for point in store.points("job-1", after=3)] == [4]


def answered(number: int, text: str, kind: Literal["before", "checkpoint", "after"] = "checkpoint") -> Sampled:
    return Sampled(kind=kind, step=number, epoch=0.5, answers=[Answer(text=text, tokens=2, complete=True)])


def test_samples_of_a_step_count_once_and_the_last_attempt_to_reach_it_counts(store: Store) -> None:
    running(store)
    events = [
        answered(0, "a", "before"),
        answered(2, "b"),
        answered(2, "c"),
        answered(4, "d"),
        answered(5, "e", "after"),
    ]
    store.apply_events("job-1", 1, events, 20)
    assert not store.apply_events("job-1", 1, [answered(9, "again")], 20)
    assert texts(store) == [("before", 0, "a"), ("checkpoint", 2, "c"), ("checkpoint", 4, "d"), ("after", 5, "e")]
    store.transition("job-1", 1, JobState.in_progress, JobState.scheduled)
    store.launch("job-1", 2, "cpu", Path("/runs/2"))
    prepared = Prepared(total_steps=5, start_step=2, num_rows=1, trainable_parameters=1, total_parameters=1)
    store.apply_events("job-1", 2, [prepared], 10)
    assert texts(store) == [("before", 0, "a"), ("checkpoint", 2, "c")]
    store.apply_events("job-1", 2, [answered(4, "f"), answered(4, "g", "after")], 20)
    assert texts(store)[2:] == [("checkpoint", 4, "f"), ("after", 4, "g")]
    assert ([one.step for one in read_samples(store, "job-1", 2, 1)[0]], read_samples(store, "job-1", 2, 1)[1]) == (
        [2, 4],
        4,
    )
    store.transition("job-1", 2, JobState.launching, JobState.failed, Reason.internal)
    store.delete("job-1")
    assert read_samples(store, "job-1") == ([], 0)


def texts(store: Store) -> list[tuple[str, int, str]]:
    return [(one.kind, one.step, one.answers[0].text) for one in read_samples(store, "job-1")[0]]


def test_a_batch_of_events_with_a_bad_one_leaves_no_trace(store: Store) -> None:
    running(store)
    broken = step(2, 1.0)
    broken.step = None  # type: ignore[assignment]
    with pytest.raises(sqlite3.IntegrityError):
        store.apply_events("job-1", 1, [step(1, 2.0), broken], 20)
    assert store.points("job-1") == []
    assert store.outcome("job-1", 1).offset == 10


def test_checkpoints_are_listed_with_what_was_measured(store: Store) -> None:
    running(store)
    final = CheckpointSaved(
        kind="final", step=4, epoch=2, path=Path("/c/final"), train_loss=None, validation_loss=1.0, perplexity=2.7
    )
    store.apply_events("job-1", 1, [saved("/c/2", 2), final], 30)
    first, last = store.checkpoints("job-1")
    assert (first.kind, first.path, first.train_loss, first.perplexity) == ("step", Path("/c/2"), 1.5, None)
    assert (last.kind, last.epoch, last.validation_loss, last.perplexity) == ("final", 2, 1.0, 2.7)


# The file


def test_a_database_of_another_build_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "jobs.db")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match=r"schema version 99.*another build wrote it"):
        Store(tmp_path / "jobs.db")


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "jobs.db").write_text("this is not a database, and it is long enough to be recognised" * 20)
    with pytest.raises(StoreError, match=r"jobs\.db: file is not a database"):
        Store(tmp_path / "jobs.db")


def test_a_slow_reader_does_not_hold_up_a_writer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_stack_provider_trl.jobs.store.database._BUSY_SECONDS", 0.0)
    reader = sqlite3.connect(store.path, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM jobs").fetchone() == (0,)
    assert store.add_job(job_spec(), "digest")
    reader.close()


@pytest.mark.parametrize("theirs", ["/out/a", "/out/a/deeper", "/out"])
def test_two_jobs_never_have_checkpoint_directories_in_each_other(store: Store, theirs: str) -> None:
    store.add_job(job_spec("a", checkpoint_dir=Path("/out/a")), "digest")
    store.add_job(job_spec("ab", checkpoint_dir=Path("/out/ab")), "digest")
    with pytest.raises(JobConflict, match="conflicts with job 'a"):
        store.add_job(job_spec("b", checkpoint_dir=Path(theirs)), "digest")


def test_checkpoint_directories_beside_each_other_are_free(store: Store) -> None:
    """Also where one name begins like the other, or sorts between a directory and what lies below it."""
    for number, name in enumerate(("a", "a b", "a-2", "a.x", "a0", "ab", "A")):
        assert store.add_job(job_spec(f"job-{number}", checkpoint_dir=Path("/out") / name), "digest")


class _Upgrade:
    """A made-up upgrade: version 1 lacks a column of the table jobs and one of its indexes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = database._sql
        self.schema = original("schema.sql").replace("user_version = 1;", "user_version = 2;")
        self.script = """
            BEGIN IMMEDIATE;
            ALTER TABLE jobs ADD COLUMN colour TEXT NOT NULL DEFAULT 'red';
            PRAGMA user_version = 2;
            COMMIT;
        """
        later = {"schema.sql": lambda: self.schema, "upgrade-1.sql": lambda: self.script}
        monkeypatch.setattr(database, "SCHEMA_VERSION", 2)
        monkeypatch.setattr(database, "_sql", lambda name: later[name]() if name in later else original(name))


def test_a_database_of_an_earlier_schema_is_upgraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "jobs.db"
    store = Store(path)
    store.add_job(job_spec("a", device="cuda", priority=5, ranks=2), "digest")
    store.add_job(job_spec("b"), "digest")
    queue, before = store.queue(), columns(path)
    store.close()
    with closing(sqlite3.connect(path)) as old, old:
        old.execute("DROP INDEX jobs_by_state")  # made again by the schema
    _Upgrade(monkeypatch)
    upgraded = Store(path)
    assert upgraded.queue() == queue
    assert {found[:3] for found in columns(path) ^ before} == {
        ("table", "jobs", "colour"),
        ("view", "job_records", "colour"),
    }
    with closing(sqlite3.connect(path)) as new:
        assert new.execute("SELECT DISTINCT colour FROM jobs").fetchall() == [("red",)]
        assert new.execute("SELECT 1 FROM sqlite_schema WHERE name = 'jobs_by_state'").fetchall() == [(1,)]
        assert new.execute("PRAGMA user_version").fetchall() == [(2,)]
    upgraded.close()
    monkeypatch.undo()
    with pytest.raises(StoreError, match="schema version 2, this program knows 1: another build wrote it, most likely"):
        Store(path)


def test_a_database_of_the_same_version_gets_the_tables_that_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    store = Store(path)
    store.add_job(job_spec("a"), "digest")
    store.close()
    whole = columns(path)
    with closing(sqlite3.connect(path)) as old, old:
        old.executescript(
            "DROP TRIGGER webhook_due; DROP TABLE webhooks; DROP TABLE webhook_deliveries; DROP TABLE webhook_rests;"
        )
    store = Store(path)
    assert store.get("a").job_uuid == "a"
    assert store.webhooks.waiting() == 0
    assert columns(path) == whole
    store.close()


@pytest.mark.parametrize("broken", ["schema", "script"])
def test_an_upgrade_that_breaks_off_leaves_the_database_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    path = tmp_path / "jobs.sqlite3"
    store = Store(path)
    store.add_job(job_spec("a"), "digest")
    store.close()
    before = columns(path)
    upgrade = _Upgrade(monkeypatch)
    setattr(
        upgrade, broken, getattr(upgrade, broken).replace("PRAGMA user_version", "SELECT oops; PRAGMA user_version")
    )
    with pytest.raises(StoreError, match="oops"):
        Store(path)
    assert columns(path) == before
    monkeypatch.undo()
    store = Store(path)
    assert store.get("a").created_by == ""
    store.close()


def columns(path: Path) -> set[tuple[str, ...]]:
    """Every table and view with its columns, their types and defaults; every index."""
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute(
            'SELECT m.type, m.name, c.name, c.type, c."notnull", c.dflt_value '
            "FROM sqlite_schema AS m LEFT JOIN pragma_table_info(m.name) AS c"
        )
        return set(found)


# Many jobs


def test_a_page_shows_what_a_list_needs_damaged_records_included(store: Store, clock: FakeClock) -> None:
    running(store)
    prepared = Prepared(total_steps=8, num_rows=4, trainable_parameters=1, total_parameters=1)
    store.apply_events("job-1", 1, [prepared, step(2, 1.5)], 20)
    store.add_job(job_spec("job-2", priority=1, algorithm="dpo"), "digest")
    store.add_job(job_spec("job-3"), "digest")
    with closing(sqlite3.connect(store.path)) as connection, connection:
        connection.execute("UPDATE jobs SET spec = 'no JSON' WHERE job_uuid = 'job-3'")
    first, second, third = store.page()
    assert (first.job_uuid, first.state, first.algorithm, first.model) == (
        *("job-1", JobState.in_progress),
        *("sft", "/models/tiny"),
    )
    assert (first.progress.step, first.progress.percent, seconds(first.scheduled_at)) == (2, 25.0, clock.now)
    assert (second.algorithm, second.priority, second.progress.step, second.started_at) == ("dpo", 1, 0, None)
    assert (third.job_uuid, third.state, third.algorithm) == ("job-3", JobState.scheduled, None)
    assert store.page(after="job-1", states=[JobState.scheduled], limit=1) == [second]


def test_a_pass_asks_for_each_kind_of_waiting_job_once(store: Store) -> None:
    for number in range(6):
        store.add_job(job_spec(f"job-{number}", device=("cpu", "cuda")[number % 2]), "digest")
    kinds = store.kinds_waiting()
    assert sorted((kind.job_uuid, kind.device) for kind in kinds) == [("job-0", "cpu"), ("job-1", "cuda")]
    store.set_waiting_details([(kinds[0], "waiting for device cpu")])
    assert [job.detail for job in store.queue()] == ["waiting for device cpu", ""] * 3


def test_a_job_that_waits_for_its_next_try_is_no_kind_of_its_own(store: Store, clock: FakeClock) -> None:
    assert store.retry(running(store), Reason.rank_failed, "gone", wait=60)
    assert store.kinds_waiting() == []
    clock.advance(61)
    assert [kind.job_uuid for kind in store.kinds_waiting()] == ["job-1"]


@pytest.mark.parametrize(
    "name",
    [
        *("select_active", "select_places", "select_queue", "select_kinds_waiting", "select_neighbour"),
        *("select_newest", "select_named_alike", "select_first_trained_from"),
    ],
)
def test_a_frequent_query_never_scans_every_job(store: Store, name: str) -> None:
    values = {"now": 0.0, "ours": "/out/a", "here_or_above": "[]"}
    values |= {"after": None, "prefix": "ftjob-", "model": "a", "limit": 20}
    plan = store.database._connection().execute(f"EXPLAIN QUERY PLAN {_queries()[name]}", values)
    assert not [row["detail"] for row in plan if row["detail"].startswith("SCAN jobs")]


def test_a_deleted_job_gives_its_name_free_only_when_its_files_are_out_of_the_way(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_stack_provider_trl.jobs.store.database._BUSY_SECONDS", 0.0)
    other = Store(store.path)
    store.add_job(job_spec(), "digest")
    store.transition(job_spec().job_uuid, 0, JobState.scheduled, JobState.cancelled)

    def move_away(job: JobRecord) -> None:
        assert job.state is JobState.cancelled
        with pytest.raises(StoreError, match="locked"):
            other.add_job(job_spec(), "another")
        raise PermissionError("it cannot be moved")

    with pytest.raises(StoreError, match="it cannot be moved"):
        store.delete(job_spec().job_uuid, move_away)
    assert store.names() == [job_spec().job_uuid]
    other.close()


def test_a_connection_in_use_is_closed_when_its_use_has_ended(store: Store) -> None:
    for name in ("one", "two"):
        store.add_job(job_spec(name), "digest")
    connection = store.database._connection()
    rows = store.database.scan("select_names", {})
    assert next(rows)["job_uuid"] == "one"
    store.database.close()
    assert [row["job_uuid"] for row in rows] == ["two"]
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")
    assert store.get("one").job_uuid == "one"


def test_a_thread_that_ends_has_closed_its_connection(store: Store) -> None:
    used: list[sqlite3.Connection] = []
    thread = threading.Thread(target=lambda: used.append(store.database._connection()))
    thread.start()
    thread.join()
    with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
        used[0].execute("SELECT 1")
    assert store.names() == []  # that of this thread is open
