"""Jobs that are interrupted end as if they had not been: same weights, byte for byte, every metric point once."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.reader import read_samples
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.launch.base import Launcher
from llama_stack_provider_trl.launch.local import LocalLauncher
from llama_stack_provider_trl.launch.ports import PortRange
from llama_stack_provider_trl.launch.runner import RunnerStatus
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.events import Reason
from llama_stack_provider_trl.specs.exports import GGUF_FILE, ExportSpec
from llama_stack_provider_trl.specs.job import JobSpec
from llama_stack_provider_trl.specs.merge import MergeInput, MergeSpec
from llama_stack_provider_trl.specs.methods import (
    CpoSpec,
    DistillationSpec,
    GrpoSpec,
    KtoSpec,
    OrpoSpec,
    RewardSpec,
    UldSpec,
)
from llama_stack_provider_trl.specs.rewards import RewardSource
from llama_stack_provider_trl.specs.work import MERGING, EvaluateSpec, ExportWork, MergeWork
from llama_stack_provider_trl.system import process
from llama_stack_provider_trl.system.files import RunDir
from tests.census import assert_clean
from tests.fakes import FakeClock
from tests.forked import forked_warm_processes
from tests.required import in_full
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, LORA, SAMPLES, SFT_ROWS, job_spec, reference_to
from tests.zygote import ForkLauncher

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

GRPO = GrpoSpec(
    rewards=(RewardSource(name="letter", check=AnswerCheck(type="regex", pattern="[ea]")),),
    num_generations=4,
    max_completion_length=4,
    beta=0.1,
)


def distillation() -> DistillationSpec:
    """A function: to make the teacher takes seconds, which only a test is to take."""
    return DistillationSpec(reference=reference_to(str(tiny_model(tied=False))), max_completion_length=4)


def other_vocabulary() -> DistillationSpec:
    """The same, of a teacher with another vocabulary."""
    teacher = reference_to(str(tiny_model(vocabulary=330)))
    uld = UldSpec(hybrid=True, skip_end=False)
    return DistillationSpec(reference=teacher, max_completion_length=4, beta=0.5, uld=uld)


KINDS: dict[str, dict[str, Any]] = {
    "sft-lora": {"algorithm": "sft", "lora": LORA, "validation_rows": SFT_ROWS[:4]},
    "dpo-full": {"algorithm": "dpo", "samples": SAMPLES},
    "sft-full": {"algorithm": "sft", "gradient_accumulation_steps": 2, "n_epochs": 6},
    "dpo-lora": {"algorithm": "dpo", "lora": LORA, "samples": SAMPLES},
    "grpo-lora": {"algorithm": "grpo", "lora": LORA, "rows": SFT_ROWS, "method": GRPO},
    "distillation-full": {"algorithm": "distillation", "rows": SFT_ROWS, "method": distillation},
    "other-vocabulary-lora": {
        "algorithm": "distillation",
        "lora": LORA,
        "rows": SFT_ROWS,
        "method": other_vocabulary,
    },
}
UNPAIRED = [
    {"prompt": row["prompt"], "completion": row["chosen" if n % 3 else "rejected"], "label": bool(n % 3)}
    for n, row in enumerate(DPO_ROWS)
]
SIMPO = CpoSpec(algorithm="simpo", loss_type="simpo", beta=2.0, gamma=0.7, alpha=0.0)
KINDS_ON_ROWS: dict[str, dict[str, Any]] = {
    "orpo-lora": {"algorithm": "orpo", "lora": LORA, "method": OrpoSpec()},
    "cpo-full": {"algorithm": "cpo", "method": CpoSpec()},
    "simpo-lora": {"algorithm": "simpo", "lora": LORA, "method": SIMPO},
    "kto-full": {"algorithm": "kto", "rows": UNPAIRED, "method": KtoSpec()},
    "reward-lora": {"algorithm": "reward", "lora": LORA, "method": RewardSpec()},
}
"""Of the other methods. They answer no prompts, so that one test is enough for each."""
KILLS = int(os.environ.get("TRL_TEST_KILLS", "6"))
"""Interruptions per signal; more by command: TRL_TEST_KILLS=200."""


Point = tuple[str, int, float | None]


class Outcome(NamedTuple):
    """What a job ended with."""

    weights: str
    """Digest of the exported weights."""
    points: list[Point]
    """Kind, step and loss of every metric point."""
    samples: list[tuple[str, int, list[str]]]
    """Kind, step and texts of every set of answers."""


class Undisturbed(NamedTuple):
    outcome: Outcome
    metrics: list[dict[str, float]]
    seconds: float


class World:
    """A data directory with a real store and a real supervisor, whose clock jumps over every wait for a retry."""

    def __init__(self, root: Path, launcher: Launcher) -> None:
        self.root, self.launcher = root, launcher
        self.clock = FakeClock()
        self.store = Store(root / "jobs.sqlite3", self.clock)
        self.supervisor = Supervisor(self.store, launcher, ["cpu"], root, hang_timeout=120, ports=PortRange())

    def add(self, name: str, kind: str, **changes: Any) -> None:
        given = {**KINDS, **KINDS_ON_ROWS}[kind]
        values = {**given, "n_epochs": 4, "batch_size": 2, "save_steps": 3, "num_threads": 1, "retries": 1000}
        values |= {name: value for name, value in given.items() if name != "algorithm"} | changes
        values |= {"method": values["method"]()} if callable(values.get("method")) else {}
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

    def ended(self, name: str) -> bool:
        return self.state(name) in (JobState.completed, JobState.failed)

    def finish(self, name: str) -> None:
        self.until(lambda: self.ended(name))
        assert self.state(name) is JobState.completed, self.store.get(name).message

    def spec(self, name: str) -> JobSpec:
        return self.store.get(name).spec

    def outcome(self, name: str) -> Outcome:
        (file,) = (self.spec(name).checkpoint_dir / "final").glob("*model.safetensors")
        points = [
            (point.kind, point.step, point.metrics.get("loss", point.metrics.get("eval_loss")))
            for point in self.store.points(name)
        ]
        samples = [
            (one.kind, one.step, [answer.text for answer in one.answers]) for one in read_samples(self.store, name)[0]
        ]
        return Outcome(hashlib.sha256(file.read_bytes()).hexdigest(), points, samples)

    def metrics(self, name: str) -> list[dict[str, float]]:
        """Of every metric point, without what the clock and the machine's memory decide."""
        timed = {"tokens_per_second", "memory_bytes", "peak_memory_bytes"}
        points = [point.metrics for point in self.store.points(name)]
        return [{key: value for key, value in point.items() if key not in timed} for point in points]


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_training_killed_at_random_moments_ends_with_the_weights_of_one_that_was_not(
    forked: World, zygote: ForkLauncher, undisturbed: dict[str, Undisturbed], number: int
) -> None:
    rng = random.Random(int(number))
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
            if attempt > 4 or not zygote.kill(task, number):
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


@pytest.mark.parametrize("point", ["saving-6", "saved-6", "announced-6", "exporting-final", "exported-final"])
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
    points = ["answered-2", "step-5", "answered-8", "saving-9", "answered-13"]
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


@pytest.mark.parametrize("kind", ["orpo-lora", "kto-full", *in_full("cpo-full", "simpo-lora", "reward-lora")])
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


@pytest.mark.parametrize("kind", ["dpo-full", "grpo-lora", *in_full("sft-lora", "distillation-full")])
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
