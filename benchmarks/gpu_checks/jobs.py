"""Runs jobs as the product runs them: a spec file, the launcher with its runner, and `recipes.train` in a process."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .inputs import rows
from .setting import Setting

if TYPE_CHECKING:
    from llama_stack_provider_trl.launch.base import TaskSpec
    from llama_stack_provider_trl.launch.warm_processes import WarmProcesses
    from llama_stack_provider_trl.specs.events import Event
    from llama_stack_provider_trl.specs.job import JobSpec

WARMUP_STEPS = 2
"""Steps without a place in speeds: the first ones allocate memory and choose kernels."""
POLL_SECONDS = 0.1
WARM_SECONDS = 30.0
"""Seconds that the first job of a dry run's check waits for the imports of the warm process; then it starts cold."""


@dataclass(frozen=True)
class Step:
    """A metric point: one per optimizer step."""

    step: int
    time: float
    loss: float
    metrics: dict[str, float]
    tokens_seen: int
    peak_bytes: int


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    finished: bool
    problem: str = ""
    """Why it did not finish."""
    steps: tuple[Step, ...] = ()
    checkpoints: tuple[str, ...] = ()
    """Step checkpoints, the oldest first."""
    weights: str = ""
    """sha256 over the safetensors files of `final`."""
    attention: str = ""
    """The implementation of attention that the model trained with."""
    repeats: str = ""
    """Whether the same job has the same bits again, by its record."""
    metrics_read: str = ""
    """When the metrics of a step were read; empty: in their step, as the job requested."""
    compiled: str = ""
    """Which blocks were compiled, or why none."""
    compile_seconds: float = 0.0
    float8: str = ""
    """Which layers multiplied in 8 bits, or why none."""
    verified: str = ""
    """How `final` was compared with the trained model after writing: logits or weights."""
    logits_difference: float | None = None
    export_seconds: float = 0.0
    """From the last metric point to the written and verified `final`."""
    exit_code: int | None = None
    ended: str = ""
    """Why the runner ended it: hung, for example."""
    seconds: float = 0.0

    @property
    def losses(self) -> tuple[float, ...]:
        return tuple(step.loss for step in self.steps)

    @property
    def step_seconds(self) -> float:
        """Median time of a step after the warmup, from metric point to metric point. Where these are written a step
        later, all but the last are, so that the median is that of steps, too."""
        times = [step.time for step in self.steps[WARMUP_STEPS - 1 :]]
        took = [after - before for before, after in itertools.pairwise(times)]
        return statistics.median(took) if took else 0.0

    @property
    def peak_gib(self) -> float:
        return max((step.peak_bytes for step in self.steps), default=0) / (1 << 30)


def spec(setting: Setting, name: str, model: Path, **changes: Any) -> JobSpec:
    """A job of a few steps. `steps`, `tokens`, `rows`, `lora` (True: on attention and MLP) and any field of JobSpec."""
    from llama_stack_provider_trl.specs.job import DatasetRef, DpoSpec, JobSpec, LoraSpec, OptimizerSpec
    from llama_stack_provider_trl.specs.methods import SftSpec
    from llama_stack_provider_trl.system.files import put_rows

    algorithm, tokens = changes.pop("algorithm", "sft"), changes.pop("tokens", 64)
    batch, steps = changes.pop("batch_size", 2), changes.pop("steps", 4)
    lora = changes.pop("lora", None)
    if lora is True:
        lora = LoraSpec(target_modules=("q_proj", "v_proj"), mlp=True, rank=8, alpha=16)
    root = setting.folder / name
    per_step = batch * changes.get("gradient_accumulation_steps", 1) * changes.get("ranks", 1)
    given = changes.pop("rows", None) or rows(algorithm, steps * per_step, tokens)
    blob = put_rows(root / "datasets", given)
    fields: dict[str, Any] = {
        "job_uuid": name,
        "model": str(model),
        "output_name": name,
        "checkpoint_dir": root / "checkpoints",
        "dataset": DatasetRef(dataset_id="rows", path=blob.path, sha256=blob.sha256, num_rows=blob.num_rows),
        "n_epochs": 1,
        "batch_size": batch,
        "max_seq_length": tokens,
        "dtype": setting.dtype,
        "device": setting.device,
        "num_threads": 1 if setting.is_dry_run else None,
        "optimizer": OptimizerSpec(learning_rate=1e-4),
        "lora": lora,
        "method": DpoSpec() if algorithm == "dpo" else SftSpec(),
        "preflight": "off",  # the estimate has a check of its own
        "attention_mask": "auto",  # this and the next ones as a request has them by default
        "group_by_length": True,
        "padding_free": True,
    }
    return JobSpec.of(**{**fields, **changes})


