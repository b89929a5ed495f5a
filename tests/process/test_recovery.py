"""Jobs that are interrupted end as if they had not been: same weights, byte for byte, every metric point once."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.launch.local import LocalLauncher
from llama_stack_provider_trl.launch.runner import RunnerStatus
from llama_stack_provider_trl.specs.events import Reason
from llama_stack_provider_trl.specs.exports import GGUF_FILE, ExportSpec
from llama_stack_provider_trl.specs.merge import MergeInput, MergeSpec
from llama_stack_provider_trl.specs.work import MERGING, EvaluateSpec, ExportWork, MergeWork
from llama_stack_provider_trl.system import process
from llama_stack_provider_trl.system.files import RunDir
from tests.census import assert_clean
from tests.forked import forked_warm_processes
from tests.process.supervised import KINDS, KINDS_ON_ROWS, Outcome, World
from tests.required import IN_FULL, in_full
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, SFT_ROWS, job_spec
from tests.zygote import ForkLauncher

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]


KILLS = int(os.environ.get("TRL_TEST_KILLS", "6"))
"""Interruptions per signal; more by command: TRL_TEST_KILLS=200."""


class Undisturbed(NamedTuple):
    outcome: Outcome
    metrics: list[dict[str, float]]
    seconds: float


@pytest.fixture(scope="module")
def zygote() -> Iterator[ForkLauncher]:
    launcher = ForkLauncher()
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, zygote: ForkLauncher) -> Iterator[dict[str, Undisturbed]]:
    """How a job of each kind ends when nothing happens to it, and after what time; trained when a test needs it."""
    world = World(tmp_path_factory.mktemp("undisturbed"), zygote)

    class Trained(dict[str, Undisturbed]):
        def __missing__(self, kind: str) -> Undisturbed:
            began = time.monotonic()
            world.add(kind, kind)
            world.finish(kind)
            self[kind] = Undisturbed(world.outcome(kind), world.metrics(kind), time.monotonic() - began)
            return self[kind]

    yield Trained()
    world.store.close()


@pytest.fixture
def forked(tmp_path: Path, zygote: ForkLauncher) -> Iterator[World]:
    """With trainings of the zygote, one for all tests here."""
    world = World(tmp_path, zygote)
    yield world
    zygote.reset()
    world.store.close()


@pytest.fixture
def armed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of faults of all trainings that this test starts."""
    directory = tmp_path / "faults"
    directory.mkdir()
    monkeypatch.setenv(faults.VARIABLE, str(directory))
    return directory


@pytest.fixture
def real(tmp_path: Path, armed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """With the launcher and the runner of the product."""
    monkeypatch.setenv("TRL_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with forked_warm_processes() as warm:
        world = World(tmp_path, LocalLauncher(warm=warm))
        yield world
        process.terminate(lambda: process.marked({"TRL_LOCK_DIR": str(tmp_path / "locks")}), grace=0)
        world.store.close()


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param((signal.SIGKILL, signal.SIGTERM), id="either"),
        *in_full(pytest.param((signal.SIGTERM,), id="SIGTERM"), pytest.param((signal.SIGKILL,), id="SIGKILL")),
    ],
)
def test_a_training_killed_at_random_moments_ends_with_the_weights_of_one_that_was_not(
    forked: World, zygote: ForkLauncher, undisturbed: dict[str, Undisturbed], numbers: tuple[int, ...]
) -> None:
    rng = random.Random(sum(numbers))
    kills = resumed = 0
    for turn, kind in enumerate(itertools.cycle(KINDS)):
        name, whole = f"job-{turn}", undisturbed[kind]
        forked.add(name, kind)
        for attempt in itertools.count(1):
            task = f"{name}-{attempt}"
            forked.until(lambda task=task, name=name: task in zygote.processes or forked.ended(name))
            if task not in zygote.processes:
                break  # the signal met a process that had reported its end
            _wait_for_a_random_moment(forked, name, partial(zygote.running, task), rng, whole)
            if attempt > 4 or not zygote.kill(task, numbers[kills % len(numbers)]):
                break
            kills += 1
        forked.finish(name)
        resumed += sum(tried.resume_from is not None for tried in forked.store.attempts(name))
        assert forked.outcome(name) == whole.outcome, kind
        assert_clean(forked.root)
        if kills >= KILLS:
            break
    assert resumed > KILLS // 4  # it was not all starting over


