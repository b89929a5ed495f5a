"""How long a job takes to its first step: started warm and cold, after a kill, and a preflight.

    .venv/bin/python benchmarks/start.py --json out.json

Starts a training service on the CPU, once with `warm_start` and once without it, with a tiny model. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from machine import REPOSITORY, begin, finish, parser_of

sys.path.insert(0, str(REPOSITORY))

from llama_stack_provider_trl.launch.runner import RunnerStatus
from llama_stack_provider_trl.specs.events import Progress, iter_events
from llama_stack_provider_trl.system.files import RunDir
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import TrainingService, running
from tests.contract.stack import SFT, poll

TARGETS = {"warm": {"first_step": 1.5, "continued": 3.0}, "cold": {"first_step": 5.0}}
"""Seconds, at rest."""
WAIT = 120.0


def main() -> int:
    options = parse_options()
    report = begin("torch", "transformers", "trl")
    with tempfile.TemporaryDirectory(prefix="start-") as scratch:
        for kind in ("warm", "cold"):
            root = Path(scratch, kind)
            root.mkdir()
            report[kind] = measure(root, kind == "warm", options.repeats)
    report["cold"]["imports"] = [_imports() for _ in range(options.repeats)]
    missed = print_report(report)
    finish(report, options.json)
    return 1 if missed else 0


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="jobs and kills of each kind")
    return parser.parse_args()


def measure(root: Path, is_warm: bool, repeats: int) -> dict[str, list[float]]:
    with running(TrainingService(root, warm_start=is_warm)) as service:
        service.register("questions", QUESTIONS)
        service.wait(service.submit(SFT, sft("first", "questions")), "completed")  # fills the page cache
        if is_warm:
            poll(lambda: _has_warm_process(service), "the imports are done", WAIT)
        return {
            "first_step": [_first_step(service, f"job-{number}") for number in range(repeats)],
            "two_ranks": [_first_step(service, f"ranks-{number}", nproc_per_node=2) for number in range(repeats)],
            "preflight": [_preflight(service) for _ in range(repeats)],
            "continued": [_continued(service, f"killed-{number}") for number in range(repeats)],
        }


def _has_warm_process(service: TrainingService) -> bool:
    """Whether it waits for requests, which it does in a process with one thread and torch."""
    for child in psutil.Process(service.pid).children():
        if "launch.warm" in " ".join(child.cmdline()):
            maps = Path(f"/proc/{child.pid}/maps").read_text()
            return "libtorch" in maps and child.num_threads() == 1 and child.cpu_percent(0.5) == 0
    return False


def _first_step(service: TrainingService, name: str, **options: Any) -> float:
    """Seconds from the request to the first optimizer step, by the time in the training's own event."""
    began = time.time()
    service.submit(SFT, sft(name, "questions"), options=options or None)
    service.wait(name, "completed")
    return _steps(service, name, 1)[0] - began


def _preflight(service: TrainingService) -> float:
    began = time.time()
    answer = service.post("/post-training/preflight", sft("preflight", "questions"))
    assert answer.status_code == 200, answer.text
    return time.time() - began


def _continued(service: TrainingService, name: str) -> float:
    """Seconds from the SIGKILL of a training with a checkpoint to the first step of the next attempt."""
    body = sft(name, "questions")
    body["training_config"]["n_epochs"] = 200
    service.submit(SFT, body, options={"save_steps": 5})
    service.wait_for_checkpoint(name)
    status = RunnerStatus.read(_run_dir(service, name, 1).runner_status)
    assert status is not None
    assert status.trainer is not None
    killed = time.time()
    os.kill(status.trainer.pid, signal.SIGKILL)
    found: Callable[[], list[float]] = lambda: _steps(service, name, 2)  # noqa: E731
    poll(found, "the next attempt trains", WAIT, pause=0.02)
    continued = found()[0] - killed
    service.cancel(name)
    service.wait(name, "cancelled")
    return continued


def _imports() -> float:
    """Seconds that a script which uses TRL takes for its imports alone: what a cold start can be compared with on a
    machine of another speed."""
    began = time.time()
    subprocess.run(
        [sys.executable, "-c", "from trl import DPOTrainer, SFTTrainer; import peft"], check=True, capture_output=True
    )
    return time.time() - began


def _run_dir(service: TrainingService, name: str, attempt: int) -> RunDir:
    return RunDir(service.data_dir / "jobs" / name / "attempts" / str(attempt))


def _steps(service: TrainingService, name: str, attempt: int) -> list[float]:
    """Times of the steps of an attempt."""
    file = _run_dir(service, name, attempt).events
    return [event.time for event in iter_events(file) if isinstance(event, Progress)] if file.exists() else []


def print_report(report: dict[str, Any]) -> list[str]:
    """Print medians and spreads in seconds; returns the targets that were missed."""
    missed = []
    print(f"\n| {'seconds':34} | warm | | cold | |\n|---|---|---|---|---|")
    names = {
        "first_step": "POST to the first step",
        "two_ranks": "the same, 2 FSDP2 ranks",
        "preflight": "preflight",
        "continued": "SIGKILL to the next attempt's step",
        "imports": "a TRL script's imports alone",
    }
    for name, shown in names.items():
        columns = []
        for kind in ("warm", "cold"):
            values = report[kind].get(name)
            if values is None:
                columns += ["", ""]
                continue
            middle, target = statistics.median(values), TARGETS[kind].get(name)
            columns += [f"{middle:.2f}", f"{min(values):.2f} to {max(values):.2f}"]
            if target is not None and middle > target:
                missed.append(f"{shown}, {kind}: {middle:.2f} s, at most {target} s were the target")
        print(f"| {shown:34} | {' | '.join(columns)} |")
    print("\n".join(missed))
    return missed


if __name__ == "__main__":
    sys.exit(main())
