"""What open pages of the dashboard cost the service, and how long one of a large job takes to be answered.

    .venv/bin/python -m benchmarks.dashboard --json dashboard.json

First 50 pages of 4 jobs, each opened as a browser opens it: the page, its curves, then a stream of the events of
all 4 jobs. Meanwhile 20 points a second are written in all, as trainings write them, and a client requests a status
20 times a second. Then the page and the curves of a job with 200,000 points: their bytes, the CPU time of the service,
and in Chromium, where there is one, how long it takes until a chart is drawn, with an empty cache and again.
Ends with 1 where a target is missed, or a stream lost a point. Takes about a minute. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import requests

from benchmarks.machine import begin, finish, parser_of
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.events import EventWriter, Prepared, Progress, Started, read_events
from llama_stack_provider_trl.system.data_dir import DATABASE
from llama_stack_provider_trl.system.files import RunDir
from llama_stack_provider_trl.system.process import FileLock
from tests.contract import browser
from tests.contract.service import TrainingService, running_service
from tests.fakes import job_spec

JOBS = [f"job-{number}" for number in range(4)]
LARGE, POINTS = "large", 200_000
WRITES = 0.2
"""Seconds between two points of a job: 20 a second of the 4 jobs together."""
METRICS = {"learning_rate": 1e-4, "grad_norm": 1.0, "tokens_per_second": 1000.0, "mean_token_accuracy": 0.5}
TARGETS = {"rss_mib": 90.0, "status_p99_ms": 150.0, "core_percent": 60.0, "large_seconds": 2.0, "drawn_seconds": 1.5}
_PHASES = """() => {
    const found = {};
    const [page] = performance.getEntriesByType("navigation");
    Object.assign(found, { "page's first byte": page.responseStart, "page": page.responseEnd });
    for (const one of performance.getEntriesByType("resource")) {
        if (one.name.endsWith("/series"))
            Object.assign(found, { "curves' first byte": one.responseStart, "curves": one.responseEnd });
        if (one.name.includes("plotly")) found["plotly"] = one.responseEnd;
    }
    const points = performance.getEntriesByName("points"), charts = performance.getEntriesByName("chart");
    Object.assign(found, { "points parsed": points[0].startTime, "first chart": charts[0].startTime });
    return Object.fromEntries(Object.entries(found).map(([name, time]) => [name, Math.round(time)]));
}"""
"""Phase -> ms from the begin of the navigation to its end."""
TIMES = 5
"""How often the large job is opened."""


class Job:
    """A job of a store, without a process: the benchmark writes its events and stores them, as a supervisor would."""

    def __init__(self, store: Store, data_dir: Path, name: str) -> None:
        self._store, self._name, self._step = store, name, 0
        self._run = RunDir(data_dir / "jobs" / name / "attempts" / "1")
        self._run.root.mkdir(parents=True)
        store.add_job(job_spec(name, checkpoint_dir=data_dir / "checkpoints" / name), "digest")
        store.launch(name, 1, "cpu", self._run.root)
        self._writer, self._offset = EventWriter(self._run.events), 0
        self._writer.write(Started(pid=1, device="cpu", versions={}))
        counts = {"num_rows": 1, "trainable_parameters": 1, "total_parameters": 1}
        self._writer.write(Prepared(total_steps=10**6, **counts))
        self._apply()

    def write(self, count: int = 1) -> None:
        """Write and store points."""
        for _ in range(count):
            self._step += 1
            step = self._step
            metrics = {"loss": 3 / step**0.1 + (step % 7) / 100, **METRICS}
            self._writer.write(Progress(step=step, epoch=step / 1000, metrics=metrics, peak_memory_bytes=1 << 30))
        self._apply()

    def _apply(self) -> None:
        while True:
            events, after = read_events(self._run.events, self._offset)
            if after == self._offset:
                return
            self._store.apply_events(self._name, 1, events, after)
            self._offset = after


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--pages", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--reader", nargs=3, metavar=("PORT", "PAGES", "SECONDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader:
        print(json.dumps(asyncio.run(read_pages(*map(float, options.reader)))))
        return 0
    report = begin("fastapi", "uvicorn")
    with tempfile.TemporaryDirectory(prefix="dashboard-") as scratch, prepared(Path(scratch)) as (service, jobs):
        report |= with_open_pages(service, jobs, options.pages, options.seconds)
        report |= open_large(service)
        report |= draw_large(service)
        report["rss_mib"] = round(max(report["rss_mib"], service.rss_mib()), 1)
    for name, found in report.items():
        if name not in ("command", "machine"):
            print(f"{name:>14}  {found}" + (f"  (at most {TARGETS[name]:g})" if name in TARGETS else ""))
    finish(report, options.json)
    missed = [name for name, most in TARGETS.items() if report[name] > most]
    if report["lost"]:
        missed.append("lost")
    print(f"missed: {', '.join(missed)}" if missed else "all targets are met")
    return 1 if missed else 0


@contextmanager
def own_store(root: Path) -> Iterator[tuple[Store, Path]]:
    """The store of a service whose jobs are this process's, which holds the lock of the supervisor; and its
    directory."""
    data_dir = root / "data"
    data_dir.mkdir(mode=0o700)
    lock = FileLock(data_dir / "supervisor.lock")
    assert lock.acquire("a benchmark")
    store = Store(data_dir / DATABASE)
    try:
        yield store, data_dir
    finally:
        store.close()
        lock.release()


@contextmanager
def prepared(root: Path) -> Iterator[tuple[TrainingService, list[Job]]]:
    with own_store(root) as (store, data_dir):
        Job(store, data_dir, LARGE).write(POINTS)
        jobs = [Job(store, data_dir, name) for name in JOBS]
        with running_service(root) as service:
            yield service, jobs


def with_open_pages(service: TrainingService, jobs: list[Job], pages: int, seconds: float) -> dict[str, Any]:
    """Latency, CPU and memory while pages follow the jobs."""
    process, stop, written = psutil.Process(service.pid), threading.Event(), [0]
    arguments = [str(service.port), str(pages), str(seconds + 5)]
    reader = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.dashboard", "--reader", *arguments], stdout=subprocess.PIPE, text=True
    )
    time.sleep(3)  # until they are open

    def write() -> None:
        while not stop.wait(WRITES):
            for job in jobs:
                job.write()
            written[0] += len(jobs)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    latencies, session, most = [], requests.Session(), 0.0
    while time.monotonic() - began < seconds:
        sent = time.perf_counter()
        answer = session.get(f"{service.url}/v1/post-training/jobs/{JOBS[0]}/status", timeout=30)
        latencies.append(time.perf_counter() - sent)
        assert answer.status_code == 200, answer.text
        most = max(most, service.rss_mib())
        time.sleep(0.05)
    share = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)
    stop.set()
    writer.join()
    counts = json.loads(reader.communicate(timeout=60)[0])
    latencies.sort()
    return {
        "pages": pages,
        "points": written[0],
        "lost": pages * written[0] - sum(counts),
        "status_p50_ms": round(latencies[len(latencies) // 2] * 1e3, 1),
        "status_p99_ms": round(latencies[int(len(latencies) * 0.99)] * 1e3, 1),
        "core_percent": round(100 * share, 1),
        "rss_mib": round(most, 1),
    }


async def read_pages(port: float, pages: float, seconds: float) -> list[int]:
    """Open pages and read their streams for some seconds. Returns the points that each received."""
    return list(await asyncio.gather(*(read_page(int(port), number, seconds) for number in range(int(pages)))))


async def read_page(port: int, number: int, seconds: float) -> int:
    """One page, its curves, and the points of the stream."""
    name = JOBS[number % len(JOBS)]
    for path in (f"/jobs/{name}", f"/v1/post-training/jobs/{name}/series"):
        reader, writer = await _send(port, path)
        head = await reader.readline()
        assert b" 200 " in head, (path, head)
        writer.close()
    reader, writer = await _send(port, f"/v1/post-training/events?{'&'.join(f'job={job}' for job in JOBS)}")
    count = 0
    try:
        async with asyncio.timeout(seconds):
            while line := await reader.readline():
                count += b'"type":"progress"' in line
    except TimeoutError:
        writer.close()
    return count


async def _send(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    accept = "text/event-stream" if "/events" in path else "*/*"
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: {accept}\r\n\r\n".encode())
    return reader, writer


def open_large(service: TrainingService) -> dict[str, Any]:
    """What the page and the curves of the large job take the service, at the first time."""
    process = psutil.Process(service.pid)
    before, began = sum(process.cpu_times()[:2]), time.perf_counter()
    sizes = []
    for path in (f"/jobs/{LARGE}", f"/v1/post-training/jobs/{LARGE}/series"):
        answer = requests.get(service.url + path, timeout=60)
        assert answer.status_code == 200, answer.text
        sizes.append(len(answer.content))
    points = [len(curve["step"]) for curve in answer.json()["train"].values()]
    assert max(points) <= 1000, "the service thins out the curves"
    return {
        "large_seconds": round(time.perf_counter() - began, 2),
        "large_cpu_seconds": round(sum(process.cpu_times()[:2]) - before, 2),
        "page_kib": round(sizes[0] / 1024, 1),
        "curves_kib": round(sizes[1] / 1024, 1),
    }


def draw_large(service: TrainingService) -> dict[str, Any]:
    """Seconds from the request of the large job's page to its first chart, in Chromium: with an empty cache, and the
    median of those that follow. Of the last one, when each phase was over, in ms, as the browser has it; and the CPU
    seconds of the service for each time."""
    if browser.CHROMIUM is None:
        return {"drawn_seconds": 0.0, "drawn": "not measured: no browser is installed"}
    process, seconds, cpu = psutil.Process(service.pid), list[float](), list[float]()
    with browser.chromium() as chromium, browser.window(chromium, service) as window:
        for _ in range(TIMES):
            before, began = sum(process.cpu_times()[:2]), time.perf_counter()
            window.open(f"/jobs/{LARGE}")
            window.wait_for_charts()
            seconds.append(time.perf_counter() - began)
            cpu.append(round(sum(process.cpu_times()[:2]) - before, 2))
        phases = window.page.evaluate(_PHASES)
    load = os.getloadavg()[0]
    found = {"drawn_first_seconds": round(seconds[0], 2), "drawn_seconds": round(statistics.median(seconds[1:]), 2)}
    return {**found, "drawn_cpu_seconds": cpu, "phases_ms": phases, "load": round(load, 2)}


if __name__ == "__main__":
    sys.exit(main())
