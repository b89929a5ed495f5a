"""Fakes that keep the contracts they stand in for: `tests/process/test_engine_launcher.py` holds both to the same."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel

from llama_stack_provider_trl.launch.base import Observation, TaskSpec, TaskState
from llama_stack_provider_trl.specs.events import EventWriter
from llama_stack_provider_trl.specs.job import DatasetRef, JobSpec, OptimizerSpec
from llama_stack_provider_trl.specs.methods import (
    CpoSpec,
    DpoSpec,
    KtoSpec,
    MethodSpec,
    OrpoSpec,
    RewardSpec,
    SftSpec,
)
from llama_stack_provider_trl.system.files import RunDir

# The kernel splits a `#!` line at spaces, and the path of a checkout may have one: sh starts the interpreter,
# which in turn reads these lines as a string.
SHEBANG = f"""#!/bin/sh
'''exec' "{sys.executable}" -S "$0" "$@"
' '''"""


class FakeClock:
    """Seconds since the epoch, which only a test advances."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class FakeTask:
    spec: TaskSpec
    seen: Observation
    cancels: int = 0
    pauses: int = 0


class FakeLauncher:
    """A Launcher whose processes are played by the test: `emit` writes their events, `exit` ends them.

    Args:
        obedient: a task that is cancelled ends at once, by SIGTERM; otherwise the test ends it.
    """

    def __init__(self, obedient: bool = True) -> None:
        self.obedient = obedient
        self.tasks: dict[str, FakeTask] = {}
        self.started: list[str] = []
        """Ids of tasks whose process was started, in order; one entry per process."""
        self.refuse: OSError | None = None
        """Raised by the next starts, while set."""

    def start(self, task: TaskSpec) -> None:
        if self.refuse is not None:
            raise self.refuse
        if task.task_id not in self.tasks:
            self.tasks[task.task_id] = FakeTask(task, Observation(TaskState.running))
            self.started.append(task.task_id)

    def poll(self, task: TaskSpec) -> Observation:
        known = self.tasks.get(task.task_id)
        return Observation(TaskState.unknown) if known is None else known.seen

    def cancel(self, task: TaskSpec) -> None:
        known = self.tasks.setdefault(task.task_id, FakeTask(task, Observation(TaskState.exited)))
        known.cancels += 1
        if self.obedient and known.seen.state is not TaskState.exited:
            self.exit(task.task_id, -15)

    def pause(self, task: TaskSpec) -> None:
        self.tasks[task.task_id].pauses += 1

    def sweep(self, root: Path, keep: Collection[Path]) -> list[Path]:
        left = [
            task
            for task in self.tasks.values()
            if task.seen.state is not TaskState.exited
            and task.spec.run_dir.is_relative_to(root)
            and task.spec.run_dir not in keep
        ]
        for task in left:
            self.exit(task.spec.task_id, -9)
        return [task.spec.run_dir for task in left]

    def emit(self, task_id: str, *events: BaseModel) -> None:
        """Append events to the task's event file, as its rank 0 would."""
        writer = EventWriter(RunDir(self.tasks[task_id].spec.run_dir).events)
        for event in events:
            writer.write(event)
        writer.close()

    def print(self, task_id: str, text: str) -> None:
        RunDir(self.tasks[task_id].spec.run_dir).log.write_text(text)

    def exit(self, task_id: str, exit_code: int | None, **seen: Any) -> None:
        self.tasks[task_id].seen = Observation(TaskState.exited, exit_code, **seen)

    def wait_for_device(self, task_id: str, detail: str) -> None:
        task = self.tasks[task_id]
        task.seen = replace(task.seen, state=TaskState.waiting, detail=detail)


def method_of(algorithm: str) -> MethodSpec:
    """A method with its defaults, of those that have them."""
    methods: dict[str, MethodSpec] = {
        "sft": SftSpec(),
        "dpo": DpoSpec(),
        "orpo": OrpoSpec(),
        "cpo": CpoSpec(),
        "simpo": CpoSpec(algorithm="simpo", loss_type="simpo"),
        "reward": RewardSpec(),
        "kto": KtoSpec(),
    }
    return methods[algorithm]


def job_spec(job_uuid: str = "job-1", algorithm: str = "sft", **changes: object) -> JobSpec:
    """A small, complete job."""
    values: dict[str, object] = {
        "job_uuid": job_uuid,
        "method": changes.pop("method", None) or method_of(algorithm),
        "model": "/models/tiny",
        "output_name": "tiny-tuned",
        "checkpoint_dir": Path("/checkpoints") / job_uuid,
        "dataset": DatasetRef(dataset_id="rows", path=Path("/blobs/rows.jsonl"), sha256="0" * 64, num_rows=8),
        "n_epochs": 1,
        "batch_size": 2,
        "optimizer": OptimizerSpec(learning_rate=1e-4),
        "device": "cpu",
    }
    return JobSpec.of(**{**values, **changes})


def fake_context(settings: Any, **more: Any) -> Any:
    """What the HTTP application uses of a service before a handler runs: no token was created, nothing is recorded."""
    from llama_stack_provider_trl.system.offload import CostlyWork
    from llama_stack_provider_trl_remote.service.http.received import Bodies
    from llama_stack_provider_trl_remote.service.metrics.latencies import Latencies

    names = {"node_name": "head", "node_token": "of this machine's own agent"}
    known = {
        "tokens": lambda token: None,
        "store": SimpleNamespace(nodes=SimpleNamespace(credential=lambda sha256: None)),
        "bodies": Bodies(),
        "work": CostlyWork(),
        "metrics": SimpleNamespace(latencies=Latencies()),
    }
    return SimpleNamespace(**{"settings": settings, "audit": None, "refusals": None, **names, **known, **more})
