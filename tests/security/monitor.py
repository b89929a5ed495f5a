"""What is watched while a service is attacked: its memory, and how long a health check takes."""

from __future__ import annotations

import http.client
import threading
import time
from contextlib import suppress
from typing import Self

import psutil

from tests.security.guarded import Guarded

PAUSE = 0.1
"""Seconds between two calls."""
TIMEOUT = 30.0


class Monitor:
    """Calls `GET /v1/health` on a new connection ten times a second, and reads the memory of the service's process.

    Args:
        token: of its caller; None: without one.
    """

    def __init__(self, service: Guarded, token: str | None = None) -> None:
        self._port = service.port
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._process = psutil.Process(service.pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor")
        self.seconds: list[float] = []
        self.unanswered = 0
        """Calls that were refused, or not answered within TIMEOUT."""
        self.first_rss = self.largest_rss = self._rss()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def slowest(self) -> float:
        return max(self.seconds, default=0.0)

    @property
    def p99(self) -> float:
        return sorted(self.seconds)[int(len(self.seconds) * 0.99)] if self.seconds else 0.0

    def rows(self) -> dict[str, object]:
        return {
            "`GET /v1/health`: calls, p99, slowest": f"{len(self.seconds)}, {self.p99:.3f} s, {self.slowest:.2f} s",
            "`GET /v1/health`: not answered": self.unanswered,
            "memory of the service: before, at most": f"{self.first_rss >> 20} MiB, {self.largest_rss >> 20} MiB",
        }

    def _watch(self) -> None:
        while not self._over.wait(PAUSE):
            began = time.monotonic()
            try:
                answered = self._call() == 200
            except (OSError, http.client.HTTPException):
                answered = False
            self.seconds.append(time.monotonic() - began)
            self.unanswered += not answered
            with suppress(psutil.Error):
                self.largest_rss = max(self.largest_rss, self._rss())

    def _call(self) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT)
        try:
            connection.request("GET", "/v1/health", headers=self._headers)
            with connection.getresponse() as answer:
                answer.read()
                return answer.status
        finally:
            connection.close()

    def _rss(self) -> int:
        return int(self._process.memory_info().rss)


def table(rows: dict[str, object]) -> str:
    """As Markdown."""
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
