"""What a training writes into its run directory and its checkpoints is input: no path, link or FIFO of it is followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_stack_provider_trl.files import RunDir, write_manifest
from llama_stack_provider_trl.jobs.states import JobState
from llama_stack_provider_trl.jobs.store import Store
from llama_stack_provider_trl.jobs.supervisor import Supervisor
from llama_stack_provider_trl.recipes.events import CheckpointDamaged, CheckpointSaved, Prepared, Started
from tests.fakes import FakeLauncher, job_spec

STARTED = Started(pid=1, device="cpu", versions={})


class World:
    """One running job with keep_last=1, whose events the test writes."""

    def __init__(self, root: Path) -> None:
        self.root, self.data = root, root / "data"
        self.data.mkdir()
        self.out = root / "out" / "a"
        self.store = Store(self.data / "jobs.sqlite3")
        self.launcher = FakeLauncher()
        self.supervisor = Supervisor(self.store, self.launcher, ["cpu"], self.data)
        self.store.add_job(job_spec("a", checkpoint_dir=self.out, keep_last=1), "digest")
        self.supervisor.tick()
        self.say(STARTED)
        assert self.store.get("a").state is JobState.in_progress

    @property
    def run_dir(self) -> Path:
        return Path(self.launcher.tasks["a-1"].spec.run_dir)

    def say(self, *events: object) -> None:
        self.launcher.say("a-1", *events)  # type: ignore[arg-type]
        self.supervisor.tick()

    def listed(self) -> list[Path]:
        return [checkpoint.path for checkpoint in self.store.checkpoints("a")]

    def warnings(self) -> str:
        return "\n".join(self.store.get("a").warnings)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def saved(step: int, path: Path) -> CheckpointSaved:
    return CheckpointSaved(kind="step", step=step, epoch=1, path=path, train_loss=1.0)


def checkpoint(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "weights.safetensors").write_bytes(b"weights")
    write_manifest(path)
    return path


@pytest.mark.parametrize("name", ["victim", "victim/checkpoint-1", "../out/a/other"])
def test_an_event_cannot_have_a_directory_elsewhere_listed_or_removed(world: World, name: str) -> None:
    victim = world.data / name
    victim.mkdir(parents=True)
    own = checkpoint(world.out / "checkpoint-2")
    world.say(saved(1, victim), saved(2, own))
    assert victim.is_dir()
    assert world.listed() == [own]
    assert str(victim) in world.warnings()


def test_a_symbolic_link_is_no_checkpoint(world: World) -> None:
    world.out.mkdir(parents=True)
    (world.out / "checkpoint-1").symlink_to(world.data)
    world.say(saved(1, world.out / "checkpoint-1"))
    assert world.listed() == []
    assert "symbolic link" in world.warnings()


def test_a_damaged_checkpoint_of_another_job_stays_listed_and_the_path_is_reported(world: World) -> None:
    foreign = world.root / "out" / "b" / "checkpoint-1"
    world.say(CheckpointDamaged(path=foreign, message="a bit has flipped"))
    assert "names" in world.warnings()
    assert "a bit has flipped" not in world.warnings()


def test_a_training_resumes_from_no_foreign_directory_on_record(world: World) -> None:
    world.say(Prepared(total_steps=4, resumed_from=world.data, num_rows=4, trainable_parameters=1, total_parameters=1))
    assert world.store.attempts("a")[-1].resume_from is None
    assert str(world.data) in world.warnings()
    effective = world.store.get("a").effective
    assert effective is not None
    assert effective["total_steps"] == 4
