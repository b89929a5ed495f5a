"""How long a POST takes that submits a job over 10,000 rows, and what our provider adds to Llama Stack's memory.

    .venv/bin/python benchmarks/post_latency.py --json out.json

Starts Llama Stack with run.yaml, once without the post_training provider and once with it, in a directory of its own.
No training runs: this program holds the lock of the device, so the first job waits for it and the others are queued
behind that job. Linux only, since memory is read from /proc. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from machine import REPOSITORY, begin, finish, parser_of, spread

sys.path.insert(0, str(REPOSITORY))

from llama_stack_provider_trl.system.process import FileLock
from tests.contract.payloads import sft
from tests.contract.stack import SFT, LlamaStack, poll

DATASET = "benchmark-rows"


def main() -> None:
    options = parse_options()
    report = begin("llama-stack", "pandas", "pydantic")
    rows = synthetic_rows(options.rows, options.row_bytes)
    with tempfile.TemporaryDirectory(prefix="post-latency-") as scratch:
        work = Path(scratch)
        report["without_provider"] = measure_without_provider(work / "without", rows)
        report["with_provider"] = measure_with_provider(work / "with", rows, options.repeats)
    report["summary"] = summarize(report)
    print_report(report, options)
    finish(report, options.json)


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="POSTs that are timed")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--row-bytes", type=int, default=600, help="size of one row as JSON")
    return parser.parse_args()


def synthetic_rows(count: int, size: int) -> list[dict[str, str]]:
    """Rows of words, each different and about `size` bytes as JSON."""
    rng = random.Random(0)
    words = [f"{head}{tail}" for head in ("ka", "lo", "mi", "nu", "re") for tail in ("dor", "fen", "gal", "hus", "tim")]

    def text(length: int) -> str:
        return " ".join(rng.choices(words, k=length // 6 + 1))[:length]

    frame = len(json.dumps({"prompt": "", "completion": ""}))
    requested = (size - frame) // 3
    return [{"prompt": text(requested), "completion": text(size - frame - requested)} for _ in range(count)]


# --- The two servers --------------------------------------------------------------------------------------------------


def measure_without_provider(folder: Path, rows: list[dict[str, str]]) -> dict[str, Any]:
    with running(Stack(folder, post_training=False)) as stack:
        memory = {"started": stack.memory()}
        stack.register(DATASET, rows)
        memory["registered"] = stack.memory()
        assert stack.get(f"/datasetio/iterrows/{DATASET}", limit=-1).ok
        memory["rows_read"] = stack.memory()
        return {"memory": memory, "torch_libraries": stack.torch_libraries()}


def measure_with_provider(folder: Path, rows: list[dict[str, str]], repeats: int) -> dict[str, Any]:
    body_of = partial(sft, dataset_id=DATASET)
    body_of("")  # makes the model
    with running(Stack(folder, post_training=True)) as stack:
        memory = {"started": stack.memory()}
        stack.register(DATASET, rows)
        memory["registered"] = stack.memory()
        with device_held(stack.locks):
            first = timed(partial(stack.submit, SFT, body_of("first")))
            memory["first_post"] = stack.memory()
            # Until its runner stands at the device's lock, and nothing of it computes any more.
            poll(lambda: "held by" in (stack.resources("first")["detail"] or ""), "the first job waits", 30)
            seconds, idle = [], []
            for number in range(repeats):
                body = body_of(f"queued-{number}")
                idle.append(timed(partial(stack.get, "/post-training/jobs")))
                seconds.append(timed(partial(stack.submit, SFT, body)))
                # A job that had started would have taken the CPU from the next POST.
                assert stack.resources(body["job_uuid"])["state"] == "scheduled", stack.status(body["job_uuid"])
                stack.cancel(body["job_uuid"])
            memory["posts"] = stack.memory()
            stack.cancel("first")
            stack.wait("first", "cancelled")
        return {
            "memory": memory,
            "first_post_s": first,
            "post_s": seconds,
            "get_jobs_s": idle,
            "torch_libraries": stack.torch_libraries(),
        }


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Stack(LlamaStack):
    """A Llama Stack with this repository's run.yaml on the CPU: one device, so that one job holds up the others."""

    imports = ()

    def __init__(self, folder: Path, *, post_training: bool) -> None:
        folder.mkdir()
        super().__init__(folder)
        self.locks = folder / "locks"
        self.locks.mkdir()
        if not post_training:
            config = yaml.safe_load(self._config.read_text())
            config["apis"].remove("post_training")
            del config["providers"]["post_training"]
            self._config.write_text(yaml.safe_dump(config, sort_keys=False))

    def resources(self, job_uuid: str) -> dict[str, Any]:
        return dict(self.status(job_uuid)["resources_allocated"])

    def memory(self) -> dict[str, float]:
        """MB resident now and at most so far, of the server's process."""
        time.sleep(1.0)  # whatever the last request left to do
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return {name: int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")}

    def torch_libraries(self) -> list[str]:
        """Names of PyTorch's shared libraries in the server's address space."""
        lines = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        return sorted({Path(line.split()[-1]).name for line in lines if "/libtorch" in line})


@contextmanager
def running(stack: Stack) -> Iterator[Stack]:
    stack.start()
    try:
        yield stack
    finally:
        stack.stop()


@contextmanager
def device_held(locks: Path) -> Iterator[None]:
    """Hold the lock of every device kind that a job could get, as a training of another program would."""
    held = [FileLock(locks / f"{name}.lock") for name in ("cpu", "mps", *(f"cuda-{index}" for index in range(16)))]
    for lock in held:
        if not lock.acquire("benchmarks/post_latency.py"):
            raise RuntimeError(f"{lock.path} is held by {lock.holder()}")
    try:
        yield
    finally:
        for lock in held:
            lock.release()


# --- Figures ----------------------------------------------------------------------------------------------------------


def summarize(report: dict[str, Any]) -> dict[str, Any]:
    ours, plain = report["with_provider"], report["without_provider"]
    rss = {name: values["VmRSS"] for name, values in ours["memory"].items()}
    base = {name: values["VmRSS"] for name, values in plain["memory"].items()}
    return {
        "post_s": spread(ours["post_s"]),
        "get_jobs_s": statistics.median(ours["get_jobs_s"]),
        "added_mb": {
            "after start": rss["started"] - base["started"],
            "after the POSTs, against rows read once": rss["posts"] - base["rows_read"],
            "after the POSTs, against rows registered": rss["posts"] - base["registered"],
        },
    }


def print_report(report: dict[str, Any], options: argparse.Namespace) -> None:
    summary, ours = report["summary"], report["with_provider"]
    post = summary["post_s"]
    print(f"\nPOST supervised-fine-tune, {options.rows} rows of {options.row_bytes} bytes")
    print(f"  {options.repeats} queued jobs: {post['median']:.3f} s (median), {post['min']:.3f} to {post['max']:.3f} s")
    print(f"  the first job of all: {ours['first_post_s']:.3f} s (imports, and the start of its runner)")
    print(f"  for comparison, GET jobs: {summary['get_jobs_s'] * 1000:.1f} ms (median)")
    print(f"\n{'Resident memory of Llama Stack, MB':38}{'now':>8}{'peak':>8}")
    for title, moment, memory in _moments(report):
        print(f"{title:18}{moment:20}{memory['VmRSS']:8.1f}{memory['VmHWM']:8.1f}")
    print("\nAdded by our provider, MB")
    for title, value in summary["added_mb"].items():
        print(f"  {title:42}{value:8.1f}")
    for title in ("without_provider", "with_provider"):
        found = ", ".join(report[title]["torch_libraries"]) or "no"
        print(f"libtorch in the process, {title.replace('_', ' ')}: {found}")


def _moments(report: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, float]]]:
    for title in ("without_provider", "with_provider"):
        for moment, memory in report[title]["memory"].items():
            yield title.replace("_", " "), moment.replace("_", " "), memory


if __name__ == "__main__":
    main()
