"""The local launcher and its runner with real processes: scripted trainers stand in for the Python that trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.launch import local
from llama_stack_provider_trl.launch.base import Ended, Observation, TaskSpec, TaskState
from llama_stack_provider_trl.launch.isolation import NO_ISOLATION, Isolation
from llama_stack_provider_trl.launch.local import LocalLauncher
from llama_stack_provider_trl.launch.runner import RunnerStatus
from llama_stack_provider_trl.launch.torchrun import task_marks
from llama_stack_provider_trl.system import process
from llama_stack_provider_trl.system.files import RunDir
from llama_stack_provider_trl.system.process import ProcessId, alive, marked
from tests.fakes import SHEBANG, job_spec
from tests.isolated import isolation
from tests.process.waiting import reaches, until
from tests.required import in_full, lacking

pytestmark = pytest.mark.process

REPOSITORY = Path(__file__).parents[2]

PRELUDE = f"""{SHEBANG}
import json, os, pathlib, signal, subprocess, sys, time
run_dir = pathlib.Path(sys.argv[-1]).parent

def emit(**event):
    with open(run_dir / "events.jsonl", "a") as file:
        file.write(json.dumps({{"time": time.time(), **event}}) + "\\n")

def note(text):
    with open(run_dir / "notes", "a") as file:
        file.write(text + "\\n")

def stubborn_grandchild():
    # A session of its own, its parent gone, deaf to SIGTERM: as far from the trainer as a process can get.
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, lambda *_: note("deaf"))
            note("grandchild")
            time.sleep(600)
        os._exit(0)
    os.wait()
    while "grandchild" not in (run_dir / "notes").read_text() if (run_dir / "notes").exists() else True:
        time.sleep(0.02)

STARTED = dict(type="started", pid=os.getpid(), device="cpu", versions={{}})
FINISHED = dict(type="finished", step=1)
"""


class Stage:
    """A directory for tasks of scripted trainers; nothing of them is left when the test is over."""

    def __init__(self, root: Path, isolation: Isolation) -> None:
        self.root, self.isolation = root, isolation
        self.launcher = LocalLauncher(isolation=isolation)
        self.keepers = 2 if isolation.how else 1
        """Processes of a task beside its trainer: the runner, and the init of the namespace."""
        self.tasks: list[TaskSpec] = []

    def trainer(self, body: str) -> str:
        """A program that is called like an interpreter, `trainer -m module spec.json`, and does `body` instead."""
        path = self.root / f"trainer-{len(list(self.root.glob('trainer-*')))}"
        path.write_text(PRELUDE + body)
        path.chmod(0o755)
        return str(path)

    def task(self, body: str, task_id: str = "job-1-1", devices: tuple[str, ...] = ("cpu",)) -> TaskSpec:
        run_dir = self.root / f"run-{len(self.tasks)}"
        run_dir.mkdir()
        self.tasks.append(TaskSpec(task_id, run_dir, devices, python=self.trainer(body)))
        return self.tasks[-1]

    def start(self, body: str, **task: object) -> TaskSpec:
        started = self.task(body, **task)  # type: ignore[arg-type]
        self.launcher.start(started)
        return started

    def reaches(self, task: TaskSpec, state: TaskState, seconds: float = 10.0) -> Observation:
        return reaches(self.launcher, task, state, seconds)


IN_BOTH = pytest.mark.parametrize("stage", ["plain", "isolated"], indirect=True)
"""What depends on the namespace of a task in CI, too: how its processes end."""


@pytest.fixture(params=["plain", *in_full("isolated")])
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Stage]:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("TRL_LOCK_DIR", str(tmp_path / "locks"))
    yield Stage(tmp_path, isolation(tmp_path) if request.param == "isolated" else NO_ISOLATION)
    # No other test has this lock directory; we have it only since we started, which the kernel does not know.
    process.terminate(lambda: marked({"TRL_LOCK_DIR": str(tmp_path / "locks")}), grace=0)


def notes(task: TaskSpec) -> list[str]:
    path = task.run_dir / "notes"
    return path.read_text().splitlines() if path.exists() else []


def runner_of(task: TaskSpec) -> ProcessId:
    status = RunnerStatus.read(RunDir(task.run_dir).runner_status)
    assert status is not None
    assert status.runner is not None
    return status.runner


# What a trainer is given


@IN_BOTH
def test_a_trainer_gets_its_spec_a_log_file_and_no_secrets(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_SERVICE_TOKEN", "secret")
    task = stage.start(
        """
