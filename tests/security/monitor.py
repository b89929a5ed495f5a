"""What is watched while a service is attacked: its memory, and how long a health check takes."""

from __future__ import annotations

import http.client
import multiprocessing
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple, Self

import psutil

from tests.security.guarded import Guarded

PAUSE = 0.1
"""Seconds between two calls."""
TIMEOUT = 30.0


class _Watched(NamedTuple):
    seconds: list[float]
    """Of each call."""
    unanswered: int
    """Calls that were refused, or not answered within TIMEOUT."""
    largest_rss: int


class Monitor:
    """Calls `GET /v1/health` on a new connection ten times a second, and reads the memory of the service's process.

    It is a process of its own: in a thread beside the clients that attack, its calls would wait for their interpreter.

    Args:
        token: of its caller; None: without one.
    """

    def __init__(self, service: Guarded, token: str | None = None) -> None:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.first_rss = _rss(psutil.Process(service.pid))
        self._watched = _Watched([], 0, self.first_rss)
        spawned = multiprocessing.get_context("spawn")
        self._connection, theirs = spawned.Pipe()
        arguments = (theirs, service.port, headers, service.pid)
        self._process = spawned.Process(target=_watch, args=arguments, name="monitor", daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        self._connection.recv()  # it watches
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.send(None)
        self._watched = self._connection.recv()
        self._process.join()

    @property
    def unanswered(self) -> int:
        return self._watched.unanswered

    @property
    def largest_rss(self) -> int:
        return max(self.first_rss, self._watched.largest_rss)

    @property
    def slowest(self) -> float:
        return max(self._watched.seconds, default=0.0)

    @property
    def p99(self) -> float:
        seconds = sorted(self._watched.seconds)
        return seconds[int(len(seconds) * 0.99)] if seconds else 0.0

    def rows(self) -> dict[str, object]:
        calls = len(self._watched.seconds)
        return {
            "`GET /v1/health`: calls, p99, slowest": f"{calls}, {self.p99:.3f} s, {self.slowest:.2f} s",
            "`GET /v1/health`: not answered": self.unanswered,
            "memory of the service: before, at most": f"{self.first_rss >> 20} MiB, {self.largest_rss >> 20} MiB",
        }


def _watch(connection: Connection, port: int, headers: dict[str, str], pid: int) -> None:
    process, seconds, unanswered, largest_rss = psutil.Process(pid), [], 0, 0
    connection.send(None)
    while not connection.poll(PAUSE):
        began = time.monotonic()
        try:
            answered = _call(port, headers) == 200
        except (OSError, http.client.HTTPException):
            answered = False
        seconds.append(time.monotonic() - began)
        unanswered += not answered
        with suppress(psutil.Error):
            largest_rss = max(largest_rss, _rss(process))
    connection.send(_Watched(seconds, unanswered, largest_rss))


def _call(port: int, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        connection.request("GET", "/v1/health", headers=headers)
        with connection.getresponse() as answer:
            answer.read()
            return answer.status
    finally:
        connection.close()


def _rss(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


def table(rows: dict[str, object]) -> str:
    """As Markdown."""
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
