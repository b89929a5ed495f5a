"""A fuzzer: every route with every role, with bodies, paths, headers and framings that are damaged at random.

    python -m tests.security.fuzz --minutes 10 --seed 1
    python -m tests.security.fuzz --seed 1 --only 1234      # one request of that run again, on a new service

20 requests per second on a service of its own, to the routes of the document and to pages and their forms. Meanwhile a
node reports an unfinished task, and a tiny model trains. What must hold: no answer of 500 or more but a 503 or 507 that
names what to do, every complete request is answered, `GET /v1/health` within a second, at most 200 MiB of memory, and
the training beside it is slowed by at most a fifth: every minute begins with ten seconds without requests, to compare
with. Exit status 1 where one of these does not hold; failing requests are kept, one line each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import requests

from llama_stack_provider_trl.system.files import RunDir
from llama_stack_provider_trl.system.process import FileLock
from tests.contract.ended import add_ended_job
from tests.contract.fake_agent import FakeAgent
from tests.contract.payloads import QUESTIONS, sft
from tests.contract.service import JOBS, running
from tests.contract.stack import ENDED, SFT, poll
from tests.security.generate import FORM_TOKEN, FuzzRequest, Generator
from tests.security.guarded import NODE, OTHER_NODE, ROWS_DIGEST, TOKENS, Guarded, sentence_of
from tests.security.monitor import Monitor, table
from tests.tiny import tiny_model

RATE = 20.0
"""Requests per second."""
ANSWER_TIMEOUT = 30.0
"""Seconds within which a complete request must be answered."""
BROKEN_TIMEOUT = 5.0
"""How long the answer to a request is waited for that never becomes complete."""
STREAM_SECONDS = 1.0
"""How long an answer is read that does not end."""
AT_ONCE = 64
TRICKLE = 0.05
"""Seconds between two pieces of a body that comes slowly."""
RESTORE_EVERY = 3.0
QUIET, ROUND = 10.0, 60.0
"""Seconds at the start of each round in which nothing is sent, where a training is compared."""
MOST_MIB, MOST_SECONDS, MOST_SLOWDOWN = 200, 1.0, 0.2
WORKER = {"labels": {"kind": "worker"}}
NOWHERE = {"labels": {"kind": "none"}}
"""Of jobs that are to wait: no node has this label. Without it they would take the device of a node's task."""
TRAINING = "training-beside"
KNOWN: dict[str, list[Any]] = {
    "job_uuid": ["waiting", "ended", "held"],
    "after": ["waiting", "ended"],
    "dataset_id": ["questions"],
    "validation_dataset_id": ["questions"],
    "model": [str(tiny_model())],
    "sha256": [ROWS_DIGEST],
    "identifier": ["final"],
    "path": ["model.bin"],
    "name": [NODE, NODE, OTHER_NODE],
    "checkpoint": ["checkpoint-2", "final"],
    "file": ["rank-0.log", "torchrun.log"],
    "checkpoint_dir": ["results"],
    "offset": [0],
    "action": ["cordon", "uncordon", "drain"],
    "boot_id": [f"boot of {NODE}"],
    "address": ["10.0.0.2"],
}


_ADVICE = re.compile(r"\b(again|free|remove|raise|repair|mount|wait|start|restart)\b")


class Failure(Exception):
    """Raised when a request is answered as none may be."""