seen = dict(argv=sys.argv[1:], env=dict(os.environ), nice=os.nice(0), cwd=os.getcwd(), stdin=sys.stdin.read(),
            leader=os.getsid(0) == os.getpid())
note(json.dumps(seen))
print("to stdout", flush=True)
print("to stderr", file=sys.stderr)
"""
    )
    assert stage.reaches(task, TaskState.exited).exit_code == 0
    seen = json.loads(notes(task)[0])
    assert seen["argv"] == ["-m", "llama_stack_provider_trl.recipes.train", str(task.run_dir / "spec.json")]
    assert (seen["nice"] - os.nice(0), seen["cwd"], seen["stdin"], seen["leader"]) == (10, str(task.run_dir), "", True)
    assert seen["env"]["TRL_TASK_ID"] == "job-1-1"
    assert "TRL_SERVICE_TOKEN" not in seen["env"]
    assert RunDir(task.run_dir).log.read_text() == "to stdout\nto stderr\n"


def test_a_trainer_may_print_far_more_than_a_pipe_holds(stage: Stage) -> None:
    task = stage.start("print('x' * 1_000_000)")
    assert stage.reaches(task, TaskState.exited).exit_code == 0
    assert RunDir(task.run_dir).log.stat().st_size == 1_000_001


def test_an_interpreter_that_does_not_exist_is_named(stage: Stage) -> None:
    task = TaskSpec("job-1-1", stage.task("").run_dir, ("cpu",), python="/opt/none/bin/python")
    stage.launcher.start(task)
    seen = stage.reaches(task, TaskState.exited)
    assert seen.launch_error == "cannot start /opt/none/bin/python: No such file or directory"


def test_a_runner_that_cannot_start_is_an_error_of_start(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_stack_provider_trl.launch.local.RUNNER", "no_such_module")
    with pytest.raises(OSError, match=r"runner exited with 1: .*No module named no_such_module"):
        stage.start("")


# Ends


@IN_BOTH
def test_a_cancel_ends_every_process_even_one_that_ignores_sigterm(stage: Stage) -> None:
    task = stage.start("stubborn_grandchild(); note('ready'); time.sleep(600)")
    until(lambda: "ready" in notes(task))
    assert len(marked(task_marks(task))) == stage.keepers + 2  # trainer, grandchild
    stage.launcher.cancel(task)
    assert stage.reaches(task, TaskState.exited).exit_code == -signal.SIGTERM
    until(lambda: not marked(task_marks(task)))
    assert "deaf" in notes(task), "it was not asked to end before it was killed"


def test_a_cancel_of_a_trainer_that_listens_does_not_wait_for_the_grace_to_pass(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "RUNNER", "tests.process.patient_runner")
    monkeypatch.setattr(local, "_RUNNER_TIME", 1000.0)
    task = stage.start("note('ready'); time.sleep(600)")
    until(lambda: "ready" in notes(task))
    stage.launcher.cancel(task)
    assert stage.reaches(task, TaskState.exited, 60).exit_code == -signal.SIGTERM


@IN_BOTH
def test_kill_9_of_the_runner_leaves_nothing_alive(stage: Stage) -> None:
    task = stage.start("stubborn_grandchild(); note('ready'); time.sleep(600)")
    until(lambda: "ready" in notes(task))
    stage.reaches(task, TaskState.running)
    os.kill(runner_of(task).pid, signal.SIGKILL)
    seen = stage.reaches(task, TaskState.exited)
    assert (seen.exit_code, marked(task_marks(task))) == (None, [])
    assert "runner was killed" in seen.detail


@IN_BOTH
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the next poll ends it")
def test_kill_9_of_the_runner_ends_the_trainer_without_a_supervisor(stage: Stage) -> None:
    task = stage.start("note('ready'); time.sleep(600)")
    until(lambda: "ready" in notes(task))
    os.kill(runner_of(task).pid, signal.SIGKILL)
    until(lambda: not marked(task_marks(task)))


def test_a_task_of_the_same_name_in_another_place_is_left_alone(stage: Stage) -> None:
    mine = stage.start("note('ready'); time.sleep(600)", devices=("cuda:0",))
    other = stage.start("note('ready'); time.sleep(600)", devices=("cuda:1",))
    until(lambda: notes(mine) and notes(other))
    os.kill(runner_of(mine).pid, signal.SIGKILL)
    stage.reaches(mine, TaskState.exited)
    assert stage.launcher.poll(other).state is TaskState.running
    assert alive(runner_of(other))


def test_kill_9_of_the_trainer_is_seen_as_such(stage: Stage) -> None:
    task = stage.start("os.kill(os.getpid(), signal.SIGKILL)")
    assert stage.reaches(task, TaskState.exited).exit_code == -signal.SIGKILL


@IN_BOTH
def test_what_a_trainer_leaves_behind_is_ended_with_it(stage: Stage) -> None:
    task = stage.start("stubborn_grandchild(); sys.exit(5)")
    assert stage.reaches(task, TaskState.exited).exit_code == 5
    until(lambda: not marked(task_marks(task)))


@pytest.mark.parametrize("event", ["FINISHED", "dict(type='failed', reason='internal', message='x')"])
def test_a_trainer_that_does_not_exit_after_its_final_event_is_ended(stage: Stage, event: str) -> None:
    stage.launcher = LocalLauncher(exit_deadline=0.5, isolation=stage.isolation)
    task = stage.start(f"emit(**STARTED); emit(**{event}); time.sleep(600)")
    assert stage.reaches(task, TaskState.exited).exit_code == -signal.SIGTERM


def test_a_trainer_that_is_not_done_is_not_ended_however_odd_its_events(stage: Stage) -> None:
    stage.launcher = LocalLauncher(exit_deadline=0.2, isolation=stage.isolation)
    body = """
