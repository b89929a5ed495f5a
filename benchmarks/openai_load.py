"""What many scripts for OpenAI's API cost the service at once: p99, memory, and answers of 500 or more.

    .venv/bin/python -m benchmarks.openai_load --json openai_load.json
    .venv/bin/python -m benchmarks.openai_load --jobs 2000 --watchers 100 --polls 50 --uploads 20 --seconds 10

20,000 jobs have completed, and 4 train: this process writes their events, as trainings would. 1,000 watchers, each with
a connection of its own, poll the events and the state of one of these 4 as scripts with the SDK do, 200 times a second
together; one poll in 20 lists jobs or files. After a third of the time 100 uploads of files begin at once. All of it
goes to `/openai/v1`. With `--streams` so many clients follow the events of a job as a stream of `/v1` besides.

A token may have 16 uploads under way, so `--tokens` (8) share the load. A watcher needs an open file: the service
raises its soft limit to the hard one (`ulimit -Hn`). Clients have nice 10, since elsewhere they take none of the
service's processors. Ends with 1 where a target is missed. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.dashboard import Job, own_store
from benchmarks.machine import begin, finish, parser_of
from llama_stack_provider_trl.errors import StoreError
from llama_stack_provider_trl.jobs.decisions.states import JobState
from llama_stack_provider_trl.system.data_dir import DATABASE
from llama_stack_provider_trl_remote.openai.names import Called
from tests.contract.service import TrainingService, running_service

TRAINING = [f"ftjob-training-{number}" for number in range(4)]
ENDED = "ftjob-ended-00000"
WRITES = 0.5
"""Seconds between two points of a job."""
UPLOAD_ROW = b'{"messages": [{"role": "user", "content": "Two plus two?"}, {"role": "assistant", "content": "4"}]}\n'
TARGETS = {"poll_p99_ms": 150.0, "rss_mib": 150.0, "server_errors": 0, "broken": 0, "other_answers": 0}
ANSWER_TIMEOUT = 60.0


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--jobs", type=int, default=20_000, help="that have completed")
    parser.add_argument("--watchers", type=int, default=1000, help="connections that poll")
    parser.add_argument("--polls", type=float, default=200.0, help="a second, of all watchers together")
    parser.add_argument("--uploads", type=int, default=100, help="that begin at once")
    parser.add_argument("--upload-kib", type=int, default=1024, help="of each")
    parser.add_argument("--streams", type=int, default=0, help="event streams of /v1 besides")
    parser.add_argument("--tokens", type=int, default=8, help="that share the load; a token may have 16 uploads")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.port:
        print(json.dumps(asyncio.run(Clients(options).run())))
        return 0
    report = begin("fastapi", "uvicorn")
    with (
        tempfile.TemporaryDirectory(prefix="openai-load-") as scratch,
        prepared(Path(scratch), options) as (service, jobs),
    ):
        report |= measured(service, jobs, options)
    for name, found in report.items():
        if name not in ("command", "machine"):
            print(f"{name:>16}  {found}" + (f"  (at most {TARGETS[name]:g})" if name in TARGETS else ""))
    finish(report, options.json)
    missed = [name for name, most in TARGETS.items() if report[name] > most]
    print(f"missed: {', '.join(missed)}" if missed else "all targets are met")
    return 1 if missed else 0


def token(number: int) -> str:
    return f"token-of-user-{number}"


@contextmanager
def prepared(root: Path, options: argparse.Namespace) -> Iterator[tuple[TrainingService, list[Job]]]:
    with own_store(root) as (store, data_dir):
        ended = Job(store, data_dir, ENDED)
        ended.write(2)
        assert store.transition(ENDED, 1, JobState.in_progress, JobState.completed)
        copy_ended(data_dir, options.jobs)
        jobs = [Job(store, data_dir, name) for name in TRAINING]
        mark_all(data_dir)
        tokens = [{"token": token(n), "role": "submit", "name": f"user-{n}"} for n in range(options.tokens)]
        with running_service(root, tokens=tokens) as service:
            yield service, jobs


def copy_ended(data_dir: Path, count: int) -> None:
    """Make more jobs like the one that has completed, a second apart."""
    with closing(sqlite3.connect(data_dir / DATABASE)) as database, database:
        columns = [row[1] for row in database.execute("PRAGMA table_info(jobs)") if row[1] != "age"]
        changed = {
            **dict.fromkeys(("job_uuid", "spec"), f"replace({{}}, '{ENDED}', printf('ftjob-ended-%05d', n))"),
            **dict.fromkeys(("scheduled_at", "completed_at"), "{} - n"),
        }
        copied = [changed.get(name, "{}").format(name) for name in columns]
        database.execute(
            f"WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count - 1})"
            f" INSERT INTO jobs ({', '.join(columns)}) SELECT {', '.join(copied)} FROM jobs, numbers"
            f" WHERE job_uuid = '{ENDED}'"
        )


def mark_all(data_dir: Path) -> None:
    """All jobs are of OpenAI's API."""
    called = Called("small", "small", "", {"type": "supervised", "supervised": {"hyperparameters": {}}})
    with closing(sqlite3.connect(data_dir / DATABASE)) as database, database:
        mark = json.dumps({"openai": called.text()})
        database.execute("UPDATE jobs SET spec = json_set(spec, '$.metadata', json(?))", (mark,))