class Bed:
    """The service, its two nodes, and a task that is unfinished on one of them."""

    def __init__(self, service: Guarded) -> None:
        self.service = service
        self.task_id = "none"
        self.agents: dict[str, FakeAgent] = {}
        self.cookie = self.form_token = ""
        """Of a browser whose user is logged in."""
        self._number = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="bed")

    def start(self) -> None:
        self._restore()
        self._log_in()
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def token(self, caller: str) -> str | None:
        """Of a caller of the generator."""
        nodes = {"own-node": NODE, "other-node": OTHER_NODE}
        if caller in nodes:
            return self.service.credentials.get(nodes[caller])
        return {**TOKENS, "wrong": "wrong"}.get(caller)

    def _keep(self) -> None:
        while not self._over.wait(RESTORE_EVERY):
            with suppress(AssertionError, requests.RequestException, KeyError, ValueError):
                self._restore()

    def _restore(self) -> None:
        """Bring back what requests have deleted, cancelled or ended."""
        service = self.service
        if self.cookie and not self._is_logged_in():
            self._log_in()
        service.register("questions", QUESTIONS)
        service.put_blob(QUESTIONS)
        for name in ("waiting", "held"):
            if service.get(f"{JOBS}/{name}/status").status_code == 404:
                service.submit(SFT, sft(name, "questions"), provider_options={"resources": NOWHERE})
            elif service.state(name) in ENDED:
                service.delete(f"{JOBS}/{name}")
        for number, name in enumerate((NODE, OTHER_NODE), 2):
            agent = self.agents.get(name)
            if agent is None or not agent.poll().ok:
                self._join(name, number)
        service.post(f"/nodes/{OTHER_NODE}/cordon")
        if self.task_id == "none" or service.state(self.task_id.rpartition("-")[0]) in ENDED:
            self._give_task()

    def _is_logged_in(self) -> bool:
        answer = requests.get(f"{self.service.url}/nodes", headers={"Cookie": self.cookie}, timeout=30)
        return answer.status_code == 200

    def _log_in(self) -> None:
        url, form = self.service.url, {"token": TOKENS["admin"], "back": "/"}
        with requests.Session() as browser:
            browser.post(f"{url}/login", form, headers={"Origin": url}, timeout=30).raise_for_status()
            self.cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
            found = re.search(r'name="form_token" value="(\w+)"', browser.get(f"{url}/", timeout=30).text)
        assert found
        self.form_token = found[1]

    def _join(self, name: str, number: int) -> None:
        agent = FakeAgent(self.service, name, TOKENS["node"], address=f"10.0.0.{number}", **WORKER)
        answer = agent.join()
        assert answer.ok, answer.text
        self.service.credentials[name] = agent.credential or TOKENS["node"]
        self.agents[name] = agent

    def _give_task(self) -> None:
        self._number += 1
        job = f"given-{self._number}"
        agent = self.agents[NODE]
        for old in list(agent.reports):
            agent.forget(old)
        self.service.post(f"/nodes/{NODE}/uncordon")
        options = {"resources": WORKER, "retries": 0, "priority": "critical"}
        self.service.submit(SFT, sft(job, "questions"), provider_options=options)
        agent.run(f"{job}-1")
        self.task_id = f"{job}-1"


class Fuzzer:
    """Sends the requests of a generator and judges their answers."""

    def __init__(self, bed: Bed, generator: Generator, kept: Path) -> None:
        self._bed, self._generator, self._kept = bed, generator, kept
        self._most = asyncio.Semaphore(AT_ONCE)
        self.statuses: Counter[str] = Counter()
        self.reached: set[tuple[str, str]] = set()
        """(method and route, caller) that were answered."""
        self.failures: list[str] = []

    @property
    def routes(self) -> int:
        return len(self._generator.operations)

    async def send_one(self, number: int) -> str:
        """Send one request alone; returns its answer."""
        await self._most.acquire()
        return await self.send(self._generator.request(number))

    async def send_all(self, first: int, seconds: float) -> int:
        """Send requests at RATE for a time; returns the number of the next one."""
        began, number, sent = time.monotonic(), first, 0
        async with asyncio.TaskGroup() as tasks:
            while time.monotonic() - began < seconds:
                # Made in a thread: a large one takes long, and answers are to be read meanwhile.
                request = await asyncio.to_thread(self._generator.request, number)
                await self._most.acquire()
                tasks.create_task(self.send(request))
                number, sent = number + 1, sent + 1
                await asyncio.sleep(max(0.0, began + sent / RATE - time.monotonic()))
        return number

    async def send(self, request: FuzzRequest) -> str:
        """Send one request and count its answer; returns the status, or why there is none."""
        answer = ""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT if request.must_be_answered else BROKEN_TIMEOUT):
                status, answer = await exchange(self._bed, request)
        except TimeoutError:
            status = "no answer in time"
        except (OSError, asyncio.IncompleteReadError, ValueError, asyncio.LimitOverrunError) as error:
            status = f"closed ({type(error).__name__})"
        finally:
            self._most.release()
        self.statuses[status] += 1
        method, path, _ = self._generator.operations[request.number % len(self._generator.operations)]
        self.reached.add((f"{method} {path}", request.caller))
        if (status[:1] == "5" and not names_what_to_do(status, answer)) or (
            not status.isdigit() and request.must_be_answered and not may_be_closed(request)
        ):
            self._keep(request, status, answer)
        return f"{status} {answer}"

    def _keep(self, request: FuzzRequest, status: str, answer: str) -> None:
        line = {**request.shown(), "status": status, "answer": answer[:500]}
        with self._kept.open("a") as file:
            file.write(json.dumps(line) + "\n")
        requested = f"number {request.number}: {request.method} {request.target[:200]}"
        self.failures.append(f"{requested}: {status} {answer[:200]}")
        print(f"FAILURE {self.failures[-1]}; damage: {request.notes}", flush=True)