def _wait_for_a_random_moment(
    world: World, name: str, running: Callable[[], bool], rng: random.Random, whole: Undisturbed
) -> None:
    """A random step of the attempt and up to two steps' time more, or a moment before its first step; or its end.

    Counted in steps: on a machine that is busy at times, a clock would put too many moments before the first one.
    """
    last = whole.outcome.points[-1][1]
    first = world.store.attempts(name)[-1].start_step
    step = rng.randrange(first - 2, last)
    delay = rng.uniform(0, whole.seconds / 4 if step <= first else 2 * whole.seconds / last)
    world.until(lambda: not running() or world.store.attempts(name)[-1].step >= step)
    moment = time.monotonic() + delay
    world.until(lambda: not running() or time.monotonic() >= moment)


@pytest.mark.parametrize("point", ["saving-6", "exporting-final", *in_full("saved-6", "announced-6", "exported-final")])
def test_a_kill_in_the_middle_of_a_checkpoint_or_an_export_costs_nothing(
    forked: World, undisturbed: dict[str, Undisturbed], armed: Path, point: str
) -> None:
    (armed / point).write_text("kill")
    forked.add("cut", "dpo-full")
    forked.finish("cut")
    assert (armed / f"{point}.taken").exists()
    assert forked.store.get("cut").attempt == 2
    assert forked.outcome("cut") == undisturbed["dpo-full"].outcome
    for checkpoint in forked.store.checkpoints("cut"):
        assert load_file(next(checkpoint.path.glob("*model.safetensors")))
    assert_clean(forked.root)


@pytest.mark.parametrize(
    ("kind", "varying"),
    [
        ("grpo-lora", "reward"),
        *in_full(("distillation-full", "entropy"), ("other-vocabulary-lora", "matched_loss")),
    ],
)
def test_a_kill_of_a_job_with_answers_that_it_has_not_trained_on_gives_them_again(
    forked: World, undisturbed: dict[str, Undisturbed], armed: Path, kind: str, varying: str
) -> None:
    points = ["answered-2", *in_full("step-5", "answered-8"), "saving-9", "answered-13"]
    for point in points:
        (armed / point).write_text("kill")
    forked.add("cut", kind)
    forked.finish("cut")
    assert all((armed / f"{point}.taken").exists() for point in points)
    starts = [tried.start_step for tried in forked.store.attempts("cut")]
    assert len(starts) == len(points) + 1
    assert starts[-1] >= 9  # a checkpoint may be lost that was being written
    assert forked.outcome("cut") == undisturbed[kind].outcome
    assert forked.metrics("cut") == undisturbed[kind].metrics
    assert len({point[varying] for point in forked.metrics("cut")}) > 2
    assert_clean(forked.root)


@IN_FULL  # a kill of SFT, DPO and GRPO above
@pytest.mark.parametrize("kind", KINDS_ON_ROWS)
def test_a_kill_of_a_job_of_each_other_method_changes_no_number(forked: World, armed: Path, kind: str) -> None:
    points = ["step-5", "exporting-final"]
    for point in points:
        (armed / point).write_text("kill")
    forked.add("cut", kind, n_epochs=2)
    forked.finish("cut")
    assert all((armed / f"{point}.taken").exists() for point in points)
    assert len(forked.store.attempts("cut")) == len(points) + 1
    assert forked.store.attempts("cut")[-1].start_step >= 9
    forked.add("whole", kind, n_epochs=2)
    forked.finish("whole")
    assert forked.outcome("cut") == forked.outcome("whole")
    assert_clean(forked.root)


