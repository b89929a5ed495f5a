"""Events hold numbers, texts and nestings that can be stored and shown; one that does not is set aside alone."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.reader import read_rollouts, read_samples
from llama_stack_provider_trl.jobs.store.records import NodeTaskRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.specs.event_fields import LAST_TIME
from llama_stack_provider_trl.specs.events import (
    LINE_BYTES,
    Answer,
    Failed,
    Finished,
    Progress,
    Reason,
    RolledOut,
    Sampled,
    Started,
    Warned,
    parse_event,
    read_events,
)
from llama_stack_provider_trl.stack.responses import status_response
from llama_stack_provider_trl.system.files import RunDir
from llama_stack_provider_trl_remote.service.cluster.reports import observation
from llama_stack_provider_trl_remote.service.cluster.uploads import UploadReceiver
from llama_stack_provider_trl_remote.service.views.checkpoints import Digests
from llama_stack_provider_trl_remote.service.views.events import Cursor, parsed, read_page
from tests.fakes import FakeClock, FakeLauncher, job_spec

STARTED = Started(pid=1, device="cpu", versions={})
PROGRESS = {"type": "progress", "step": 1, "epoch": 0.5, "metrics": {"loss": 2.0}, "peak_memory_bytes": 1}
PREPARED = {"type": "prepared", "total_steps": 1, "num_rows": 1, "trainable_parameters": 1, "total_parameters": 1}
ANSWER = {"text": "It is 6.", "tokens": 4, "complete": True}
SAMPLES = {"type": "samples", "kind": "checkpoint", "step": 2, "epoch": 0.5, "answers": [ANSWER]}

TURN = {"role": "user", "content": "What is 3 plus 3?"}
REWARDED = {**ANSWER, "reward": 1.0, "advantage": 0.5, "rewards": {"digits": 1.0}}
ROLLOUT = {"type": "rollout", "step": 2, "epoch": 0.5, "row": 0, "prompt": [TURN], "answers": [REWARDED]}


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: dict[str, dict[str, Any]] = {
    "a time beyond the calendar": {**PROGRESS, "time": 1e18},
    "a time that no float holds": {**PROGRESS, "time": 1e400},
    "a time before the epoch": {**PROGRESS, "time": -1.0},
    "a step beyond a database column": {**PROGRESS, "step": 10**40},
    "a negative step": {**PROGRESS, "step": -1},
    "an epoch that is no number": {**PROGRESS, "epoch": float("nan")},
    "memory beyond a database column": {**PROGRESS, "peak_memory_bytes": 2**63},
    "a thousand metrics": {**PROGRESS, "metrics": {f"m{n}": 1.0 for n in range(1000)}},
    "a deep nesting": {**PREPARED, "effective": {"a": nested(150)}},
    "a deep nesting under an unknown key": {**PROGRESS, "new": nested(150)},
    "an integer of 5000 digits": {**PREPARED, "effective": {"a": 10**4299}},
    "a path with a NUL": {"type": "checkpoint_damaged", "path": "/a\0b", "message": ""},
    "a path of 5000 characters": {"type": "checkpoint_damaged", "path": "/" + 5000 * "a", "message": ""},
    "more answers than prompts": {**SAMPLES, "answers": 17 * [ANSWER]},
    "a kind of samples that is none": {**SAMPLES, "kind": "meanwhile"},
    "an answer that is no text": {**SAMPLES, "answers": [{**ANSWER, "text": ["a"]}]},
    "an answer of more tokens than there are": {**SAMPLES, "answers": [{**ANSWER, "tokens": 10**30}]},
    "a rollout of more answers than are kept": {**ROLLOUT, "answers": 9 * [REWARDED]},
    "a rollout of more turns than are kept": {**ROLLOUT, "prompt": 9 * [TURN]},
    "a reward that is no number": {**ROLLOUT, "answers": [{**REWARDED, "reward": float("nan")}]},
    "rows beyond all rows": {"type": "tokenizing", "rows": 10**30, "total_rows": 1},
    "a rank beyond all ranks": {"type": "failed", "reason": "internal", "message": "", "rank": 10**30},
}


def line(event: dict[str, Any]) -> bytes:
    return json.dumps(event).encode() + b"\n"


@pytest.mark.parametrize("event", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_line_beyond_the_bounds_is_no_event(event: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        parse_event(line(event))
    assert len(str(error.value)) < 500


def test_a_line_of_commas_only_is_refused_before_it_becomes_objects() -> None:
    with pytest.raises(ValueError, match="values"):
        parse_event(b'{"type": "warning", "message": "", "x": [' + b"0," * 500_000 + b"0]}")
    with pytest.raises(ValueError, match="bytes"):
        parse_event(b'{"type": "warning", "message": "' + b"x" * LINE_BYTES + b'"}')


def test_long_texts_are_cut_and_not_refused() -> None:
    failed = parse_event(
        line({"type": "failed", "reason": "internal", "message": 10**6 * "m", "traceback": 10**6 * "t"})
    )
    assert isinstance(failed, Failed)
    assert (len(failed.message), len(failed.traceback)) == (16_384, 65_536)
    longest = {**SAMPLES, "answers": 16 * [{**ANSWER, "text": 100_000 * "a"}]}
    samples = parse_event(line(longest))
    assert isinstance(samples, Sampled)
    assert {len(answer.text) for answer in samples.answers} == {8192}
    widest = samples.model_copy(update={"answers": 16 * [Answer(text=8192 * "\0", tokens=1, complete=True)]})
    assert len(widest.model_dump_json()) < LINE_BYTES
    call = {"name": 256 * "\0", "arguments": 1024 * "\0"}
    turn = {"role": 256 * "\0", "content": 4096 * "\0", "reasoning": 4096 * "\0", "calls": 4 * [call]}
    rewards = {f"{number:02}{254 * chr(0)}": 1.0 for number in range(32)}
    answer = {**REWARDED, "text": 8192 * "\0", "rewards": rewards}
    rollout = RolledOut.model_validate({**ROLLOUT, "prompt": 8 * [turn], "answers": 8 * [answer]})
    assert len(rollout.model_dump_json()) < LINE_BYTES


def test_a_loss_that_is_no_number_is_still_a_metric() -> None:
    assert isinstance(
        parse_event(b'{"type":"progress","step":1,"epoch":1,"metrics":{"loss":NaN},"peak_memory_bytes":1}'), Progress
    )


class World:
    """Jobs a and b on two devices, both in progress."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store, self.launcher = Store(root / "jobs.db", FakeClock()), FakeLauncher()
        self.restart()
        for name, device in {"a": "cpu", "b": "cuda:0"}.items():
            self.store.add_job(
                job_spec(name, device=device, checkpoint_dir=root / "checkpoints" / "out" / name), "digest"
            )
        self.supervisor.tick()
        for name in "ab":
            self.launcher.emit(f"{name}-1", STARTED)
        self.supervisor.tick()

    def restart(self) -> None:
        self.supervisor = Supervisor(self.store, self.launcher, ["cpu", "cuda:0"], self.root)

    def states(self) -> list[JobState]:
        return [self.store.get(name).state for name in "ab"]

    def append(self, name: str, data: bytes) -> None:
        with RunDir(self.launcher.tasks[f"{name}-1"].spec.run_dir).events.open("ab") as events:
            events.write(data)

    def finish(self, name: str) -> None:
        self.launcher.emit(f"{name}-1", Finished(step=4))
        self.launcher.exit(f"{name}-1", 0)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    yield found
    found.store.close()


