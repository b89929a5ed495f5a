"""A supervisor with real tasks, whose processes are stopped and killed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.jobs.store.reader import read_samples
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.jobs.supervision.supervisor import Supervisor
from llama_stack_provider_trl.launch.base import Launcher
from llama_stack_provider_trl.launch.ports import PortRange
from llama_stack_provider_trl.launch.runner import RunnerStatus
from llama_stack_provider_trl.specs.answer_checks import AnswerCheck
from llama_stack_provider_trl.specs.job import JobSpec
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
from tests.fakes import FakeClock
from tests.tiny import tiny_model
from tests.training import DPO_ROWS, LORA, SAMPLES, SFT_ROWS, job_spec, reference_to

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


Point = tuple[str, int, float | None]


class Outcome(NamedTuple):
    """What a job ended with."""

    weights: str
    """Digest of the exported weights."""
    points: list[Point]
    """Kind, step and loss of every metric point."""
    samples: list[tuple[str, int, list[str]]]
    """Kind, step and texts of every set of answers."""


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
        values["preflight"] = "off"  # as in `Ranks.run`, whose `estimates` are here `preflight="refuse"`
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


def is_forked(status: RunnerStatus) -> bool:
    """Whether the runner has torch, which it does not import itself."""
    assert status.runner is not None
    return "libtorch" in Path(f"/proc/{status.runner.pid}/maps").read_text()