emit(**STARTED)
with open(run_dir / "events.jsonl", "a") as file:
    file.write('"finished"\\nrubbish\\n{"type": "warning", "message": "finished"}\\n{"type": "fini')
time.sleep(2.5)
sys.exit(4)
"""
    assert stage.reaches(stage.start(body), TaskState.exited).exit_code == 4


# Devices


def test_a_second_task_waits_for_the_device_and_names_its_holder(stage: Stage) -> None:
    first = stage.start("time.sleep(600)", task_id="first-1")
    stage.reaches(first, TaskState.running)
    second = stage.start("note('ran')", task_id="second-1")
    seen = until(lambda: seen if (seen := stage.launcher.poll(second)).detail else None)
    assert seen.state is TaskState.waiting
    assert seen.detail == (
        f"waiting for device cpu, held by task first-1 (pid {runner_of(first).pid}, run directory {first.run_dir})"
    )
    assert notes(second) == []
    stage.launcher.cancel(first)
    assert stage.reaches(second, TaskState.exited) == Observation(TaskState.exited, 0)
    assert notes(second) == ["ran"]


def test_a_task_that_waits_can_be_cancelled_and_never_runs(stage: Stage) -> None:
    stage.reaches(stage.start("time.sleep(600)", task_id="first-1"), TaskState.running)
    second = stage.start("note('ran')", task_id="second-1")
    stage.reaches(second, TaskState.waiting)
    stage.launcher.cancel(second)
    seen = stage.reaches(second, TaskState.exited)
    assert (seen.exit_code, seen.launch_error, notes(second)) == (None, "", [])


def test_a_device_whose_holder_was_killed_is_free(stage: Stage) -> None:
    first = stage.start("time.sleep(600)", task_id="first-1")
    stage.reaches(first, TaskState.running)
    os.kill(runner_of(first).pid, signal.SIGKILL)
    second = stage.start("note('ran')", task_id="second-1")
    stage.reaches(second, TaskState.exited)
    assert notes(second) == ["ran"]


def test_tasks_on_different_devices_run_side_by_side(stage: Stage) -> None:
    tasks = [stage.start("time.sleep(600)", task_id=f"job-{n}", devices=(f"cuda:{n}",)) for n in range(2)]
    for task in tasks:
        stage.reaches(task, TaskState.running)


def serving(stage: Stage, task_id: str = "serving-1", devices: tuple[str, ...] = ("cpu",)) -> TaskSpec:
    """A task that serves, once it runs or has ended."""
    task = replace(stage.task("note('ready'); time.sleep(600)", task_id=task_id, devices=devices), serves=True)
    stage.tasks[-1] = task
    stage.launcher.start(task)
    until(lambda: stage.launcher.poll(task).state is TaskState.exited or notes(task))
    return task


def test_tasks_that_serve_share_a_device_and_end_when_a_training_wants_it(stage: Stage) -> None:
    tasks = [serving(stage, f"serving-{n}") for n in range(2)]
    for task in tasks:
        assert stage.reaches(task, TaskState.running).detail == ""
    time.sleep(1.0)  # their checks of each other are no claims
    assert [stage.launcher.poll(task).state for task in tasks] == [TaskState.running] * 2

    training = stage.start("note('ran'); time.sleep(600)", task_id=f"job-{len(stage.tasks)}")
    until(lambda: notes(training) == ["ran"])
    stage.launcher.cancel(training)
    stage.reaches(training, TaskState.exited)
    for task in tasks:
        seen = stage.reaches(task, TaskState.exited)
        assert seen.detail.startswith("gave way to task job-2 (pid ")
        assert not marked(task_marks(task))


def test_a_task_that_serves_takes_no_device_of_a_training_and_does_not_wait(stage: Stage) -> None:
    training = stage.start("note('ran'); time.sleep(600)", task_id="job-1")
    stage.reaches(training, TaskState.running)
    refused = serving(stage)
    assert stage.launcher.poll(refused).state is TaskState.exited
    assert stage.launcher.poll(refused).detail.startswith("waiting for device cpu, held by task job-1 (pid ")
    assert notes(refused) == []
    os.kill(runner_of(training).pid, signal.SIGKILL)  # the kernel releases its claim, too
    stage.reaches(training, TaskState.exited)
    assert stage.reaches(serving(stage, "serving-2"), TaskState.running)


def test_a_task_that_serves_gives_way_to_one_that_reserves_a_core(stage: Stage, cores: list[int]) -> None:
    served = serving(stage)
    stage.reaches(served, TaskState.running)
    training = stage.start(AFFINITY, task_id="job-1", devices=("cpu:1",))
    assert until(lambda: notes(training)) == [str(cores[1])]
    assert stage.reaches(served, TaskState.exited).detail.startswith("gave way to task job-1")
    refused = serving(stage, "serving-2")
    assert stage.launcher.poll(refused).detail.startswith("gave way to task job-1")


AFFINITY = "note(','.join(map(str, sorted(os.sched_getaffinity(0))))); time.sleep(600)"


@pytest.fixture
def cores() -> list[int]:
    """The first two cores that this process may use."""
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        lacking("two cores that a process can be bound to")
    return sorted(os.sched_getaffinity(0))[:2]


def test_tasks_with_cores_of_their_own_run_side_by_side_each_on_its_cores(stage: Stage, cores: list[int]) -> None:
    tasks = [stage.start(AFFINITY, task_id=f"job-{n}", devices=(f"cpu:{n}",)) for n in range(2)]
    for task, core in zip(tasks, cores, strict=True):
        stage.reaches(task, TaskState.running)
        assert until(lambda task=task: notes(task)) == [str(core)]


def test_a_task_with_the_whole_cpu_and_tasks_with_cores_exclude_each_other(stage: Stage, cores: list[int]) -> None:
    first = stage.start(AFFINITY, task_id="first-1", devices=("cpu:0",))
    stage.reaches(first, TaskState.running)
    whole = stage.start("note('ran'); time.sleep(600)", task_id="whole-1")
    assert "waiting for device cpu, held by task first-1" in until(lambda: stage.launcher.poll(whole).detail)
    same = stage.start("note('ran')", task_id="same-1", devices=("cpu:0", "cpu:1"))
    assert f"waiting for device cpu-{cores[0]}, held by task first-1" in until(lambda: stage.launcher.poll(same).detail)
    stage.launcher.cancel(same)
    stage.reaches(same, TaskState.exited)
    os.kill(runner_of(first).pid, signal.SIGKILL)  # its cores are free at once
    stage.reaches(whole, TaskState.running)
    late = stage.start("note('ran')", task_id="late-1", devices=("cpu:1",))
    assert "waiting for device cpu, held by task whole-1" in until(lambda: stage.launcher.poll(late).detail)
    assert (notes(same), notes(late)) == ([], [])
    stage.launcher.cancel(whole)
    assert stage.reaches(late, TaskState.exited).exit_code == 0


# One process, no corpses


def test_many_starts_at_once_are_one_process(stage: Stage) -> None:
    task = stage.task("note('started'); time.sleep(600)")
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: stage.launcher.start(task), range(6)))
    until(lambda: notes(task))
    until(lambda: len(marked(task_marks(task))) == stage.keepers + 1)
    assert notes(task) == ["started"]


def test_the_launching_process_has_neither_children_nor_zombies(stage: Stage) -> None:
    before = {*psutil.Process().children()}  # of other tests, and they may end meanwhile
    task = stage.start("pass")
    assert {*psutil.Process().children()} <= before
    stage.reaches(task, TaskState.exited)
    assert {*psutil.Process().children()} <= before


@pytest.mark.skipif(sys.platform != "linux", reason="subreapers are Linux's")
def test_process_1_of_a_container_collects_its_runners(stage: Stage) -> None:
    process.become_subreaper()  # orphans come to us, as they come to process 1
    try:
        task = stage.start("note('ready'); time.sleep(600)")
        until(lambda: notes(task))
        os.kill(runner_of(task).pid, signal.SIGKILL)
        stage.reaches(task, TaskState.exited)
        until(lambda: runner_of(task).pid not in [child.pid for child in psutil.Process().children()])
    finally:
        process.libc().prctl(process._PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        for child in psutil.Process().children():
            process.reap(child.pid)


def test_a_runner_that_ends_while_it_is_examined_is_collected(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    task = stage.task("")
    ended = subprocess.Popen(["/bin/sleep", "600"])
    runner = process.identify(ended.pid)
    assert runner is not None
    RunnerStatus(task.task_id, runner, TaskState.running).write(RunDir(task.run_dir).runner_status)

    def examined(known: ProcessId) -> bool:
        lived = alive(known)
        if lived:  # then it ends: a zombie is left when its environment is read
            ended.kill()
            until(lambda: not alive(known))
        return lived

    monkeypatch.setattr(local, "alive", examined)
    assert stage.launcher.poll(task).state is TaskState.exited
    assert ended.pid not in process.children_of(os.getpid())
    ended.wait()  # finds nothing left to wait for


def test_devices_that_cannot_be_locked_are_reported(stage: Stage) -> None:
    (stage.root / "locks").write_text("no directory")
    task = stage.start("note('ran')")
    assert "its devices cannot be locked" in stage.reaches(task, TaskState.exited).launch_error
    assert notes(task) == []


# With the supervisor on top


@IN_BOTH
def test_a_training_outlives_kill_9_of_its_supervisor_and_is_adopted_again(stage: Stage) -> None:
    python = stage.trainer(
        "emit(**STARTED); note('ran')\nwhile not (run_dir / 'go').exists(): time.sleep(0.02)\nemit(**FINISHED)"
    )
    store = Store(stage.root / "jobs.db")
    store.add_job(job_spec("a", checkpoint_dir=stage.root / "checkpoints" / "out" / "a"), "digest")
    program = f"""
