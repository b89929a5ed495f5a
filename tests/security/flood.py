"""A flood: idle connections, event streams, slow and large bodies, costly checks and job POSTs, all at once.

    python -m tests.security.flood          # 2,000, 500, 200, 100 of 31 MiB, 200, 1,000, at `ulimit -n 4096`: minutes
    python -m tests.security.flood --small  # what CI does

All of it comes from one submit token, but for idle connections and half of the slow bodies, which have no token. The
service is one of its own whose trainings are played by `fake_trainer.py`; one of them runs all the while, and a node
reports an unfinished task. What must hold: `GET /v1/health` of another token on new connections within a second, at
most 300 MiB of memory, no answer of 500, no failed job, the node's task is in its first attempt still, and the training
is slowed by at most a fifth and comes to its end. A client that is answered 429 or 503 sends its request again after
`Retry-After` seconds, but for a check. Exit status 1 where one of these does not hold. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import requests

from llama_stack_provider_trl.system.files import RunDir
from tests.contract.fake_agent import FakeAgent
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import JOBS, running
from tests.contract.stack import SFT, poll
from tests.fake_trainer import SLOW_STEP, fake_trainer
from tests.security.fuzz import WORKER
from tests.security.guarded import NODE, TOKENS, Guarded
from tests.security.monitor import Monitor, table
from tests.tiny import tiny_model

DESCRIPTORS = 4096
CLIENTS_NICE = 10
"""Of this process, which is all clients: elsewhere they take none of the service's processors."""
SENDERS = 16
"""Connections that POST jobs."""
TRAINING, REPORTED = "slow-training", "reported"
"""The job that trains on the service's own machine, and the one that a node reports."""
OTHER = "token-of-another-client"
"""Whose health checks are measured."""
MOST_MIB, MOST_SECONDS, MOST_SLOWDOWN = 300, 1.0, 0.2
SLOW_PAUSE = 5.0
"""Seconds between two bytes of a slow body."""
NODE_PAUSE = 0.5
COSTLY = "(" * 10 + "a" + ")+" * 10
"""A pattern whose parts double what is compiled."""
ANSWER_TIMEOUT = 300.0
TRIES = 60


@dataclass(frozen=True)
class Size:
    idle: int
    streams: int
    slow: int
    bodies: int
    body_mib: int
    checks: int
    posts: int
    training_seconds: float


FULL = Size(idle=2000, streams=500, slow=200, bodies=100, body_mib=31, checks=200, posts=1000, training_seconds=600)
SMALL = Size(idle=200, streams=40, slow=20, bodies=3, body_mib=12, checks=3, posts=60, training_seconds=10)


