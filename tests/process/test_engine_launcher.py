"""The contract of `Launcher`, kept by the real one and by the fake that unit tests use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_stack_provider_trl.launch.base import Observation, TaskSpec, TaskState
from llama_stack_provider_trl.launch.local import LocalLauncher
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
    """LocalLauncher, with a trainer that exits when a file says so."""

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
