"""What the training service takes while it is busy: latency, memory, a page of a long list, a large upload.

    .venv/bin/python benchmarks/service.py --json out.json

One service process on the CPU of this machine, with a data directory and device locks of its own. Two trainings of a
tiny model run beside it at nice 10: one is a job of the service, the other a training process as such, since a CPU is
one device. Takes about 70 seconds. Linux only, since memory is read from /proc. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import requests
from machine import REPOSITORY, begin, finish, parser_of

sys.path.insert(0, str(REPOSITORY))

from llama_stack_provider_trl.system.process import child_environment, tasks_below
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import JOBS, TrainingService
from tests.contract.stack import SFT, poll

NICE = 10
FOREVER = 10_000
"""Epochs: nothing ends by itself while something is measured."""
STATUS = f"/v1{JOBS}/training/status"
PAGE = f"/v1{JOBS}?limit=100"
BYTES_PER_ROW = 1000


def main() -> None:
    options = parse_options()
    report = begin("fastapi", "uvicorn", "torch")
    report["rss_mib"] = {}
    with tempfile.TemporaryDirectory(prefix="service-") as scratch:
        work = Path(scratch)
        blob = Blob(work / "rows.jsonl", options.upload_mb)
        with running_service(work) as service, training_job(service) as run_dir:
            report["rss_mib"]["one training"] = resident(service)
            report["post_ms"] = queue_jobs(service, options.jobs)
            report["rss_mib"][f"{options.jobs} jobs queued"] = resident(service)
            with second_trainer(run_dir, work / "second"):
                measure(service, blob, options, report)
    report["targets"] = rows_of(report, options)
    print_table(report["targets"])
    finish(report, options.json)
    sys.exit(not all(row["met"] for row in report["targets"]))


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--connections", type=int, default=200, help="each polls a job's status once a second")
    parser.add_argument("--seconds", type=int, default=20, help="for which they poll")
    parser.add_argument("--jobs", type=int, default=1000, help="jobs in the queue")
    parser.add_argument("--upload-mb", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=30, help="pages that are timed")
    return parser.parse_args()


def measure(service: TrainingService, blob: Blob, options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Everything that is measured while both trainings run."""
    began = steps(service)
    report["page_ms"] = time_pages(service, PAGE, options.repeats)
    report["full_page_ms"] = time_pages(service, f"{PAGE}&full=true", options.repeats)
    spent = cpu_seconds(service)
    report["poll_ms"] = asyncio.run(poll_statuses(service.url + STATUS, options.connections, options.seconds))
    report["cpu_share"] = (cpu_seconds(service) - spent) / options.seconds
    report["rss_mib"]["polled"] = resident(service)
    peak = memory(service)["VmHWM"]
    report["upload"] = upload(service, blob)
    report["rss_mib"]["uploaded"] = resident(service)
    report["rss_mib"]["at most"] = max(peak, memory(service)["VmHWM"])
    report["steps"] = steps(service) - began
    if service.state("training") != "in_progress" or not report["steps"]:
        raise RuntimeError("the training of the service stood still while the service was measured")


# --- The service and what runs beside it ------------------------------------------------------------------------------


@contextmanager
def running_service(work: Path) -> Iterator[TrainingService]:
    service = TrainingService(work, batch_size=2)
    service.start()
    try:
        yield service
    finally:
        service.stop()
        service.kill_tasks()


@contextmanager
def training_job(service: TrainingService) -> Iterator[Path]:
    """A job that trains until it is cancelled, at nice 10; its run directory."""
    body = endless(service, "training")
    service.submit(SFT, body)
    service.wait_state("training", "in_progress", timeout=60)
    poll(lambda: steps(service) > 0, "the first steps of the training", timeout=60)
    for process in chain.from_iterable(tasks_below(service.data_dir.resolve() / "jobs").values()):
        make_nice(process.pid)
    log = Path(service.status("training")["resources_allocated"]["log_path"])
    try:
        yield log.parent
    finally:
        service.post(f"{JOBS}/training/cancel")


@contextmanager
def second_trainer(run_dir: Path, place: Path) -> Iterator[None]:
    """The same training once more, without the service: it writes its events to a directory without a reader."""
    place.mkdir()
    spec = json.loads((run_dir / "spec.json").read_text())
    spec["run_dir"] = str(place)
    spec["job"]["checkpoint_dir"] = str(place / "checkpoints")
    (place / "spec.json").write_text(json.dumps(spec))
    environment = child_environment(os.environ, {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    with open(place / "log", "wb") as output:
        trainer = subprocess.Popen(
            [sys.executable, "-m", "llama_stack_provider_trl.recipes.train", str(place / "spec.json")],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            preexec_fn=lambda: os.nice(NICE),
        )
    try:
        poll(lambda: b'"progress"' in _read(place / "events.jsonl"), "the first steps of the second", timeout=60)
        yield
        if trainer.poll() is not None:
            raise RuntimeError(f"the second trainer ended by itself:\n{(place / 'log').read_text()[-2000:]}")
    finally:
        trainer.kill()
        trainer.wait()


def endless(service: TrainingService, job_uuid: str) -> dict[str, Any]:
    body = sft(job_uuid, "questions", provider_options={"save_steps": 10**9})
    body["training_config"]["n_epochs"] = FOREVER
    if job_uuid == "training":
        service.register("questions", QUESTIONS * 50)
    return body


def queue_jobs(service: TrainingService, count: int) -> list[float]:
    """POST jobs that wait for the one that trains; milliseconds of each."""
    bodies = (endless(service, f"queued-{number}") for number in range(count))
    return [timed(partial(service.submit, SFT, body)) for body in bodies]


# --- What is measured -------------------------------------------------------------------------------------------------


async def poll_statuses(url: str, connections: int, seconds: int) -> list[float]:
    """Milliseconds of each poll of every connection, from the moment at which it was due."""
    latencies: list[float] = []

    async def connection(offset: float) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1, keepalive_timeout=60)) as session:
            for second in range(seconds):
                due = start + offset + second
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                async with session.get(url) as answer:
                    body = await answer.read()
                    if answer.status != 200:
                        raise RuntimeError(f"a poll was answered {answer.status}: {body[:500]!r}")
                latencies.append((time.perf_counter() - due) * 1000)

    start = time.perf_counter() + 1.0
    await asyncio.gather(*(connection(number / connections) for number in range(connections)))
    return latencies