@dataclass
class Flood:
    """Everything that is sent, and what came of it."""

    service: Guarded
    size: Size
    opened: int = 0
    """Idle connections that were opened: those that the service closes are opened again."""
    answers: Counter[str] = field(default_factory=Counter)
    events: int = 0
    """Received by all streams."""
    began: float = 0.0
    node: NodeBeside | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    longest_post: float = 0.0

    async def run(self) -> None:
        """Everything at once, until all bodies, checks and jobs are answered."""
        rest = asyncio.Event()
        self.began = time.time()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.size.idle):
                tasks.create_task(self._idle(rest))
            for _ in range(self.size.streams):
                tasks.create_task(self._stream(rest))
            for number in range(self.size.slow):
                tasks.create_task(self._slow_body(rest, TOKENS["submit"] if number % 2 else None))
            await asyncio.sleep(2.0)
            async with asyncio.TaskGroup() as finite:
                finite.create_task(self._timed("bodies", self._bodies()))
                finite.create_task(self._timed("jobs", self._jobs()))
                finite.create_task(self._timed("checks", self._checks()))
            rest.set()

    @property
    def slowdown(self) -> float:
        """Share of the training's steps that the flood has cost."""
        path = RunDir(self.service.data_dir / "jobs" / TRAINING / "attempts" / "1").events
        events = map(json.loads, path.read_text().splitlines())
        times = [event["time"] for event in events if event["type"] == "progress" and event["time"] > self.began]
        return 1 - (len(times) - 1) * SLOW_STEP / (times[-1] - times[0])

    async def _timed(self, name: str, work: object) -> None:
        began = time.monotonic()
        await work  # type: ignore[misc]
        self.seconds[name] = time.monotonic() - began

    async def _idle(self, rest: asyncio.Event) -> None:
        """A connection that sends nothing, opened again whenever it is closed."""
        while not rest.is_set():
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(30):
                    reader, writer = await self._connect()
                self.opened += 1
                try:
                    await _until(reader.read(1), rest)
                finally:
                    writer.transport.abort()
            await _until(asyncio.sleep(1.0), rest)

    async def _slow_body(self, rest: asyncio.Event, token: str | None) -> None:
        """A body of a byte now and then, sent again whenever its connection is closed."""
        if token is not None:
            head = _head("POST", "/datasets", token, "*/*", 60_000)
        else:
            lines = ["POST /login HTTP/1.1", f"Host: 127.0.0.1:{self.service.port}", f"Origin: {self.service.url}"]
            lines += ["Content-Type: application/x-www-form-urlencoded", "Content-Length: 60000", "\r\n"]
            head = "\r\n".join(lines).encode()
        while not rest.is_set():
            status = "closed"
            with suppress(OSError, TimeoutError, IndexError):
                async with asyncio.timeout(30):
                    reader, writer = await self._connect()
                try:
                    writer.write(head)
                    answering = asyncio.ensure_future(reader.read(1 << 16))
                    while not answering.done() and not rest.is_set():
                        writer.write(b"a")
                        await asyncio.wait([answering], timeout=SLOW_PAUSE)
                    if answering.done():
                        status = answering.result().split()[1].decode()
                    answering.cancel()
                finally:
                    writer.transport.abort()
            self.answers[f"slow body {status}"] += 1
            await _until(asyncio.sleep(2.0), rest)

    async def _checks(self) -> None:
        """All costly checks at once, each once."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(self.size.checks):
                tasks.create_task(self._check(number))

    async def _check(self, number: int) -> None:
        checks = [{"type": "regex", "pattern": f"{COSTLY}{number}"}, {"type": "regex", "pattern": "("}]
        model = sft("evaluated", "questions")["model"]
        body = {"job_uuid": f"checked-{number}", "model": model, "dataset_id": "questions"}
        data = json.dumps({**body, "checks": checks}).encode()
        status = "closed"
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(ANSWER_TIMEOUT):
                reader, writer = await self._connect()
                try:
                    writer.write(_head("POST", "/post-training/evaluate", TOKENS["submit"], "*/*", len(data)) + data)
                    status, _, _ = await _answer(reader)
                finally:
                    writer.transport.abort()
        self.answers[f"check {status}"] += 1

    async def _stream(self, rest: asyncio.Event) -> None:
        """A stream of events, requested again where it is refused or ends."""
        while not rest.is_set():
            status = "closed"
            with suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await self._connect()
                try:
                    writer.write(_head("GET", f"{JOBS}/{TRAINING}/events", TOKENS["submit"], "text/event-stream", None))
                    status = (await _until(reader.readuntil(b"\r\n\r\n"), rest) or b"- rest").split()[1].decode()
                    while status == "200" and not rest.is_set():
                        piece = await _until(reader.read(1 << 16), rest)
                        if not piece:
                            break
                        self.events += piece.count(b"data:")
                        if b"event: end" in piece:
                            self.answers["stream 200"] += 1
                            return
                finally:
                    writer.transport.abort()
            self.answers[f"stream {status}"] += 1
            await _until(asyncio.sleep(2.0), rest)

    async def _bodies(self) -> None:
        """All large bodies at once."""
        end = _rows(self.size.body_mib << 20)
        async with asyncio.TaskGroup() as tasks:
            for number in range(self.size.bodies):
                begin = f'{{"dataset_id":"large-{number}","purpose":"post-training/messages","source":'.encode()
                tasks.create_task(self._body([begin, end]))

    async def _body(self, pieces: list[bytes]) -> None:
        for _ in range(TRIES):
            status, wait = "closed", 5.0
            with suppress(OSError, asyncio.IncompleteReadError, TimeoutError, ValueError):
                async with asyncio.timeout(ANSWER_TIMEOUT):
                    reader, writer = await self._connect()
                    try:
                        sending = asyncio.create_task(_write(writer, "/datasets", pieces))
                        status, wait, _ = await _answer(reader)
                        sending.cancel()
                        await asyncio.wait([sending])
                    finally:
                        writer.transport.abort()
            self.answers[f"body {status}"] += 1
            if status not in ("429", "503", "closed"):
                return
            await asyncio.sleep(wait)

    async def _jobs(self) -> None:
        numbers = iter(range(self.size.posts))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(SENDERS):
                tasks.create_task(self._post_jobs(numbers))

    async def _post_jobs(self, numbers: Iterator[int]) -> None:
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        for number in numbers:
            body = json.dumps(sft(f"job-{number:05}", "questions")).encode()
            for _ in range(TRIES):
                status, wait, began = "closed", 0.5, time.monotonic()
                try:
                    reader, writer = connection or await self._connect()
                    connection = reader, writer
                    writer.write(_head("POST", SFT, TOKENS["submit"], "*/*", len(body)) + body)
                    async with asyncio.timeout(ANSWER_TIMEOUT):
                        status, wait, stays = await _answer(reader)
                    self.longest_post = max(self.longest_post, time.monotonic() - began)
                except (OSError, asyncio.IncompleteReadError, TimeoutError):
                    stays = False
                if not stays and connection:
                    connection[1].transport.abort()
                    connection = None
                self.answers[f"job {status}"] += 1
                if status not in ("429", "503", "closed"):
                    break
                await asyncio.sleep(wait)
        if connection:
            connection[1].transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.service.port)


async def _until[Found](work: asyncio.Future[Found] | object, rest: asyncio.Event) -> Found | None:
    """The result of some work, or None once the flood is over."""
    working = asyncio.ensure_future(work)  # type: ignore[call-overload]
    resting = asyncio.ensure_future(rest.wait())
    try:
        await asyncio.wait([working, resting], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for one in (working, resting):
            one.cancel()
        await asyncio.wait([working, resting])


def _head(method: str, path: str, token: str, accept: str, length: int | None) -> bytes:
    lines = [f"{method} /v1{path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {token}", f"Accept: {accept}"]
    if length is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _write(writer: asyncio.StreamWriter, path: str, pieces: list[bytes]) -> None:
    with suppress(OSError):
        writer.write(_head("POST", path, TOKENS["submit"], "*/*", sum(map(len, pieces))))
        for piece in pieces:
            for begin in range(0, len(piece), 1 << 18):
                writer.write(piece[begin : begin + (1 << 18)])
                await writer.drain()


async def _answer(reader: asyncio.StreamReader) -> tuple[str, float, bool]:
    """Status, seconds to wait before another try, and whether the connection stays."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
    await reader.readexactly(int(headers.get("content-length", 0)))
    return head.split()[1], float(headers.get("retry-after", 1.0)), headers.get("connection") != "close"