def test_a_bad_line_is_a_warning_of_its_job_and_holds_up_nothing(world: World) -> None:
    for event in HOSTILE.values():
        world.append("a", line(event))
    world.launcher.emit("a-1", Progress(step=2, epoch=0.5, metrics={"loss": 1.5}, peak_memory_bytes=1))
    world.supervisor.tick()
    assert world.store.get("a").progress.step == 2
    warnings = world.store.get("a").warnings
    assert len(warnings) == len(HOSTILE)
    assert all("events.jsonl is not an event and was left out" in warning for warning in warnings)
    assert world.store.get("b").warnings == ()
    world.restart()
    world.finish("a")
    world.finish("b")
    world.supervisor.tick()
    assert world.states() == [JobState.completed, JobState.completed]


def test_a_line_without_an_end_is_passed_over_in_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_stack_provider_trl.specs.events.LINE_BYTES", 1000)
    monkeypatch.setattr("llama_stack_provider_trl.jobs.supervision.supervisor._EVENT_BYTES", 300)
    world.append("a", b"x" * 5000 + b"\n")
    world.finish("a")
    for _ in range(3):
        world.supervisor.tick()
    assert world.store.get("a").state is JobState.completed
    assert "is longer than 1000 bytes" in world.store.get("a").warnings[0]


def test_warnings_without_end_are_not_kept_without_end(world: World) -> None:
    world.launcher.emit("a-1", *(Warned(message=f"warning {number}") for number in range(1000)))
    world.supervisor.tick()
    assert len(world.store.get("a").warnings) == 200


def test_samples_without_end_are_not_kept_without_end(world: World) -> None:
    world.launcher.emit("a-1", *(Sampled.model_validate({**SAMPLES, "step": step}) for step in range(1100)))
    world.launcher.emit("a-1", Sampled.model_validate({**SAMPLES, "step": 5, "epoch": 1.0}))
    world.launcher.emit("a-1", Sampled.model_validate({**SAMPLES, "step": 1100, "kind": "after"}))
    world.supervisor.tick()
    samples, count = read_samples(world.store, "a")
    assert (len(samples), count) == (1001, 1001)
    assert (samples[5].epoch, samples[-1].kind) == (1.0, "after")


