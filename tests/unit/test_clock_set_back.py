"""The clock of the machine is set back: nothing waits for a time that has been a moment ago, and is hours away now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.retries import LONGEST_BACKOFF
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.launch.base import Observation, TaskState
from llama_stack_provider_trl.specs.events import CheckpointSaved
from llama_stack_provider_trl.system.wall_clock import WallClock
from llama_stack_provider_trl_remote.nodes.pools.base import PoolRefusal
from llama_stack_provider_trl_remote.service.cluster.pools import LONGEST_WAIT
from llama_stack_provider_trl_remote.service.pages.playground_view import models_of
from tests.fakes import FakeClock, FakeLauncher, job_spec
from tests.unit.pool_world import World as PoolWorld

HOUR = 3600.0


@dataclass
class World:
    """A supervisor whose passes are made by hand, with a wall clock that a test sets back."""

    root: Path
    wall: FakeClock
    running: FakeClock
    store: Store
    launcher: FakeLauncher

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.supervisor = Supervisor(
            self.store, self.launcher, ["cpu"], self.root, wall_clock=WallClock(self.wall, self.running)
        )

    def pass_time(self, seconds: float) -> None:
        self.wall.advance(seconds)
        self.running.advance(seconds)
        self.supervisor.tick()

    def lose(self) -> None:
        """Begin a job, and lose its process: it is tried again after a wait."""
        self.store.add_job(
            job_spec("a", checkpoint_dir=self.root / "checkpoints" / "out", retries=3, retry_backoff=300.0), "digest"
        )
        self.supervisor.tick()
        self.launcher.tasks["a-1"].seen = Observation(TaskState.exited, exit_code=1)
        self.supervisor.tick()
        assert self.store.get("a").state is JobState.scheduled


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    wall = FakeClock()
    store = Store(tmp_path / "jobs.db", wall)
    yield World(tmp_path, wall, FakeClock(0.0), store, FakeLauncher())
    store.close()


def test_a_retry_waits_as_long_as_it_was_to(world: World) -> None:
    world.lose()
    world.pass_time(100)
    world.wall.advance(-3 * HOUR)
    world.pass_time(190)
    assert world.store.get("a").attempt == 1
    world.pass_time(15)
    assert world.store.get("a").attempt == 2


def test_a_retry_does_not_wait_for_hours_where_no_service_ran_while_the_clock_was_set_back(world: World) -> None:
    world.lose()
    world.wall.advance(-3 * HOUR)
    world.start()
    world.pass_time(1)
    assert world.store.get("a").attempt == 2


def test_a_wait_that_may_be_true_stays_at_a_start(world: World) -> None:
    world.lose()
    world.start()
    world.pass_time(250)
    assert world.store.get("a").attempt == 1
    world.pass_time(60)
    assert world.store.get("a").attempt == 2


def test_a_clock_that_is_set_forward_or_slewed_changes_nothing(world: World) -> None:
    world.lose()
    world.wall.advance(-0.5)
    world.pass_time(1)
    assert world.store.correct_waits(0.0, LONGEST_BACKOFF) == 0
    world.wall.advance(HOUR)
    world.pass_time(1)
    assert world.store.get("a").attempt == 2


def test_a_job_is_no_younger_than_now(world: World) -> None:
    """Else no device would be kept for it for hours."""
    world.store.add_job(job_spec("a", checkpoint_dir=world.root / "checkpoints" / "out", device="cpu"), "digest")
    world.wall.advance(-3 * HOUR)
    assert world.store.correct_waits(3 * HOUR, LONGEST_BACKOFF) == 1
    assert world.store.get("a").scheduled_at.timestamp() <= world.wall.now


@pytest.mark.parametrize("best", [10, 9])
def test_the_newest_checkpoints_are_those_of_the_end_and_then_that_of_the_last_step(world: World, best: int) -> None:
    """A chat from the page of a job begins with the first one. With `best_checkpoint` those of the end have the step of
    the best one."""
    root = world.root / "checkpoints" / "out"
    world.store.add_job(job_spec("a", checkpoint_dir=root), "digest")
    world.supervisor.tick()
    made: tuple[tuple[Literal["step", "final", "merged"], str, int], ...] = (
        *(("step", "checkpoint-9", 9), ("step", "checkpoint-10", 10)),
        *(("final", "final", best), ("merged", "merged", best)),
    )
    more: Any = {"epoch": 1, "train_loss": None, "validation_loss": None, "perplexity": None}
    for number, (kind, name, step) in enumerate(made):
        saved = CheckpointSaved(kind=kind, path=root / name, step=step, time=world.wall.now - number * HOUR, **more)
        world.store.apply_events("a", 1, [saved], number + 1)
    others = models_of(world.store.get("a"), world.store.checkpoints("a")).others
    assert others == ("job:a/merged", "job:a/final", "job:a/checkpoint-10", "job:a/checkpoint-9")


def test_pools_get_requests_and_their_machines_back(tmp_path: Path) -> None:
    clock = FakeClock()
    store = Store(tmp_path / "jobs.db", clock)
    world = PoolWorld(store, clock)
    world.submit()
    world.pool.error = PoolRefusal("full")
    world.round()
    assert world.states() == ["ended"]
    world.pool.error = None
    clock.advance(-3 * HOUR)
    world.round()
    world.round(LONGEST_WAIT + 1)
    world.round()
    assert [state for state in world.states() if state != "ended"] in (["requested"], ["granted"])
    store.close()