@pytest.mark.parametrize("kind", ["merge", "export", "evaluate"])
def test_a_job_that_does_not_train_and_is_killed_begins_again(forked: World, armed: Path, kind: str) -> None:
    points = {
        "merge": ["started", "merging-final", "exported-final"],
        "export": ["written-final", "exporting-final", "exported-final"],
        "evaluate": ["started", "prepared"],
    }[kind]
    for point in points:
        (armed / point).write_text("kill")
    for name in ("cut", "whole"):
        directory = forked.root / "checkpoints" / name
        inputs = (MergeInput(model=str(tiny_model()), weight=1.0),) * 2
        merge = MergeWork(merge=MergeSpec(inputs=inputs, output=directory / MERGING), of_adapters=False)
        export = ExportWork(export=ExportSpec(target="gguf"))
        work = {"merge": merge, "export": export, "evaluate": EvaluateSpec()}[kind]
        fields = {"job_uuid": name, "checkpoint_dir": directory, "retries": 1000, "num_threads": 1, "work": work}
        forked.store.add_job(job_spec(forked.root, tiny_model(), **fields), "digest")
        forked.finish(name)
        if name == "cut":
            assert all((armed / f"{point}.taken").exists() for point in points)
            assert len(forked.store.attempts("cut")) == len(points) + 1
    cut, whole = (forked.store.get(name).effective for name in ("cut", "whole"))
    assert cut is not None
    assert whole is not None
    assert cut["result"] == whole["result"]
    if kind != "evaluate":
        file = "model.safetensors" if kind == "merge" else GGUF_FILE
        weights = [forked.spec(name).checkpoint_dir / "final" / file for name in ("cut", "whole")]
        assert weights[0].read_bytes() == weights[1].read_bytes()
        assert [path.name for path in weights[0].parent.parent.iterdir()] == ["final"]
    assert_clean(forked.root)


def test_a_pause_continues_exactly(forked: World, undisturbed: dict[str, Undisturbed]) -> None:
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
    assert forked.outcome("paused") == undisturbed["sft-lora"].outcome


def test_a_pause_at_a_step_that_is_evaluated_and_saved_anyway_changes_nothing(
    forked: World, armed: Path, undisturbed: dict[str, Undisturbed]
) -> None:
    (armed / "step-2").write_text("hold")
    forked.add("paused", "sft-lora")
    forked.until((armed / "step-2.taken").exists)
    forked.store.request_pause("paused")
    forked.tick()
    (armed / "step-2.go").touch()
    forked.until(lambda: forked.state("paused") is JobState.paused)
    assert [checkpoint.step for checkpoint in forked.store.checkpoints("paused")] == [3]
    forked.store.request_resume("paused")
    forked.tick()
    forked.finish("paused")
    assert forked.outcome("paused") == undisturbed["sft-lora"].outcome


def test_after_the_last_retry_the_reason_and_the_end_of_the_traceback_are_reported(forked: World) -> None:
    forked.add("broken", "sft-full", retries=1, optimizer={"learning_rate": 1e-3}, save_steps=3)
    # Its rows are gone when it starts: the recipe raises an unforeseen error.
    forked.spec("broken").data.dataset.path.unlink()
    forked.until(lambda: forked.state("broken") is JobState.failed)
    job = forked.store.get("broken")
    assert (job.attempt, job.reason) == (2, Reason.rank_failed)
    assert "FileNotFoundError" in job.message
    assert "End of the traceback" in job.message


def test_whatever_is_killed_the_job_is_started_again_and_completes(real: World, armed: Path) -> None:
    victims = [("trainer",), ("runner",), ("runner", "trainer")]
    taken = armed / "step-5.taken"
    (armed / "step-5").write_text("hold")
    real.add("job", "dpo-lora", retries=len(victims))
    for attempt, names in enumerate(victims, 1):
        real.until(taken.exists)
        real.until(lambda: real.store.checkpoints("job"))  # written while training continued to this step
        job = real.store.get("job")
        assert job.attempt == attempt
        status = RunnerStatus.read(RunDir(job.run_dir or Path()).runner_status)
        assert status is not None
        taken.rename(armed / "step-5")  # the next attempt is held there as well
        for name in names:  # a trainer may be gone already: the kernel ends it with its runner
            process.send_signal(getattr(status, name), signal.SIGKILL)
        real.until(lambda job=job: real.store.get("job").attempt > job.attempt)
    (armed / "step-5.go").touch()
    real.finish("job")
    assert [attempt.start_step for attempt in real.store.attempts("job")] == [0, 3, 3, 3]
    assert [step for kind, step, _ in real.outcome("job").points if kind == "train"] == list(range(1, 25))
    assert_clean(real.root)


