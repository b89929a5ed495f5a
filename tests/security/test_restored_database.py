"""A job database that is older than the files beside it, or lacks their jobs: nothing that it does not know is lost."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import StoreError
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.lost_jobs import refuse_lost_jobs
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.specs.events import CheckpointSaved, Finished, Started
from llama_stack_provider_trl.system.data_dir import DataDir
from llama_stack_provider_trl.system.files import is_whole, write_manifest
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import TrainingService, running
from tests.contract.stack import SFT
from tests.fake_trainer import fake_trainer
from tests.fakes import FakeClock, FakeLauncher, job_spec

STARTED = Started(pid=1, device="cpu", versions={})


class World:
    """One job `a` with retries on a data directory, whose database can be put back."""

    def __init__(self, root: Path) -> None:
        self.place, self.clock = DataDir(root), FakeClock()
        self.launcher = FakeLauncher()
        self.open()
        self.store.add_job(job_spec("a", checkpoint_dir=self.place.checkpoints / "a", retries=9), "digest")
        self.supervisor.tick()
        self.launcher.emit("a-1", STARTED)

    def open(self) -> None:
        self.store = Store(self.place.database, self.clock)
        self.supervisor = Supervisor(self.store, self.launcher, ["cpu"], self.place.root)

    def save(self, task_id: str, step: int) -> None:
        path = self.place.checkpoints / "a" / f"checkpoint-{step}"
        path.mkdir(parents=True)
        (path / "weights.safetensors").write_text(f"of {task_id}")
        write_manifest(path)
        self.launcher.emit(task_id, CheckpointSaved(kind="step", step=step, epoch=1, path=path, train_loss=1.0))
        self.supervisor.tick()

    def crash(self, task_id: str) -> None:
        self.launcher.exit(task_id, 1)
        self.supervisor.tick()
        self.clock.advance(60)
        self.supervisor.tick()

    def backup(self, to: Path) -> None:
        with closing(sqlite3.connect(self.place.database)) as ours, closing(sqlite3.connect(to)) as copy:
            ours.backup(copy)

    def restore(self, copy: Path) -> None:
        self.store.close()
        for path in self.place.root.glob(f"{self.place.database.name}*"):
            path.unlink()
        shutil.copy(copy, self.place.database)
        self.launcher = FakeLauncher()
        self.launcher.tasks = {}
        self.open()

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.place.checkpoints / "a").glob("checkpoint-*") if is_whole(path))


@pytest.mark.parametrize("ends", ["completed", "crashed"])
def test_checkpoints_that_a_restored_database_does_not_know_stay(tmp_path: Path, ends: str) -> None:
    world = World(tmp_path / "data")
    world.save("a-1", 5)
    world.backup(tmp_path / "copy")
    world.crash("a-1")
    world.launcher.emit("a-2", STARTED)
    world.save("a-2", 10)
    world.save("a-2", 15)
    assert world.store.get("a").attempt == 2
    world.restore(tmp_path / "copy")
    assert [one.step for one in world.store.checkpoints("a")] == [5]
    for attempt in range(1, 4):  # whatever becomes of the attempts that it knows
        world.supervisor.tick()
        world.clock.advance(600)
        world.supervisor.tick()
        if f"a-{attempt}" in world.launcher.tasks:
            world.crash(f"a-{attempt}")
        assert world.checkpoints() == ["checkpoint-10", "checkpoint-15", "checkpoint-5"]
    if ends == "completed":
        task_id = world.launcher.started[-1]
        if world.store.get("a").state is JobState.launching:
            world.launcher.emit(task_id, STARTED, Finished(step=20))
            world.launcher.exit(task_id, 0)
        world.supervisor.tick()
    assert world.checkpoints() == ["checkpoint-10", "checkpoint-15", "checkpoint-5"]
    world.store.close()


def test_a_checkpoint_of_which_a_part_is_left_is_removed(tmp_path: Path) -> None:
    world = World(tmp_path / "data")
    world.save("a-1", 5)
    part = world.place.checkpoints / "a" / "checkpoint-7"
    part.mkdir()
    (part / "weights.safetensors").write_text("part")
    link = world.place.checkpoints / "a" / "checkpoint-9.2.tmp"
    link.symlink_to(world.place.root)
    world.crash("a-1")
    assert not part.exists()
    assert not link.is_symlink()
    assert world.place.database.exists()
    world.store.close()


@pytest.mark.parametrize("database", ["missing", "empty", "without jobs"])
def test_a_database_without_the_jobs_whose_directories_are_there_is_refused(tmp_path: Path, database: str) -> None:
    place = DataDir(tmp_path)
    for number in range(43):
        (place.jobs / f"sft-{number}" / "attempts" / "1").mkdir(parents=True)
    if database == "empty":
        place.database.touch()
    elif database == "without jobs":
        Store(place.database).close()
    store = Store(place.database)
    with pytest.raises(StoreError, match=r"has no jobs, and in .*/jobs are the directories of 43 jobs \(sft-0, sft-1"):
        refuse_lost_jobs(store, tmp_path)
    place.jobs.rename(f"{place.jobs}.lost")
    store = Store(place.database)
    refuse_lost_jobs(store, tmp_path)
    store.close()


def test_what_deleted_jobs_have_left_is_no_lost_job(tmp_path: Path) -> None:
    place = DataDir(tmp_path)
    (place.jobs / "sft-1.stale-1" / "attempts" / "1").mkdir(parents=True)
    (place.jobs / "sft-2" / "resume").mkdir(parents=True)  # of a request that was refused
    store = Store(place.database)
    refuse_lost_jobs(store, tmp_path)
    store.close()


@pytest.mark.contract
def test_a_service_whose_database_was_lost_does_not_start_and_names_what_is_there(tmp_path: Path) -> None:
    service = TrainingService(tmp_path, train_python=str(fake_trainer(tmp_path)))
    with running(service):
        service.register("questions", QUESTIONS)
        service.wait(service.submit(SFT, sft("sft-1", "questions")), "completed")
    for path in service.data_dir.glob("jobs.sqlite3*"):
        path.rename(tmp_path / path.name)
    for attempt in range(2):
        with pytest.raises(AssertionError, match="ended by itself"):
            service.start()
        assert "has no jobs, and in" in service.log_tail(), attempt
        assert "is the directory of a job (sft-1): put the database of these jobs back, or" in service.log_tail()
        assert "Traceback" not in service.log_tail()
    for path in service.data_dir.glob("jobs.sqlite3*"):
        path.unlink()
    for path in tmp_path.glob("jobs.sqlite3*"):
        path.rename(service.data_dir / path.name)
    with running(service):
        assert service.state("sft-1") == "completed"


def test_doctor_reports_lost_jobs_and_what_was_set_aside(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "sft-1" / "attempts").mkdir(parents=True)
    (tmp_path / "sessions.json.stale-1").touch()
    (tmp_path / "service.lock").mkdir()
    registry = tmp_path / "datasets" / "registry"
    registry.mkdir(parents=True)
    (registry / f"{'0' * 64}.json").touch()
    command = [sys.executable, "-m", "llama_stack_provider_trl_remote", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env={"TRL_SERVICE_DATA_DIR": str(tmp_path)})
    for text in ("sessions.json.stale-1", "service.lock", f"{'0' * 64}.json", "has no jobs, and in"):
        assert text in done.stdout, (text, done.stdout, done.stderr)