def _rows(size: int) -> bytes:
    """The end of a registration with many small rows."""
    row = b'{"prompt":"a","completion":"b"}'
    count = (size - 200) // (len(row) + 1)
    return b'{"type":"rows","rows":[' + b",".join([row] * count) + b"]}}"


class NodeBeside:
    """A node that reports an unfinished task, as an agent does: each poll on a connection of its own."""

    def __init__(self, service: Guarded) -> None:
        self._service = service
        self._agent = FakeAgent(service, NODE, TOKENS["node"], address="10.0.0.2", **WORKER)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._report, name="node")
        self._step = self._offset = 0
        self.longest = 0.0
        """Seconds between two polls that were answered."""

    def __enter__(self) -> NodeBeside:
        answer = self._agent.join()
        assert answer.ok, answer.text
        options = {"resources": WORKER, "retries": 3, "priority": "critical"}
        self._service.submit(SFT, sft(REPORTED, "questions"), provider_options=options)
        self._agent.run(f"{REPORTED}-1")
        self._send(type="started", pid=1, device="cpu", versions={})
        self._service.wait_state(REPORTED, "in_progress")
        # A session of its own: that of the service is the main thread's.
        self._agent.service = _Reached(self._service.url)  # type: ignore[assignment]
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def complaint(self) -> str:
        """What has become of its task; empty: it has it still."""
        status = self._service.status(REPORTED)["resources_allocated"]
        found = f"attempt {status['attempt']}, {status['state']}"
        return "" if found == "attempt 1, in_progress" else f"the node's task: {found}, expected attempt 1, in_progress"

    def _report(self) -> None:
        answered = time.monotonic()
        while not self._over.wait(NODE_PAUSE):
            with suppress(requests.RequestException):
                if self._agent.poll().ok:
                    now = time.monotonic()
                    self.longest, answered = max(self.longest, now - answered), now
                self._step += 1
                self._send(type="progress", step=self._step, epoch=0.5, metrics={"loss": 2.5}, peak_memory_bytes=1)

    def _send(self, **event: object) -> None:
        line = json.dumps({**event, "time": time.time()}).encode() + b"\n"
        answer = self._agent.send_events(f"{REPORTED}-1", self._offset, line)
        if answer.ok:
            self._offset += len(line)


