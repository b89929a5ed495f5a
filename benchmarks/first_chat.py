"""How long it takes from a completed job to the first token of a chat with its result.

    .venv/bin/python benchmarks/first_chat.py --json first_chat.json
    .venv/bin/python benchmarks/first_chat.py --model DIR

Starts a training service on the CPU and trains an adapter of SmolLM2-135M, which it makes from a package of PyPI. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import requests
from machine import REPOSITORY, begin, finish, parser_of

sys.path.insert(0, str(REPOSITORY))

from tests.contract.payloads import LORA, QUESTIONS, sft
from tests.contract.service import TrainingService, running
from tests.contract.stack import SFT
from tests.programs import smollm2

TARGETS = {"cold": 10.0, "warm": 1.5}
"""Seconds, at rest."""
TIMEOUT = 600
QUESTION = "What is 3 times two?"
SHOWN = {
    "command_cold": "trl-remote chat, the job has just completed",
    "command_warm": "the same again",
    "click_cold": "a request, the job has just completed",
    "click_warm": "the same again",
}


def main() -> int:
    options = parse_options()
    report = begin("torch", "transformers", "peft")
    model = options.model or smollm2()
    with (
        tempfile.TemporaryDirectory(prefix="first-chat-") as scratch,
        running(TrainingService(Path(scratch), warm_start=True)) as service,
    ):
        service.register("questions", QUESTIONS)
        report["seconds"] = measure(service, model, options.repeats)
    missed = print_report(report)
    finish(report, options.json)
    return 1 if missed else 0


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, metavar="DIR", help="the base model (SmolLM2-135M)")
    parser.add_argument("--repeats", type=int, default=3, help="jobs of each kind")
    return parser.parse_args()


def measure(service: TrainingService, model: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds by a command and by a request, each of its own job, whose training ends the process that answered."""
    found: dict[str, list[float]] = {name: [] for name in SHOWN}
    trained(service, model, "first")  # fills the page cache
    for number in range(repeats):
        for way, first_token in (("command", by_command), ("click", by_request)):
            job = f"{way}-{number}"
            trained(service, model, job)
            for kind in ("cold", "warm"):
                found[f"{way}_{kind}"].append(first_token(service, job))
    return found


def trained(service: TrainingService, model: Path, job: str) -> None:
    """Train an adapter in one step."""
    body = sft(job, "questions", model=str(model), algorithm_config=LORA)
    body["training_config"]["max_steps_per_epoch"] = 1
    service.submit(SFT, body)
    service.wait(job, "completed", timeout=TIMEOUT)


def by_command(service: TrainingService, job: str) -> float:
    """Seconds from the start of the command to the first byte that it prints."""
    program = str(Path(sys.executable).with_name("trl-remote"))
    asked = [program, "chat", job, "-m", QUESTION, "--temperature", "0", "--max-tokens", "8"]
    began = time.monotonic()
    with subprocess.Popen(
        asked, stdout=subprocess.PIPE, bufsize=0, env={**os.environ, "TRL_SERVICE_URL": service.url}
    ) as started:
        assert started.stdout is not None
        first = started.stdout.read(1)
        seconds = time.monotonic() - began
        started.stdout.read()
    if started.returncode or not first:
        raise RuntimeError(f"trl-remote chat {job} ended with {started.returncode}")
    return seconds


def by_request(service: TrainingService, job: str) -> float:
    """Seconds from the request, as the playground sends it, to the first part of the answer's text."""
    body = {"model": f"ft:{job}", "messages": [{"role": "user", "content": QUESTION}], "stream": True}
    began = time.monotonic()
    with requests.post(
        f"{service.url}/openai/v1/chat/completions",
        json={**body, "temperature": 0, "max_tokens": 8},
        stream=True,
        timeout=TIMEOUT,
    ) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            data = line.removeprefix(b"data: ")
            if line and data != b"[DONE]" and json.loads(data)["choices"][0]["delta"].get("content"):
                return time.monotonic() - began
    raise RuntimeError(f"the result of {job} answered nothing")


def print_report(report: dict[str, Any]) -> list[str]:
    """Print medians and spreads in seconds; returns the targets that were missed."""
    missed = []
    print("\n| from ... to the first token, seconds | median | | target |\n|---|---|---|---|")
    for name, shown in SHOWN.items():
        values, target = report["seconds"][name], TARGETS[name.rpartition("_")[2]]
        middle = statistics.median(values)
        print(f"| {shown} | {middle:.2f} | {min(values):.2f} to {max(values):.2f} | {target} |")
        if middle > target:
            missed.append(f"{shown}: {middle:.2f} s, at most {target} s were the target")
    print("\n".join(missed))
    return missed


if __name__ == "__main__":
    sys.exit(main())