import pathlib, time
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.launch.isolation import NO_ISOLATION, Isolation
from llama_stack_provider_trl.launch.local import LocalLauncher
root = pathlib.Path({str(stage.root)!r})
Supervisor(Store(root / "jobs.db"), LocalLauncher(), ["cpu"], root, python={python!r}).start()
time.sleep(600)
"""
    server = subprocess.Popen([sys.executable, "-c", program])
    try:
        until(lambda: store.get("a").state is JobState.in_progress)
    finally:
        server.kill()
        server.wait()
    assert store.get("a").state is JobState.in_progress
    run_dir = store.get("a").run_dir
    assert run_dir is not None
    supervisor = Supervisor(store, stage.launcher, ["cpu"], stage.root, python=python)
    supervisor.start()
    try:
        (run_dir / "go").touch()
        until(lambda: store.get("a").state is JobState.completed)
    finally:
        supervisor.stop()
    assert (run_dir / "notes").read_text() == "ran\n"
    store.close()


def test_a_process_that_waits_for_the_lock_takes_over_when_it_is_free(stage: Stage) -> None:
    store = Store(stage.root / "jobs.db")
    first, second = (Supervisor(store, stage.launcher, ["cpu"], stage.root) for _ in range(2))
    first.start()
    second.start()
    try:
        assert not second.supervising
        first.stop()
        until(lambda: second.supervising)
    finally:
        first.stop()
        second.stop()
        store.close()


# What the runner ends by itself

STUCK = """
import faulthandler
(run_dir / "stacks").mkdir()
faulthandler.register(signal.SIGUSR1, file=open(run_dir / "stacks" / str(os.getpid()), "w"), all_threads=True)
emit(**STARTED)