def names_what_to_do(status: str, answer: str) -> bool:
    """Whether an answer is one of a shortage whose sentence ends with what its reader can do."""
    if status not in ("503", "507"):
        return False
    with suppress(ValueError, AttributeError):
        return bool(_ADVICE.search(sentence_of(json.loads(answer))))
    return False


def may_be_closed(request: FuzzRequest) -> bool:
    """Whether the connection may be closed before all is sent: the answer may be lost then."""
    return len(request.body) > 1 << 20 or sum(len(value) for _, value in request.headers) > 1 << 15


async def exchange(bed: Bed, request: FuzzRequest) -> tuple[str, str]:
    """Send a request on a connection of its own. Returns the status and the begin of the answer's body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", bed.service.port, limit=1 << 20)
    try:
        pause = TRICKLE if request.framing == "trickled" and len(request.body) < 1 << 16 else 0.0
        sending = asyncio.create_task(_write(writer, wire(bed, request), pause))
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            while head.startswith("HTTP/1.1 100"):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            with suppress(TimeoutError):
                async with asyncio.timeout(STREAM_SECONDS):
                    return head.split(" ", 2)[1], (await reader.read(2000)).decode("utf-8", "replace")
            return head.split(" ", 2)[1], ""
        finally:
            sending.cancel()
            await asyncio.wait([sending])
    finally:
        writer.transport.abort()


async def _write(writer: asyncio.StreamWriter, pieces: Iterator[bytes], pause: float) -> None:
    # A service that has answered and closed makes the rest fail; its answer is what counts.
    with suppress(OSError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)


def wire(bed: Bed, request: FuzzRequest) -> Iterator[bytes]:
    """The bytes of a request."""
    rng = random.Random(request.number)
    body, framing = request.body.replace(FORM_TOKEN.encode(), bed.form_token.encode()), request.framing
    names = {name.lower() for name, _ in request.headers}
    target = request.target.replace("{task_id}", bed.task_id)
    lines = [f"{request.method} {target} HTTP/1.1".encode()]
    if "host" not in names:
        lines.append(b"Host: 127.0.0.1")
    token = bed.token(request.caller)
    if request.browser:
        lines.append(f"Cookie: {bed.cookie}".encode())
        if "origin" not in names:
            lines.append(f"Origin: {bed.service.url}".encode())
        if "host" not in names:
            lines[1] = f"Host: 127.0.0.1:{bed.service.port}".encode()
    elif token is not None and "authorization" not in names:
        lines.append(f"Authorization: Bearer {token}".encode())
    lines += [name.encode() + b": " + value for name, value in request.headers]
    lengths = {"short": len(body) + rng.randint(1, 1000), "long": max(0, len(body) - rng.randint(1, 100))}
    chunked = framing in ("chunked", "tiny-chunks", "bad-chunks", "both")
    if chunked:
        lines.append(b"Transfer-Encoding: chunked")
    has_length = body or framing in lengths or request.method in ("POST", "PUT")
    if has_length and (not chunked or framing == "both"):
        lines.append(f"Content-Length: {lengths.get(framing, len(body))}".encode())
    yield b"\r\n".join(lines) + b"\r\n\r\n"
    size = rng.choice((1 << 10, 1 << 16, 1 << 20)) if len(body) > 1 << 16 else max(1, len(body) // 3)
    if framing in ("tiny-chunks", "trickled"):
        size = max(1, min(size, len(body) // 20))
    for begin in range(0, len(body), size):
        piece = body[begin : begin + size]
        if chunked:
            piece = f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
        if framing == "bad-chunks" and rng.random() < 0.5:
            piece = rng.choice((b"zz\r\n", b"-1\r\n", b"ffffffffffffffff\r\n", b"5;" + b"x" * 70_000 + b"\r\n"))
        yield piece
    if chunked:
        yield b"0\r\n\r\n"


@contextmanager
def fuzzed(root: Path, seed: int, training: bool) -> Iterator[tuple[Guarded, Bed, Fuzzer]]:
    """A service to fuzz; without a training, its own device is locked."""
    (root / "locks").mkdir()
    device = FileLock(root / "locks" / "cpu.lock")
    if not training:
        assert device.acquire("tests/security/fuzz.py")
    add_ended_job(root / "data")
    # Not on loopback: only there are jobs of other nodes.
    models = [str(tiny_model().parent)]
    service = Guarded(root, host="0.0.0.0", insecure=True, node_name="head", model_roots=models)
    try:
        with running(service):
            service.register("questions", QUESTIONS)
            if training:
                train(service)
            bed = Bed(service)
            bed.start()
            try:
                generator = Generator(service.document(), seed, KNOWN)
                yield service, bed, Fuzzer(bed, generator, root / "failures.jsonl")
            finally:
                bed.stop()
    finally:
        device.release()


def train(service: Guarded) -> None:
    """Start a training on the service's own device that does not end by itself."""
    body = sft(TRAINING, "questions")
    body["training_config"] = {**body["training_config"], "n_epochs": 10**6}
    # An epoch has 4 steps of 16 ms: without keep_last 10,000 checkpoints are listed after 10 minutes, and each pass of
    # the supervisor takes seconds.
    options = {"priority": "critical", "lr_scheduler": "constant", "keep_last": 3}
    service.submit(SFT, body, provider_options=options)
    poll(lambda: steps(service) > 3, "the first steps of the training", timeout=120)


