"""How long calls have waited for their answers. Imports nothing: most services are never scraped."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, float("inf"))
"""Upper bounds of the buckets, in seconds."""


class Waited(NamedTuple):
    """The calls of a route with a method and a class of status."""

    labels: tuple[str, str, str]
    counts: tuple[int, ...]
    """Of the calls that waited at most as long as each of BOUNDS."""
    seconds: float
    """Of all of them."""


class Latencies:
    """Counts calls by route, method and class of status. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str, str], list[int]] = {}
        self._seconds: dict[tuple[str, str, str], float] = {}

    def observe(self, labels: tuple[str, str, str], seconds: float) -> None:
        """Count a call."""
        with self._lock:
            counts = self._counts.setdefault(labels, [0] * len(BOUNDS))
            counts[bisect_left(BOUNDS, seconds)] += 1
            self._seconds[labels] = self._seconds.get(labels, 0.0) + seconds

    def read(self) -> Iterator[Waited]:
        """What was counted so far."""
        with self._lock:
            found = [(labels, list(counts), self._seconds[labels]) for labels, counts in self._counts.items()]
        for labels, counts, seconds in found:
            yield Waited(labels, tuple(sum(counts[: at + 1]) for at in range(len(counts))), seconds)