class Job:
    """A job that the product's launcher runs. Starts it; `wait` returns how it ended.

    Args:
        resume_from: a step checkpoint.
        hang_timeout: seconds without progress after which the runner ends it.
    """

    def __init__(
        self, setting: Setting, job: JobSpec, resume_from: str | None = None, hang_timeout: float | None = None
    ) -> None:
        from llama_stack_provider_trl.launch.base import TaskSpec
        from llama_stack_provider_trl.launch.local import LocalLauncher
        from llama_stack_provider_trl.system.files import RunDir

        run_dir = write_attempt(setting, job, resume_from)
        gpus = setting.gpus(job.ranks)
        port = free_port()
        ports: dict[str, Any] = {"master_port": port, "last_port": port + 100} if job.ranks > 1 else {}
        self.task = TaskSpec(
            job.job_uuid, run_dir, gpus, ranks=job.ranks, hang_timeout=hang_timeout, env=setting.variables, **ports
        )
        self.paths = RunDir(run_dir)
        self.began = time.monotonic()
        self._launcher = LocalLauncher(warm=_warm_processes(self.task) if setting.is_dry_run else None)
        self._launcher.start(self.task)

    def events(self) -> list[Event]:
        from llama_stack_provider_trl.specs.events import iter_events

        return list(iter_events(self.paths.events))

    def until(self, condition: Callable[[list[Event]], bool], keeps_alive: bool = False) -> bool:
        """Wait until the events meet a condition. Returns False where the job ends before they do.

        Args:
            keeps_alive: touch the event file, so that the job does not count as hung while it imports its libraries.
        """
        while not condition(self.events()):
            if self.is_over():
                return condition(self.events())
            if keeps_alive:
                self.paths.events.touch(0o600)
            time.sleep(POLL_SECONDS)
        return True

    def is_over(self) -> bool:
        return str(self._launcher.poll(self.task).state) in ("exited", "unknown")

    def cancel(self) -> None:
        self._launcher.cancel(self.task)

    def stacks(self) -> str:
        """The Python stacks of the ranks when the runner found the job hung."""
        return self._launcher.poll(self.task).stacks

    def wait(self) -> Outcome:
        while not self.is_over():
            time.sleep(POLL_SECONDS)
        observed = self._launcher.poll(self.task)
        seconds = time.monotonic() - self.began
        ended = str(observed.ended or "")
        problem = ended or observed.launch_error or f"exit code {observed.exit_code}"
        return outcome(self.paths.root, seconds, observed.exit_code, problem, ended)


_warm: list[WarmProcesses] = []
_warm_lock = threading.Lock()


def _warm_processes(task: TaskSpec) -> WarmProcesses:
    """Warm processes for all jobs of a dry run's check. Most of such a job's time is the import of torch."""
    from llama_stack_provider_trl.launch.torchrun import training_environment
    from llama_stack_provider_trl.launch.warm_processes import WarmProcesses

    with _warm_lock:
        if not _warm:
            _warm.append(WarmProcesses())
            _warm[0].prepare(task.python, training_environment(task, os.environ))
            deadline = time.monotonic() + WARM_SECONDS
            while not _warm[0].pids() and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        return _warm[0]


def run(setting: Setting, job: JobSpec, resume_from: str | None = None) -> Outcome:
    """Run one job to its end."""
    return Job(setting, job, resume_from).wait()


def run_all(
    setting: Setting, jobs: Sequence[JobSpec], how: Callable[[Setting, JobSpec], Outcome] = run
) -> list[Outcome]:
    """Run several jobs one after the other. In a dry run, which measures no time, they run side by side."""
    with ThreadPoolExecutor(2 if setting.is_dry_run else 1) as pool:
        return list(pool.map(lambda job: how(setting, job), jobs))


def run_alone(setting: Setting, job: JobSpec, *options: str) -> tuple[Outcome, dict[str, Any]]:
    """Run one job in `gpu_checks.trainer`, which changes what no request can. Returns what it recorded, too."""
    ((ended, recorded),) = train_in_one_process(setting, [job], *options).wait()
    return ended, recorded


@dataclass(frozen=True)
class TrainerProcess:
    """A running `gpu_checks.trainer`."""

    popen: subprocess.Popen[bytes]
    run_dirs: tuple[Path, ...]
    began: float

    def wait(self) -> list[tuple[Outcome, dict[str, Any]]]:
        """How each job ended, and what was recorded of it: nothing where it failed."""
        exit_code = self.popen.wait()
        seconds = time.monotonic() - self.began
        return [(outcome(one, seconds, exit_code, f"exit code {exit_code}"), _recorded(one)) for one in self.run_dirs]