def measured(service: TrainingService, jobs: list[Job], options: argparse.Namespace) -> dict[str, Any]:
    """What the clients found, and what the service used meanwhile."""
    process, over = psutil.Process(service.pid), threading.Event()
    own = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (own[1], own[1]))  # of the clients
    arguments = [*sys.argv[1:], "--port", str(service.port)]
    clients = subprocess.Popen(
        ["nice", "-n", "10", sys.executable, "-m", "benchmarks.openai_load", *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )

    def write() -> None:
        while not over.wait(WRITES):
            for job in jobs:
                with suppress(StoreError):  # a supervisor is in the service's process, and takes turns with its uploads
                    job.write()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    before, began, most, first = sum(process.cpu_times()[:2]), time.monotonic(), 0.0, service.rss_mib()
    while clients.poll() is None:
        most = max(most, service.rss_mib())
        time.sleep(0.2)
    share = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)
    over.set()
    writer.join()
    assert clients.stdout
    found: dict[str, Any] = json.loads(clients.stdout.read())
    return {
        **found,
        "rss_before_mib": round(first, 1),
        "rss_mib": round(most, 1),
        "core_percent": round(100 * share, 1),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


class Clients:
    """Everything that the service is sent. Latencies count from the request to the last byte of its answer, with a new
    connection where the service has closed an idle one."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._until = options, time.monotonic() + options.seconds
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._answers: Counter[str] = Counter()
        self._events = 0

    async def run(self) -> dict[str, Any]:
        options = self._options
        async with asyncio.TaskGroup() as tasks:
            for number in range(options.watchers):
                tasks.create_task(self._watch(number))
            for number in range(options.streams):
                tasks.create_task(self._stream(number))
            await asyncio.sleep(options.seconds / 3)
            for number in range(options.uploads):
                tasks.create_task(self._upload(number))
        polls = sorted(second for kind, found in self._seconds.items() if kind != "upload" for second in found)
        uploads = sorted(self._seconds["upload"])
        return {
            "polls": len(polls),
            "polls_per_second": round(len(polls) / options.seconds, 1),
            "poll_p50_ms": _percentile(polls, 0.5),
            "poll_p99_ms": _percentile(polls, 0.99),
            "poll_slowest_ms": _percentile(polls, 1.0),
            "p99_ms_of_each": {kind: _percentile(sorted(found), 0.99) for kind, found in self._seconds.items()},
            "uploads": len(uploads),
            "upload_p50_ms": _percentile(uploads, 0.5),
            "upload_p99_ms": _percentile(uploads, 0.99),
            "streamed_events": self._events,
            "answers": dict(sorted(self._answers.items())),
            "server_errors": sum(count for answer, count in self._answers.items() if answer.split()[-1][0] == "5"),
            "broken": sum(count for answer, count in self._answers.items() if answer.endswith("broken")),
            "other_answers": sum(count for answer, count in self._answers.items() if answer.split()[-1][0] in "34"),
        }

    async def _watch(self, number: int) -> None:
        """A connection that polls at its pace, and opens another one where it was closed meanwhile."""
        pace = self._options.watchers / self._options.polls
        job, dice = TRAINING[number % len(TRAINING)], random.Random(number)
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        at = time.monotonic() + dice.random() * pace
        while at < self._until:
            await asyncio.sleep(at - time.monotonic())
            at += pace
            kind, path = dice.choices(
                (
                    ("events", f"/fine_tuning/jobs/{job}/events?limit=20"),
                    ("job", f"/fine_tuning/jobs/{job}"),
                    ("jobs", "/fine_tuning/jobs?limit=20"),
                    ("files", "/files?limit=20"),
                ),
                (60, 35, 3, 2),
            )[0]
            request = _head("GET", f"/openai/v1{path}", token(number % self._options.tokens))
            if connection is not None and connection[0].at_eof():
                connection[1].close()
                connection = None
            connection = await self._exchange(kind, [request], connection)
        if connection is not None:
            connection[1].close()

    async def _upload(self, number: int) -> None:
        content = UPLOAD_ROW * (self._options.upload_kib * 1024 // len(UPLOAD_ROW)) + b'{"n": %d}\n' % number
        begin = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--b\r\n'
        begin += b'Content-Disposition: form-data; name="file"; filename="rows.jsonl"\r\n\r\n'
        body = [begin, content, b"\r\n--b--\r\n"]
        more = f"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: {sum(map(len, body))}\r\n"
        head = _head("POST", "/openai/v1/files", token(number % self._options.tokens), more)
        connection = await self._exchange("upload", [head, *body], None)
        if connection is not None:
            connection[1].close()

    async def _stream(self, number: int) -> None:
        path = f"/v1/post-training/jobs/{TRAINING[number % len(TRAINING)]}/events"
        head = _head("GET", path, token(number % self._options.tokens), "Accept: text/event-stream\r\n")
        status = "broken"
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + self._until - time.monotonic()):
                reader, writer = await self._connect()
                try:
                    writer.write(head)
                    status = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
                    while piece := await reader.read(1 << 16):
                        self._events += piece.count(b"data:")
                finally:
                    writer.transport.abort()
        self._answers[f"stream {status}"] += 1

    async def _exchange(
        self,
        kind: str,
        request: list[bytes],
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None,
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Send a request and read its answer. Returns the connection; None: it was closed."""
        began, is_reused = time.monotonic(), connection is not None
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT):
                reader, writer = connection or await self._connect()
                for piece in request:
                    writer.write(piece)
                    await writer.drain()
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                await reader.readexactly(int(headers["content-length"]))
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            if connection is not None:
                connection[1].close()
            if is_reused:  # it was closed as idle while the request was sent: clients send it again
                return await self._exchange(kind, request, None)
            self._answers[f"{kind} broken"] += 1
            return None
        self._seconds[kind].append(time.monotonic() - began)
        self._answers[f"{kind} {head.split()[1]}"] += 1
        if headers.get("connection") == "close":
            writer.close()
            return None
        return reader, writer

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._options.port)


def _head(method: str, path: str, credential: str, more: str = "") -> bytes:
    lines = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {credential}\r\n"
    return f"{lines}{more}\r\n".encode()


def _percentile(ordered: list[float], share: float) -> float:
    """In milliseconds; 0: there is none."""
    return round(1e3 * ordered[min(int(len(ordered) * share), len(ordered) - 1)], 1) if ordered else 0.0


if __name__ == "__main__":
    sys.exit(main())