def steps(service: Guarded) -> int:
    """Metric points of the training, counted in its file of events: without a request to the service."""
    path = RunDir(service.data_dir / "jobs" / TRAINING / "attempts" / "1").events
    return path.read_bytes().count(b'"progress"') if path.exists() else 0


def verdict(monitor: Monitor, fuzzer: Fuzzer, slowdown: float | None) -> list[str]:
    """What does not hold."""
    found = [f"{len(fuzzer.failures)} requests failed"] if fuzzer.failures else []
    if monitor.largest_rss >> 20 > MOST_MIB:
        found.append(f"memory {monitor.largest_rss >> 20} MiB, expected at most {MOST_MIB}")
    if monitor.slowest > MOST_SECONDS or monitor.unanswered:
        found.append(f"health {monitor.slowest:.2f} s, {monitor.unanswered} not answered, expected {MOST_SECONDS} s, 0")
    if slowdown is not None and slowdown > MOST_SLOWDOWN:
        found.append(f"the training is slowed by {slowdown:.0%}, expected at most {MOST_SLOWDOWN:.0%}")
    return found


def fuzz(root: Path, minutes: float, seed: int) -> int:
    with fuzzed(root, seed, training=True) as (service, _, fuzzer):
        number, quiet, busy = 0, [0, 0.0], [0, 0.0]
        with Monitor(service) as monitor:
            for _ in range(max(1, round(minutes))):
                _count(service, quiet, lambda: time.sleep(QUIET))
                count = number

                def send(count: int = count) -> None:
                    nonlocal number
                    number = asyncio.run(fuzzer.send_all(count, ROUND))

                _count(service, busy, send)
        trains = service.state(TRAINING) == "in_progress"
        slowdown = 1 - (busy[0] / busy[1]) / (quiet[0] / quiet[1])
        routes = {method for method, _ in fuzzer.reached}
        found = verdict(monitor, fuzzer, slowdown)
        if not trains:
            found.append(f"the training is {service.state(TRAINING)}")
        rows: dict[str, object] = {
            "seed, requests": f"{seed}, {number}",
            "routes, pairs of route and caller": f"{len(routes)}, {len(fuzzer.reached)}",
            "answers": ", ".join(f"{status}: {count}" for status, count in fuzzer.statuses.most_common()),
            "failing requests": len(fuzzer.failures),
            **monitor.rows(),
            "steps per second of a training: without, with": f"{quiet[0] / quiet[1]:.2f}, {busy[0] / busy[1]:.2f}",
            "which slows it by": f"{slowdown:.0%}",
            "does not hold": "; ".join(found) or "-",
        }
        print(table(rows), flush=True)
        service.post(f"{JOBS}/{TRAINING}/cancel")
        return int(bool(found))


def _count(service: Guarded, sums: list[Any], act: Any) -> None:
    """Add the steps of the training, and the seconds, while something is done."""
    before, began = steps(service), time.monotonic()
    act()
    sums[0] += steps(service) - before
    sums[1] += time.monotonic() - began


def again(root: Path, seed: int, number: int) -> int:
    """Send one request of a run again."""
    with fuzzed(root, seed, training=False) as (_, bed, fuzzer):
        answer = asyncio.run(fuzzer.send_one(number))
        print(f"task: {bed.task_id}\nanswer: {answer}")
        return int(bool(fuzzer.failures))


def main() -> int:
    title = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.security.fuzz", description=title)
    parser.add_argument("--minutes", type=float, default=10.0, help="with requests; each has ten seconds more")
    parser.add_argument("--seed", type=int, default=None, help="left out: drawn, and printed")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one request of the run with this seed")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    root = Path(tempfile.mkdtemp(prefix="trl-fuzz-"))
    print(f"seed {seed}, directory {root}", flush=True)
    failed = again(root, seed, options.only) if options.only is not None else fuzz(root, options.minutes, seed)
    if not failed:
        shutil.rmtree(root)
    elif options.only is None:
        print(f"failing requests: {root}/failures.jsonl, and one again: --seed {seed} --only NUMBER")
    return failed


if __name__ == "__main__":
    sys.exit(main())