def test_rollouts_have_their_place_beside_samples_and_the_newest_come_first(world: World) -> None:
    world.launcher.emit("a-1", Sampled.model_validate(SAMPLES))
    world.launcher.emit("a-1", *(RolledOut.model_validate({**ROLLOUT, "step": step}) for step in range(1100)))
    world.supervisor.tick()
    rollouts, count = read_rollouts(world.store, "a", 2, 1)
    assert ([one.step for one in rollouts], count) == ([998, 997], 1000)
    assert rollouts[0].answers[0].rewards == {"digits": 1.0}
    assert read_samples(world.store, "a")[1] == 1


def test_pages_of_events_leave_bad_lines_out_and_come_to_an_end(world: World) -> None:
    for event in HOSTILE.values():
        world.append("a", line(event))
    world.append("a", b"no JSON\n" * 20_000)
    world.launcher.emit("a-1", Finished(step=4))
    for _ in range(5):
        world.supervisor.tick()
    seen, cursor = [], Cursor()
    for _ in range(10):
        page = read_page(world.store, "a", cursor, 1)
        seen += [parsed(found)["type"] for found in page.lines]
        cursor = page.next
    assert seen == ["started", "finished"]


def test_a_database_that_holds_an_impossible_time_stops_nothing(world: World) -> None:
    """As one of a release that accepted such events may."""
    failed = Failed(reason=Reason.rank_failed, message="").model_dump(mode="json") | {"time": 1e18}
    with closing(sqlite3.connect(world.store.path)) as connection, connection:
        for table, columns in {
            "jobs": ("started_at", "scheduled_at"),
            "attempts": ("started_at", "prepared_at", "stepped_at", "launched_at"),
        }.items():
            for column in columns:
                connection.execute(f"UPDATE {table} SET {column} = 1e18 WHERE job_uuid = 'a'")
        connection.execute("UPDATE attempts SET failed = ? WHERE job_uuid = 'a'", (json.dumps(failed),))
        connection.execute("INSERT INTO points VALUES ('a', 1, 'train', 1, 1e300, 0.5, '{}')")
        connection.execute("INSERT INTO checkpoints VALUES ('a', '/x', 1, 'step', 1, 1, -1e300, NULL, NULL, NULL)")
    world.restart()
    world.launcher.exit("a-1", 1)
    world.finish("b")
    world.supervisor.tick()
    assert world.states() == [JobState.failed, JobState.completed]
    store = world.store
    status = status_response(store.get("a"), store.checkpoints("a"), store.attempts("a"))
    assert "9999-12-31" in status.model_dump_json()
    assert store.points("a")[0].time.year == 9999
    assert [job.job_uuid for job in store.page()] == ["a", "b"]


def test_a_time_at_the_end_of_the_calendar_is_one(world: World) -> None:
    world.launcher.emit("a-1", Progress(time=LAST_TIME, step=1, epoch=1, metrics={}, peak_memory_bytes=1))
    world.supervisor.tick()
    assert world.store.points("a")[0].time.year == 9999


def test_a_node_cannot_upload_such_an_event(tmp_path: Path) -> None:
    run_dir = tmp_path / "jobs" / "a" / "attempts" / "1"
    run_dir.mkdir(parents=True)
    with closing(Store(tmp_path / "jobs.db")) as store:
        store.add_job(job_spec("a", checkpoint_dir=tmp_path / "checkpoints" / "out"), "digest")
        store.launch("a", 1, "b/cpu", run_dir)
        store.tasks.add([NodeTaskRecord("a-1", "b", "a", 1, 0, ("b/cpu",), "run", "{}", None, None, False)])
        shipping = UploadReceiver(store, Digests())
        good = STARTED.model_dump_json().encode() + b"\n"
        for event in HOSTILE.values():
            with pytest.raises(InvalidRequest, match="expected an event"):
                shipping.add_events("a-1", "b", 0, good + line(event))
        assert read_events(RunDir(run_dir).events) == ([], 0)
        assert shipping.add_events("a-1", "b", 0, good) == len(good)


@pytest.mark.parametrize(
    "text",
    [
        {},
        {"state": "exited", "exit_code": "nine"},
        {"state": "exited", "exit_code": 10**40},
        {"state": "exited", "rank": -1},
        {"state": "exited", "rank": 10**40},
        {"state": "exited", "detail": ["a"]},
        {"state": "exited", "ended": "bored"},
        {"state": "exited", "new": 1},
    ],
)
def test_an_observation_that_could_not_be_judged_later_is_refused(text: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        observation(text)


def test_long_texts_of_an_observation_are_cut() -> None:
    assert len(observation({"state": "exited", "stacks": 10**6 * "s"}).stacks) == 65_536