def stuck_in_a_collective():
    time.sleep(600)

stuck_in_a_collective()
"""


def test_a_training_that_is_suspended_is_ended_and_shows_what_it_was_doing(stage: Stage) -> None:
    task = replace(stage.task(STUCK), hang_timeout=3.0)
    stage.launcher.start(task)
    seen = stage.reaches(task, TaskState.exited)
    assert seen.ended is Ended.hung
    assert "stuck_in_a_collective" in seen.stacks


def test_a_training_that_gets_something_done_is_left_alone(stage: Stage) -> None:
    body = """
emit(**STARTED)
for _ in range(50):
    time.sleep(0.1)
    os.utime(run_dir / "events.jsonl")
emit(**FINISHED)
"""
    task = replace(stage.task(body), hang_timeout=4.0)
    stage.launcher.start(task)
    assert stage.reaches(task, TaskState.exited) == Observation(TaskState.exited, 0)


def test_a_training_that_is_out_of_time_is_ordered_to_save(stage: Stage) -> None:
    body = """
emit(**STARTED)
while not (run_dir / "control.json").exists():
    time.sleep(0.05)
emit(type="paused", step=3)
"""
    task = replace(stage.task(body), time_limit=1.0)
    stage.launcher.start(task)
    assert stage.reaches(task, TaskState.exited) == Observation(TaskState.exited, 0, ended=Ended.timed_out)


def test_processes_without_a_job_are_swept_and_the_others_stay(stage: Stage) -> None:
    lost, kept = stage.start("time.sleep(600)"), stage.start("time.sleep(600)", task_id="job-2-1", devices=("other",))
    for task in (lost, kept):
        stage.reaches(task, TaskState.running)
    assert stage.launcher.sweep(stage.root, {kept.run_dir}) == [lost.run_dir]
    stage.reaches(lost, TaskState.exited)
    assert stage.launcher.poll(kept).state is TaskState.running


def test_an_orphan_whose_runner_is_gone_is_swept_too(stage: Stage) -> None:
    task = stage.start("stubborn_grandchild()\ntime.sleep(600)")
    until(lambda: notes(task))
    os.kill(runner_of(task).pid, signal.SIGKILL)
    until(lambda: not alive(runner_of(task)))
    stage.launcher.sweep(stage.root, set())
    until(lambda: not marked(task_marks(task)))
