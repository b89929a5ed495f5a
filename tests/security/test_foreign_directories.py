"""Directories in `checkpoint_roots` that no job of ours wrote: never renamed, emptied or removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_stack_provider_trl.errors import JobConflict
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.specs.events import Reason
from llama_stack_provider_trl.system.ownership import Ownership, record
from tests.fakes import FakeLauncher, job_spec


class World:
    """A data directory with its supervisor, and a root beside it that holds a directory of an operator's."""

    def __init__(self, root: Path) -> None:
        self.data_dir = root / "data"
        self.foreign = root / "exports" / "production"
        (self.foreign / "checkpoint-7").mkdir(parents=True)
        (self.foreign / "checkpoint-7" / "model.safetensors").write_bytes(b"weights")
        self.store, self.launcher = Store(self.data_dir / "jobs.sqlite3"), FakeLauncher()
        self.supervisor = Supervisor(self.store, self.launcher, ["cpu"], self.data_dir)

    @property
    def is_untouched(self) -> bool:
        """Whether the operator's directory is where it was, with what it held."""
        beside = [path.name for path in self.foreign.parent.iterdir()]
        return beside == ["production"] and (self.foreign / "checkpoint-7" / "model.safetensors").exists()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.store.close()


def test_a_job_that_would_take_a_foreign_directory_fails_and_leaves_it_alone(world: World) -> None:
    world.store.add_job(job_spec("production", checkpoint_dir=world.foreign, retries=3), "digest")
    for _ in range(3):
        world.supervisor.tick()
    job = world.store.get("production")
    assert (job.state, job.reason) == (JobState.failed, Reason.invalid_request)
    assert "was not written by a job of this data directory" in job.message
    assert world.launcher.started == []
    assert world.is_untouched


def test_a_job_that_was_cancelled_before_its_start_removes_nothing_of_a_foreign_directory(world: World) -> None:
    world.store.add_job(job_spec("production", checkpoint_dir=world.foreign), "digest")
    world.store.launch("production", 1, "cpu", world.data_dir / "jobs" / "production" / "attempts" / "1")
    world.store.request_cancel("production")
    for _ in range(3):
        world.supervisor.tick()
    assert world.store.get("production").state is JobState.cancelled
    assert world.is_untouched


def test_a_foreign_directory_is_refused_before_the_job_is_queued(world: World) -> None:
    ownership = Ownership(world.data_dir)
    with pytest.raises(JobConflict, match=r"production.*has content.*choose another checkpoint_dir or job_uuid"):
        ownership.check_unused(world.foreign)
    assert not ownership.is_ours(world.foreign)  # so that DELETE ?checkpoints=true leaves it
    assert world.is_untouched


def test_an_empty_directory_and_one_of_an_earlier_job_of_ours_are_taken(world: World, tmp_path: Path) -> None:
    empty, own = tmp_path / "exports" / "empty", tmp_path / "exports" / "own"
    empty.mkdir()
    Ownership(world.data_dir).claim(own, "own")
    (own / "final").mkdir(parents=True)
    for place in (empty, own):
        world.store.add_job(job_spec(place.name, checkpoint_dir=place), "digest")
    world.supervisor.tick()
    assert world.launcher.started == ["empty-1"]
    world.launcher.exit("empty-1", 1)
    for _ in range(3):
        world.supervisor.tick()
    assert world.launcher.started == ["empty-1", "own-1"]
    assert (own.with_name("own.stale-1") / "final").is_dir()
    assert record(empty).exists()
