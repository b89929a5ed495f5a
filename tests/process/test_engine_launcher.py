"""The contract of `Launcher`, kept by the real one and by the fake that unit tests use."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_stack_provider_trl.launch import local
from llama_stack_provider_trl.launch.base import Observation, TaskSpec, TaskState
from llama_stack_provider_trl.launch.local import LocalLauncher
from llama_stack_provider_trl.launch.runner import RunnerStatus
from llama_stack_provider_trl.launch.torchrun import task_marks
from llama_stack_provider_trl.system.files import RunDir
from llama_stack_provider_trl.system.process import marked
from tests.fakes import SHEBANG, FakeLauncher
from tests.process.waiting import reaches, until

pytestmark = pytest.mark.process

TRAINER = f"""{SHEBANG}
import pathlib, sys, time
run_dir = pathlib.Path(sys.argv[-1]).parent
with open(run_dir / "starts", "a") as file:
    file.write("x")
while not (run_dir / "exit").exists():
    time.sleep(0.02)
sys.exit(int((run_dir / "exit").read_text()))
"""


class Real:
    """LocalLauncher, with a trainer that exits when a file appears."""

    def __init__(self, root: Path) -> None:
        self.launcher = LocalLauncher()
        self.python = root / "trainer"
        self.python.write_text(TRAINER)
        self.python.chmod(0o755)

    def exit(self, task: TaskSpec, code: int) -> None:
        temporary = task.run_dir / "exit.tmp"
        temporary.write_text(str(code))
        temporary.rename(task.run_dir / "exit")

    def starts(self, task: TaskSpec) -> int:
        file = task.run_dir / "starts"
        return len(file.read_text()) if file.exists() else 0


class Fake:
    def __init__(self, root: Path) -> None:
        self.launcher = FakeLauncher()
        self.python = root / "nobody"

    def exit(self, task: TaskSpec, code: int) -> None:
        self.launcher.exit(task.task_id, code)

    def starts(self, task: TaskSpec) -> int:
        return self.launcher.started.count(task.task_id)


@pytest.fixture(params=[Real, Fake])
def stage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Real | Fake:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("TRL_LOCK_DIR", str(tmp_path / "locks"))
    stage: Real | Fake = request.param(tmp_path)
    return stage


@pytest.fixture
def task(stage: Real | Fake, tmp_path: Path) -> Iterator[TaskSpec]:
    (tmp_path / "run").mkdir()
    task = TaskSpec("job-1-1", tmp_path / "run", ("cpu",), python=str(stage.python))
    yield task
    stage.launcher.cancel(task)
    reaches(stage.launcher, task, TaskState.exited)


def test_a_task_that_was_never_started_is_unknown(stage: Real | Fake, task: TaskSpec) -> None:
    assert stage.launcher.poll(task) == Observation(TaskState.unknown)


def test_a_task_runs_until_it_exits_and_its_exit_code_is_kept(stage: Real | Fake, task: TaskSpec) -> None:
    stage.launcher.start(task)
    assert reaches(stage.launcher, task, TaskState.running).exit_code is None
    stage.exit(task, 7)
    assert reaches(stage.launcher, task, TaskState.exited) == Observation(TaskState.exited, 7)
    assert stage.launcher.poll(task).exit_code == 7


def test_starting_twice_is_one_process(stage: Real | Fake, task: TaskSpec) -> None:
    stage.launcher.start(task)
    stage.launcher.start(task)
    reaches(stage.launcher, task, TaskState.running)
    until(lambda: stage.starts(task) == 1)
    stage.exit(task, 0)
    reaches(stage.launcher, task, TaskState.exited)
    stage.launcher.start(task)
    assert stage.starts(task) == 1


def test_a_cancel_ends_the_task_by_sigterm(stage: Real | Fake, task: TaskSpec) -> None:
    stage.launcher.start(task)
    reaches(stage.launcher, task, TaskState.running)
    stage.launcher.cancel(task)
    stage.launcher.cancel(task)
    assert reaches(stage.launcher, task, TaskState.exited).exit_code == -15


def test_a_start_that_comes_after_the_cancel_comes_too_late(stage: Real | Fake, task: TaskSpec) -> None:
    stage.launcher.cancel(task)
    assert stage.launcher.poll(task).state is TaskState.exited
    stage.launcher.start(task)
    assert stage.launcher.poll(task).state is TaskState.exited
    assert stage.starts(task) == 0


def test_cancelling_what_has_ended_changes_nothing(stage: Real | Fake, task: TaskSpec) -> None:
    stage.launcher.start(task)
    reaches(stage.launcher, task, TaskState.running)
    stage.exit(task, 3)
    ended = reaches(stage.launcher, task, TaskState.exited)
    stage.launcher.cancel(task)
    assert stage.launcher.poll(task) == ended


def test_a_stopped_runner_does_not_keep_a_task_from_being_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_RUNNER_TIME", 0.5)
    stage, task = started(tmp_path, monkeypatch)
    status = RunnerStatus.read(RunDir(task.run_dir).runner_status)
    assert status is not None
    assert status.runner is not None
    os.kill(status.runner.pid, signal.SIGSTOP)
    until(lambda: stage.launcher.cancel(task) or stage.launcher.poll(task).state is TaskState.exited)
    assert not marked(task_marks(task))


def test_what_runs_of_a_task_whose_directory_was_removed_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, task = started(tmp_path, monkeypatch)
    shutil.rmtree(task.run_dir)
    assert stage.launcher.poll(task).state is TaskState.running
    until(lambda: stage.launcher.poll(task).state is TaskState.unknown)
    assert not marked(task_marks(task))


def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Real, TaskSpec]:
    """A task of the real launcher that runs."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("TRL_LOCK_DIR", str(tmp_path / "locks"))
    stage = Real(tmp_path)
    (tmp_path / "run").mkdir()
    task = TaskSpec("job-1-1", tmp_path / "run", ("cpu",), python=str(stage.python))
    stage.launcher.start(task)
    reaches(stage.launcher, task, TaskState.running)
    until(lambda: stage.starts(task) == 1)
    return stage, task