def time_pages(service: TrainingService, path: str, repeats: int) -> list[float]:
    def page() -> None:
        answer = service.session.get(service.url + path, timeout=30)
        if len(answer.json()["data"]) != 100:
            raise RuntimeError(f"{path} was answered {answer.text[:500]}")

    return [timed(page) for _ in range(repeats)]


def upload(service: TrainingService, blob: Blob) -> dict[str, float]:
    """Seconds of a PUT of the whole file, and how much larger the service was at most meanwhile."""
    before = resident(service)
    Path(f"/proc/{service.pid}/clear_refs").write_text("5")  # its peak is measured again from here on
    with open(blob.path, "rb") as body:
        began = time.perf_counter()
        answer = requests.put(f"{service.url}/v1/blobs/{blob.sha256}", data=body, timeout=300)
        seconds = time.perf_counter() - began
    if answer.status_code != 201:
        raise RuntimeError(f"the upload was answered {answer.status_code}: {answer.text[:500]}")
    return {"seconds": seconds, "grown_mib": memory(service)["VmHWM"] - before}


class Blob:
    """Rows as a file of `megabytes` million bytes."""

    def __init__(self, path: Path, megabytes: int) -> None:
        self.path = path
        frame = json.dumps({"prompt": "", "completion": ""})
        filler = "word " * (BYTES_PER_ROW // 5)
        digest = hashlib.sha256()
        with open(path, "wb") as file:
            for number in range(megabytes * 1_000_000 // BYTES_PER_ROW):
                completion = f"{number} {filler}"[: BYTES_PER_ROW - len(frame) - 1]
                line = json.dumps({"prompt": "", "completion": completion}).encode() + b"\n"
                digest.update(line)
                file.write(line)
        self.sha256 = digest.hexdigest()


def resident(service: TrainingService) -> float:
    return memory(service)["VmRSS"]


def memory(service: TrainingService) -> dict[str, float]:
    """MiB resident now and at most."""
    lines = Path(f"/proc/{service.pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")}


def cpu_seconds(service: TrainingService) -> float:
    times = psutil.Process(service.pid).cpu_times()
    return times.user + times.system


def steps(service: TrainingService) -> int:
    return int(service.status("training")["resources_allocated"]["progress"]["step"] or 0)


def make_nice(pid: int) -> None:
    """All threads of a process: on Linux each has a priority of its own."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(thread.name), NICE)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1000


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


# --- Figures ----------------------------------------------------------------------------------------------------------


def rows_of(report: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    polls, posts, sent = report["poll_ms"], report["post_ms"], report["upload"]
    memory = report["rss_mib"]

    def row(what: str, measured: str, target: str = "", met: bool = True) -> dict[str, Any]:
        return {"what": what, "measured": measured, "target": target, "met": met}

    def page(what: str, milliseconds: list[float]) -> dict[str, Any]:
        worst = max(milliseconds)
        text = f"median {statistics.median(milliseconds):.1f} ms, slowest {worst:.1f} ms"
        return row(f"{what}, {len(milliseconds)} calls", text, "< 50 ms", worst < 50)

    p99 = percentile(polls, 99)
    return [
        row(
            f"status, {options.connections} connections, once a second for {options.seconds} s",
            f"p50 {percentile(polls, 50):.1f} ms, p99 {p99:.1f} ms, slowest {max(polls):.1f} ms",
            "p99 < 150 ms",
            p99 < 150,
        ),
        row("CPU that this takes of the service's", f"{report['cpu_share']:.0%} of a core"),
        page(f"page of 100 of {options.jobs} jobs", report["page_ms"]),
        page("the same with full=true", report["full_page_ms"]),
        row(
            f"POST of a job that waits, {len(posts)} one after the other",
            f"median {statistics.median(posts):.1f} ms, slowest {max(posts):.0f} ms",
        ),
        row(
            "resident memory of the service, at most",
            f"{memory['at most']:.0f} MiB",
            "< 80 MiB",
            memory["at most"] < 80,
        ),
        row(
            f"upload of {options.upload_mb} MB: growth of its memory",
            f"{sent['grown_mib']:.1f} MiB ({sent['seconds']:.1f} s)",
            "< 30 MiB",
            sent["grown_mib"] < 30,
        ),
        row("optimizer steps that the service's training did meanwhile", str(report["steps"])),
    ]


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def print_table(rows: list[dict[str, Any]]) -> None:
    print("\n| what | measured | target |\n|---|---|---|")
    for row in rows:
        print(f"| {row['what']} | {row['measured']} | {row['target']}{'' if row['met'] else ' **missed**'} |")


if __name__ == "__main__":
    main()