def test_every_process_is_gone_5_seconds_after_a_cancel(real: World, armed: Path) -> None:
    (armed / "saving-3").write_text("hold")
    real.add("job", "sft-full")
    real.until((armed / "saving-3.taken").exists)
    real.store.request_cancel("job")
    real.until(lambda: real.state("job") is JobState.cancelled, 5)
    assert_clean(real.root)


@pytest.mark.parametrize("kind", ["dpo-full", *in_full("grpo-lora", "sft-lora", "distillation-full")])
def test_a_job_that_runs_out_of_memory_continues_with_half_the_batch_and_the_same_losses(
    forked: World, armed: Path, kind: str
) -> None:
    # 11 rows: the last batch of an epoch is not full, and falls into parts of 2 and 1.
    rows = (SFT_ROWS if KINDS[kind]["algorithm"] == "sft" else DPO_ROWS)[:11]
    changes = {"rows": rows, "batch_size": 4, "n_epochs": 2, "oom_retry": True, "retries": 0}
    forked.add("whole", kind, **changes)
    forked.finish("whole")
    (armed / "step-4").write_text("memory")
    forked.add("job", kind, **changes)
    forked.finish("job")
    first, second = forked.store.attempts("job")
    assert (first.reason, second.start_step) == (Reason.out_of_memory, 3)
    assert (
        "train with batch_size 2 and gradient_accumulation_steps 2 instead of" in forked.store.get("job").warnings[-1]
    )
    assert len(forked.outcome("job").points) == len(forked.outcome("whole").points) >= 6
    for halved, whole in zip(forked.outcome("job").points, forked.outcome("whole").points, strict=True):
        assert halved == (*whole[:2], pytest.approx(whole[2], abs=1e-5))
    assert_clean(forked.root)


def test_metrics_that_a_killed_attempt_had_not_read_are_reported_by_the_next_one(forked: World, armed: Path) -> None:
    for name, read in (("whole", "never"), ("killed", "always")):
        forked.add(name, "sft-lora", n_epochs=2, read_metrics_later=read)
        forked.finish(name)
        for step in (1, 5):  # before the first checkpoint, and after it
            (armed / f"held-{step}").write_text("kill")
    assert len(forked.store.attempts("killed")) == 3
    assert forked.outcome("killed") == forked.outcome("whole")
    whole, killed = ([point for point in forked.metrics(name) if "loss" in point] for name in ("whole", "killed"))
    assert killed == whole
    assert_clean(forked.root)


def test_merged_micro_batches_survive_a_kill_and_are_split_where_memory_ends(
    forked: World, zygote: ForkLauncher, armed: Path
) -> None:
    changes = {"rows": SFT_ROWS[:11], "batch_size": 1, "gradient_accumulation_steps": 4, "n_epochs": 2}
    changes |= {"merge_micro_batches": "always", "oom_retry": True, "preflight": "refuse"}
    forked.add("whole", "sft-lora", **changes)
    forked.finish("whole")
    (armed / "step-5").write_text("hold")
    forked.add("killed", "sft-lora", **changes)
    forked.until((armed / "step-5.taken").exists)
    forked.until(lambda: forked.store.checkpoints("killed"))  # written while training continued
    assert zygote.kill("killed-1", signal.SIGKILL)
    (armed / "step-5.go").touch()
    forked.finish("killed")
    assert [attempt.start_step for attempt in forked.store.attempts("killed")] == [0, 3]
    assert forked.outcome("killed") == forked.outcome("whole")
    (armed / "step-4").write_text("memory")
    forked.add("split", "sft-lora", **changes, retries=0)
    forked.finish("split")
    assert [attempt.start_step for attempt in forked.store.attempts("split")] == [0, 3]
    job = forked.store.get("split")
    assert "with merge_micro_batches never instead of merge_micro_batches always" in job.warnings[-1]
    assert job.effective is not None
    assert list(job.effective["effective"]["batches"].values()) == [1, 4]
    for split, whole in zip(forked.outcome("split").points, forked.outcome("whole").points, strict=True):
        assert split == (*whole[:2], pytest.approx(whole[2], abs=1e-5))
    assert_clean(forked.root)
