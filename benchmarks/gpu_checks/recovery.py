"""Whether jobs repeat, resume, end on a signal, and are found when they hang."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from .inputs import DEEP, EIGHT_B_WIDE, HALF_B, ONE_B, ONE_B_WIDE, Shape, model
from .jobs import Job, Outcome, largest_difference, problems, run, run_all, spec
from .report import Finding
from .setting import Setting

END_SECONDS = 10.0
"""From SIGTERM to the end of the process, which nothing in it delays."""
SAME_LOSS = 1e-2
"""Fraction by which losses of two equal jobs may differ where kernels add in an order of their own: a few times the
rounding of bf16, 4e-3."""
ENDING_SECONDS = 30.0
"""From the verdict to the end of a hung job: stacks are collected, then SIGTERM and SIGKILL follow."""


def repeat_and_resume(setting: Setting) -> Finding:
    """Decides whether the same job has the same bits twice, and a resumed one those of an undisturbed one."""
    return _repeat(setting, DEEP, {"steps": 8, "tokens": 512, "batch_size": 8, "save_steps": 4})


def repeat_at_1b(setting: Setting) -> Finding:
    """Decides the same for LoRA on 1B."""
    return _repeat(setting, ONE_B, {"steps": 4, "tokens": 1024, "batch_size": 4, "save_steps": 2, "lora": True})


def repeat_all_weights(setting: Setting) -> Finding:
    """Decides the same for all weights of two blocks of 1B, whose table of embeddings gets gradients, too."""
    return _repeat(setting, ONE_B_WIDE, {"steps": 4, "tokens": 1024, "batch_size": 4, "save_steps": 2})


def repeat_a_long_row(setting: Setting) -> Finding:
    """Decides the same for a row of 8,192 tokens and blocks of 8B, whose attention takes more than 512 MiB to add in a
    fixed order: the memory estimate allows that."""
    sizes = {"steps": 4, "tokens": 8192, "batch_size": 1, "save_steps": 2, "lora": True, "preflight": "refuse"}
    return _repeat(setting, EIGHT_B_WIDE, sizes)


def _repeat(setting: Setting, shape: Shape, sizes: dict[str, Any]) -> Finding:
    path, sizes = model(setting, shape), {**sizes, **({"tokens": 64, "batch_size": 2} if setting.is_dry_run else {})}
    jobs = [spec(setting, name, path, **sizes) for name in ("first", "second")]
    first, second = run_all(setting, jobs)
    if failed := problems({"first": first, "second": second}):
        return Finding(False, failed)
    if not first.checkpoints:
        return Finding(False, "no step checkpoint was written")
    resumed = run(setting, spec(setting, "resumed", path, **sizes), resume_from=first.checkpoints[0])
    return judge_resume(first, second, resumed)


def judge_resume(first: Outcome, second: Outcome, resumed: Outcome) -> Finding:
    """Passes where all three have the same weights, byte for byte."""
    if failed := problems({"first": first, "second": second, "resumed": resumed}):
        return Finding(False, failed)
    again = largest_difference(second.losses, first.losses)
    rest = first.losses[len(first.losses) - len(resumed.losses) :]
    after = largest_difference(resumed.losses, rest)
    is_partial = 0 < len(resumed.losses) < len(first.losses)
    is_equal = bool(first.weights) and first.weights == second.weights
    passed = is_partial and is_equal and resumed.weights == first.weights
    summary = (
        f"the same job twice: weights {'equal' if is_equal else 'DIFFER'}, losses within {again:.1e}; resumed at step "
        f"{len(first.losses) - len(resumed.losses)}: weights "
        f"{'equal' if resumed.weights == first.weights else 'DIFFER'}, losses within {after:.1e}; by its record the "
        f"job repeats {first.repeats or '-'}"
    )
    digests = {"first": first.weights, "second": second.weights, "resumed": resumed.weights}
    return Finding(passed, summary, figures={"digests": digests})


@dataclass(frozen=True)
class Terminated:
    seconds: float
    """From the signal to the end of the process."""
    interrupted: Outcome
    resumed: Outcome | None
    """None: there was no checkpoint to resume from."""
    saved_at: int = 0
    """The step of that checkpoint."""


def sigterm(setting: Setting) -> Finding:
    """Decides whether SIGTERM in the middle of a step ends a job at once, and its checkpoint can be resumed from."""
    path = model(setting, DEEP if setting.is_dry_run else HALF_B)
    sizes = (
        {"steps": 400, "save_steps": 2}
        if setting.is_dry_run
        else {"steps": 60, "save_steps": 4, "tokens": 1024, "lora": True}
    )
    job = spec(setting, "terminated", path, **sizes)
    running = Job(setting, job)
    if not running.until(lambda events: any(one.type == "checkpoint" for one in events)):
        return Finding(False, f"the job ended before a step checkpoint: {running.wait().problem}")
    os.kill(_trainer(running), signal.SIGTERM)
    began = time.monotonic()
    interrupted = running.wait()
    seconds = time.monotonic() - began
    resumed, saved_at = None, 0
    if interrupted.checkpoints:
        newest = interrupted.checkpoints[-1]
        resumed, saved_at = _resume_for_a_step(setting, job, newest), int(newest.rpartition("-")[2])
    return judge_sigterm(Terminated(seconds, interrupted, resumed, saved_at))


def _resume_for_a_step(setting: Setting, job: object, checkpoint: str) -> Outcome:
    """Resume, wait for one more metric point, and cancel the rest."""
    from dataclasses import replace

    resumed = Job(setting, job, resume_from=checkpoint)  # type: ignore[arg-type]
    is_there = resumed.until(lambda events: any(one.type == "progress" for one in events))
    resumed.cancel()
    ended = resumed.wait()
    return replace(ended, finished=is_there)


def judge_sigterm(found: Terminated) -> Finding:
    exit_code = found.interrupted.exit_code
    resumes = found.resumed is not None and found.resumed.finished and bool(found.resumed.steps)
    first = found.resumed.steps[0].step if found.resumed and found.resumed.steps else None
    passed = exit_code == -signal.SIGTERM and found.seconds < END_SECONDS and resumes and first == found.saved_at + 1
    problem = found.resumed.problem if found.resumed else "no checkpoint"
    after = (
        f"resumed at step {first}, its checkpoint is of step {found.saved_at}" if resumes else f"not resumed: {problem}"
    )
    summary = f"ended after {found.seconds:.1f} s with exit code {exit_code} (expected {-signal.SIGTERM}); {after}"
    return Finding(passed, summary)


@dataclass(frozen=True)
class Hung:
    outcome: Outcome
    seconds: float
    """From SIGSTOP to the end of the job."""
    timeout: float
    stacks: str


def hang(setting: Setting) -> Finding:
    """Decides whether a job whose rank 1 is stopped counts as hung, although rank 0 waits in NCCL at full CPU load."""
    timeout = 10.0
    job = spec(setting, "hang", model(setting, DEEP), ranks=2, batch_size=1, sharding=_full(), steps=400)
    running = Job(setting, job, hang_timeout=timeout)
    if not running.until(lambda events: any(one.type == "progress" for one in events), keeps_alive=True):
        return Finding(False, f"the job ended before its first step: {running.wait().problem}")
    os.kill(_other_rank(running), signal.SIGSTOP)
    began = time.monotonic()
    found = running.wait()
    return judge_hang(Hung(found, time.monotonic() - began, timeout, running.stacks()))


def judge_hang(found: Hung) -> Finding:
    is_found = found.outcome.ended == "hung" and found.seconds < found.timeout + ENDING_SECONDS
    if found.outcome.ended != "hung":
        return Finding(False, f"the job ended otherwise after {found.seconds:.0f} s: {found.outcome.problem}")
    summary = f"found {found.seconds:.0f} s after SIGSTOP (timeout {found.timeout:.0f} s), stacks of rank 0: "
    summary += "recorded" if found.stacks else "MISSING"
    return Finding(is_found and bool(found.stacks), summary)


def _full() -> object:
    from llama_stack_provider_trl.specs.job import ShardingSpec

    return ShardingSpec()


def _trainer(job: Job) -> int:
    """Pid of the training process that the runner started."""
    from llama_stack_provider_trl.launch.runner import RunnerStatus

    status = RunnerStatus.read(job.paths.runner_status)
    if status is None or status.trainer is None:
        raise RuntimeError("the runner has reported no training process")
    return status.trainer.pid


def _other_rank(job: Job) -> int:
    """Pid of rank 1: each rank has a file in `stacks`, and rank 0 reports its pid."""
    first = next(event.pid for event in job.events() if event.type == "started")
    others = [int(path.name) for path in job.paths.stacks.iterdir() if int(path.name) != first]
    if len(others) != 1:
        raise RuntimeError(f"expected the pids of two ranks in {job.paths.stacks}, found {first} and {others}")
    return others[0]