class _Reached:
    """What an agent needs of a service."""

    def __init__(self, url: str) -> None:
        self.url, self.session = url, requests.Session()


@contextmanager
def flooded(root: Path, size: Size) -> Iterator[Flood]:
    """A service with few file descriptors and one training."""
    programs = root / "programs"
    programs.mkdir()
    tokens = [
        {"token": TOKENS["submit"], "role": "submit", "name": "flood"},
        {"token": OTHER, "role": "submit", "name": "other"},
        {"token": TOKENS["node"], "role": "node", "name": "joining"},
    ]
    # Not on loopback: only there are jobs of other nodes.
    of_nodes = {"host": "0.0.0.0", "insecure": True, "node_name": "head", "model_roots": [str(tiny_model().parent)]}
    played = str(fake_trainer(programs))
    with running(_FewDescriptors(root, tokens=tokens, train_python=played, **of_nodes)) as service:
        service.register("questions", QUESTIONS)
        body = sft(TRAINING, "questions")
        body["training_config"] = {**body["training_config"], "n_epochs": int(size.training_seconds / SLOW_STEP)}
        service.submit(SFT, body)
        service.wait_state(TRAINING, "in_progress")
        with NodeBeside(service) as node:
            yield Flood(service, size, node=node)


class _FewDescriptors(Guarded):
    def launch(self) -> None:
        super().launch()
        resource.prlimit(
            self.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)
        )  # long before it has imported all


def failed_jobs(service: Guarded) -> list[str]:
    found = service.get(JOBS, status="failed", full=True).json()["data"]
    return [f"{job['job_uuid']}: {job['detail']}" for job in found]


def complaints(flood: Flood, monitor: Monitor) -> list[str]:
    """What does not hold. Waits until the training has ended."""
    found = []
    if monitor.largest_rss >> 20 > MOST_MIB:
        found.append(f"memory {monitor.largest_rss >> 20} MiB, expected at most {MOST_MIB}")
    if monitor.slowest > MOST_SECONDS or monitor.unanswered:
        found.append(f"health {monitor.slowest:.2f} s, {monitor.unanswered} not answered, expected {MOST_SECONDS} s, 0")
    found += [f"{count} times {answer}" for answer, count in flood.answers.items() if answer.endswith(" 500")]
    if flood.slowdown > MOST_SLOWDOWN:
        found.append(f"the training is slowed by {flood.slowdown:.0%}, expected at most {MOST_SLOWDOWN:.0%}")
    if flood.node is not None and flood.node.complaint:
        found.append(flood.node.complaint)
    if flood.answers["job 200"] < flood.size.posts:
        found.append(f"{flood.answers['job 200']} of {flood.size.posts} jobs were accepted")
    with suppress(AssertionError, OSError):
        poll(
            lambda: flood.service.state(TRAINING) not in ("launching", "in_progress"),
            "the training ends",
            flood.size.training_seconds + 60,
        )
    state = flood.service.state(TRAINING)
    if state != "completed":
        found.append(f"the training is {state}, expected completed")
    return found + failed_jobs(flood.service)[:5]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.security.flood", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--small", action="store_true", help="what CI does")
    size = SMALL if parser.parse_args().small else FULL
    own = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (own[1], own[1]))
    root = Path(tempfile.mkdtemp(prefix="trl-flood-"))
    try:
        with flooded(root, size) as flood:
            with Monitor(flood.service, OTHER) as monitor:
                os.nice(CLIENTS_NICE)  # no other process is started from here on
                asyncio.run(flood.run())
            found = complaints(flood, monitor)
            rows: dict[str, object] = {
                "idle connections, event streams": f"{size.idle}, {size.streams}",
                f"slow bodies, bodies of {size.body_mib} MiB": f"{size.slow}, {size.bodies}",
                "costly checks, job POSTs": f"{size.checks}, {size.posts}",
                "answers": ", ".join(f"{answer}: {count}" for answer, count in sorted(flood.answers.items())),
                "idle connections opened, events streamed": f"{flood.opened}, {flood.events}",
                "seconds": ", ".join(f"{name} {seconds:.0f}" for name, seconds in flood.seconds.items()),
                "slowest POST of a job": f"{flood.longest_post:.1f} s",
                "the training is slowed by": f"{flood.slowdown:.0%}",
                "longest time between polls of the node": f"{flood.node.longest if flood.node else 0:.1f} s",
                **monitor.rows(),
                "does not hold": "; ".join(found) or "-",
            }
            print(table(rows), flush=True)
        return int(bool(found))
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