def _recorded(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "recorded.json"
    return json.loads(path.read_text()) if path.exists() else {}


def train_in_one_process(setting: Setting, jobs: Sequence[JobSpec], *options: str) -> TrainerProcess:
    """Start `gpu_checks.trainer` for jobs that run one after the other, in the environment of the first one's task."""
    from llama_stack_provider_trl.launch.base import TaskSpec
    from llama_stack_provider_trl.launch.torchrun import training_environment

    run_dirs = tuple(write_attempt(setting, job) for job in jobs)
    task = TaskSpec(jobs[0].job_uuid, run_dirs[0], setting.gpus(1), env=setting.variables)
    arguments = [*options, *(f"{one}/spec.json" for one in run_dirs)]
    with (run_dirs[0] / "log").open("wb") as log:
        popen = start_trainer(arguments, training_environment(task, os.environ), log)
    return TrainerProcess(popen, run_dirs, time.monotonic())


def start_trainer(arguments: Sequence[str], environ: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-W", "ignore", "-m", "gpu_checks.trainer", *arguments]
    return subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def write_attempt(setting: Setting, job: JobSpec, resume_from: str | None = None) -> Path:
    """Write spec.json for an attempt at a job; returns its run directory."""
    from llama_stack_provider_trl.specs.job import AttemptSpec
    from llama_stack_provider_trl.system.files import RunDir

    run_dir = setting.folder / job.job_uuid / "attempts" / ("2" if resume_from else "1")
    run_dir.mkdir(parents=True)
    attempt = AttemptSpec(
        job=job,
        attempt=1,
        run_dir=run_dir,
        world_size=job.ranks,
        resume_from=Path(resume_from) if resume_from else None,
    )
    RunDir(run_dir).spec.write_text(attempt.model_dump_json())
    return run_dir


def outcome(run_dir: Path, seconds: float, exit_code: int | None, problem: str, ended: str = "") -> Outcome:
    """How a job ended, from its events. `problem` counts where they name none."""
    from llama_stack_provider_trl.specs.events import CheckpointSaved, Failed, Finished, Prepared, Progress, iter_events
    from llama_stack_provider_trl.system.files import RunDir

    events = list(iter_events(RunDir(run_dir).events))
    points = [event for event in events if isinstance(event, Progress)]
    saved = [event for event in events if isinstance(event, CheckpointSaved)]
    failures = [event.message for event in events if isinstance(event, Failed)]
    prepared = next((event for event in events if isinstance(event, Prepared)), None)
    finished = any(isinstance(event, Finished) for event in events)
    final = next((event for event in saved if event.kind == "final"), None)
    steps = tuple(
        Step(
            point.step,
            point.time,
            point.metrics.get("loss", float("nan")),
            dict(point.metrics),
            point.tokens_seen or 0,
            point.peak_memory_bytes,
        )
        for point in points
    )
    return Outcome(
        finished=finished,
        problem="" if finished else (failures or [f"{problem}: {_last_lines(run_dir)}"])[0],
        steps=steps,
        checkpoints=tuple(str(event.path) for event in saved if event.kind == "step"),
        weights=digest(final.path) if final else "",
        attention=str(prepared.effective.get("attention", "")) if prepared else "",
        repeats=str(prepared.effective.get("repeats", "")) if prepared else "",
        metrics_read=str(prepared.effective.get("metrics_read", "")) if prepared else "",
        compiled=str(prepared.effective.get("compiled_blocks", "")) if prepared else "",
        float8=str(prepared.effective.get("float8", "")) if prepared else "",
        compile_seconds=float(prepared.effective.get("compile_seconds", 0.0)) if prepared else 0.0,
        verified=str(final.verified or "") if final else "",
        logits_difference=final.logits_difference if final else None,
        export_seconds=final.time - points[-1].time if final and points else 0.0,
        exit_code=exit_code,
        ended=ended,
        seconds=seconds,
    )


def digest(folder: Path) -> str:
    """sha256 over the names and bytes of the safetensors files of a checkpoint; empty where it has none."""
    found, paths = hashlib.sha256(), sorted(folder.glob("*.safetensors"))
    for path in paths:
        found.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while part := file.read(1 << 24):
                found.update(part)
    return found.hexdigest() if paths else ""


def problems(outcomes: Mapping[str, Outcome]) -> str:
    """Name the jobs that did not finish or did no step; empty where there are none."""
    failed = {name: one.problem for name, one in outcomes.items() if not one.finished}
    failed |= {name: "no metric point" for name, one in outcomes.items() if one.finished and not one.steps}
    return "; ".join(f"{name}: {problem}" for name, problem in failed.items())


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference of two series; infinite where their lengths differ or one is empty."""
    if len(one) != len(other) or not one:
        return float("inf")
    found = [abs(a - b) / max(abs(b), 1e-9) for a, b in zip(one, other, strict=True)]
    return max(value if value == value else float("inf") for value in found)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _last_lines(run_dir: Path) -> str:
    """The end of the first log that has any content."""
    for log in sorted(run_dir.glob("*log*")):
        if log.is_file() and (text := log.read_text(errors="replace").strip()):
            return " ".join(text.splitlines()[-3:])[-600:]
    return "its log is empty"
