"""Jobs that are interrupted end as if they had not been: same weights, byte for byte, every metric point once."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from llama_stack_provider_trl import process
from llama_stack_provider_trl.files import RunDir
from llama_stack_provider_trl.jobs.states import JobState
from llama_stack_provider_trl.jobs.store import Store
from llama_stack_provider_trl.jobs.supervisor import Supervisor
from llama_stack_provider_trl.launch.base import Launcher
from llama_stack_provider_trl.launch.local import LocalLauncher
from llama_stack_provider_trl.launch.runner import RunnerStatus
from llama_stack_provider_trl.recipes.events import Reason
from llama_stack_provider_trl.recipes.spec import JobSpec
from tests.census import assert_clean
from tests.fakes import FakeClock
from tests.tiny import tiny_model
from tests.training import LORA, SFT_ROWS, job_spec
from tests.zygote import ForkLauncher

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

KINDS: dict[str, dict[str, Any]] = {
    "sft-lora": {"algorithm": "sft", "lora": LORA, "validation_rows": SFT_ROWS[:4]},
    "dpo-full": {"algorithm": "dpo"},
    "sft-full": {"algorithm": "sft", "gradient_accumulation_steps": 2, "n_epochs": 6},
    "dpo-lora": {"algorithm": "dpo", "lora": LORA},
}
KILLS = int(os.environ.get("TRL_TEST_KILLS", "20"))
"""Interruptions per signal; more by command: TRL_TEST_KILLS=200."""


class World:
    """A data directory with a real store and a real supervisor, whose clock jumps over every wait for a retry."""

    def __init__(self, root: Path, launcher: Launcher) -> None:
        self.root, self.launcher = root, launcher
        self.clock = FakeClock()
        self.store = Store(root / "jobs.sqlite3", self.clock)
        self.supervisor = Supervisor(self.store, launcher, ["cpu"], root, hang_timeout=120)

    def add(self, name: str, kind: str, **changes: Any) -> None:
        values = {**KINDS[kind], "n_epochs": 4, "batch_size": 2, "save_steps": 3, "num_threads": 1, "retries": 1000}
        values |= {name: value for name, value in KINDS[kind].items() if name != "algorithm"} | changes
        directory = self.root / "checkpoints" / name
        spec = job_spec(self.root, tiny_model(), job_uuid=name, checkpoint_dir=directory, **values)
        self.store.add_job(spec, "digest")

    def tick(self) -> None:
        self.supervisor.tick()
        self.clock.advance(1000)

    def until(self, done: Callable[[], Any], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, [self.store.get(name) for name in self.store.names()]
            self.tick()
            time.sleep(0.02)

    def state(self, name: str) -> JobState:
        return self.store.get(name).state

    def finish(self, name: str) -> None:
        self.until(lambda: self.state(name) in (JobState.completed, JobState.failed))
        assert self.state(name) is JobState.completed, self.store.get(name).message

    def spec(self, name: str) -> JobSpec:
        return self.store.get(name).spec

    def weights(self, name: str) -> str:
        """Digest of the exported weights."""
        (file,) = (self.spec(name).checkpoint_dir / "final").glob("*model.safetensors")
        return hashlib.sha256(file.read_bytes()).hexdigest()

    def points(self, name: str) -> list[tuple[str, int, float | None]]:
        return [
            (point.kind, point.step, point.metrics.get("loss", point.metrics.get("eval_loss")))
            for point in self.store.points(name)
        ]


@pytest.fixture(scope="module")
def zygote() -> Iterator[ForkLauncher]:
    launcher = ForkLauncher()
    yield launcher
    launcher.close()


@pytest.fixture
def forked(tmp_path: Path, zygote: ForkLauncher) -> Iterator[World]:
    world = World(tmp_path, zygote)
    zygote.processes.clear()
    zygote.started.clear()
    yield world
    world.store.close()


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """With the launcher and the runner of the product."""
    monkeypatch.setenv("TRL_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    faults = tmp_path / "faults"
    faults.mkdir()
    monkeypatch.setenv("TRL_FAULTS", str(faults))
    world = World(tmp_path, LocalLauncher())
    yield world
    process.terminate(lambda: process.marked({"TRL_LOCK_DIR": str(tmp_path / "locks")}), grace=0)
    world.store.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_training_killed_at_random_moments_ends_with_the_weights_of_one_that_was_not(
    forked: World, zygote: ForkLauncher, number: int
) -> None:
    rng = random.Random(int(number))
    undisturbed: dict[str, tuple[str, list[Any]]] = {}
    duration = {}
    for kind in KINDS:
        began = time.monotonic()
        forked.add(f"whole-{kind}", kind)
        forked.finish(f"whole-{kind}")
        duration[kind] = time.monotonic() - began
        undisturbed[kind] = (forked.weights(f"whole-{kind}"), forked.points(f"whole-{kind}"))
    kills = resumed = 0
    for turn, kind in enumerate(itertools.cycle(KINDS)):
        name = f"job-{turn}"
        forked.add(name, kind)
        for attempt in itertools.count(1):
            task = f"{name}-{attempt}"
            forked.until(lambda task=task: task in zygote.processes)
            moment = time.monotonic() + rng.uniform(0, duration[kind] * 0.9)
            forked.until(
                lambda task=task, moment=moment: (
                    time.monotonic() > moment or not process.alive(zygote.processes[task])  # type: ignore[arg-type]
                )
            )
            if attempt > 4 or not zygote.kill(task, number):
                break
            kills += 1
        forked.finish(name)
        resumed += sum(tried.resume_from is not None for tried in forked.store.attempts(name))
        assert (forked.weights(name), forked.points(name)) == undisturbed[kind], kind
        assert_clean(forked.root)
        if kills >= KILLS:
            break
    assert resumed > KILLS // 4  # it was not all starting over


@pytest.mark.parametrize("point", ["saving-6", "saved-6", "announced-6", "exporting-final", "exported-final"])
def test_a_kill_in_the_middle_of_a_checkpoint_or_an_export_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    monkeypatch.setenv("TRL_FAULTS", str(faults))
    launcher = ForkLauncher()  # its children see the variable
    try:
        world = World(tmp_path, launcher)
        world.add("whole", "dpo-full")
        world.finish("whole")
        (faults / point).write_text("kill")
        world.add("cut", "dpo-full")
        world.finish("cut")
        assert (faults / f"{point}.taken").exists()
        assert world.store.get("cut").attempt == 2
        assert (world.weights("cut"), world.points("cut")) == (world.weights("whole"), world.points("whole"))
        for checkpoint in world.store.checkpoints("cut"):
            assert load_file(next(checkpoint.path.glob("*model.safetensors")))
        assert_clean(world.root)
        world.store.close()
    finally:
        launcher.close()


def test_a_pause_goes_on_exactly(forked: World) -> None:
    forked.add("whole", "sft-lora")
    forked.finish("whole")
    forked.add("paused", "sft-lora")
    for _ in range(2):
        before = forked.store.get("paused").progress.step
        forked.until(lambda before=before: forked.store.get("paused").progress.step > before + 1)
        forked.store.request_pause("paused")
        forked.until(lambda: forked.state("paused") is JobState.paused)
        assert_clean(forked.root)
        forked.store.request_resume("paused")
        forked.tick()
    forked.finish("paused")
    attempts = forked.store.attempts("paused")
    assert [attempt.start_step > 0 for attempt in attempts] == [False, True, True]
    assert forked.store.get("paused").retries_used == 0
    assert (forked.weights("paused"), forked.points("paused")) == (forked.weights("whole"), forked.points("whole"))


def test_after_the_last_retry_the_reason_and_the_end_of_the_traceback_are_told(
    forked: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked.add("broken", "sft-full", retries=1, optimizer={"learning_rate": 1e-3}, save_steps=3)
    # Its rows are gone when it starts: the recipe raises what nobody has foreseen.
    forked.spec("broken").dataset.path.unlink()
    forked.until(lambda: forked.state("broken") is JobState.failed)
    job = forked.store.get("broken")
    assert (job.attempt, job.reason) == (2, Reason.rank_failed)
    assert "FileNotFoundError" in job.message
    assert "End of the traceback" in job.message


@pytest.mark.parametrize("victims", [("trainer",), ("runner",), ("runner", "trainer")], ids="+".join)
def test_whatever_is_killed_the_job_is_back_within_30_seconds_and_completes(
    real: World, victims: tuple[str, ...]
) -> None:
    real.add("job", "dpo-lora", retries=1)
    (real.root / "faults" / "step-5").write_text("hold")
    real.until((real.root / "faults" / "step-5.taken").exists)
    paths = RunDir(real.store.get("job").run_dir or Path())
    status = RunnerStatus.read(paths.runner_status)
    assert status is not None
    for victim in victims:  # a trainer may be gone already: the kernel ends it with its runner
        process.send_signal(getattr(status, victim), signal.SIGKILL)
    killed = time.monotonic()
    real.until(lambda: real.store.get("job").attempt == 2 and real.state("job") is JobState.in_progress)
    assert time.monotonic() - killed < 30
    real.finish("job")
    assert [attempt.start_step for attempt in real.store.attempts("job")] == [0, 3]
    assert [step for kind, step, _ in real.points("job") if kind == "train"] == list(range(1, 25))
    assert_clean(real.root)


def test_every_process_is_gone_5_seconds_after_a_cancel(real: World) -> None:
    real.add("job", "sft-full")
    (real.root / "faults" / "saving-3").write_text("hold")
    real.until((real.root / "faults" / "saving-3.taken").exists)
    real.store.request_cancel("job")
    real.until(lambda: real.state("job") is JobState.cancelled, 5)
    assert_clean(real.root)
