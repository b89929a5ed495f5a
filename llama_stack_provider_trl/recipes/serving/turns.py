"""Lets threads use something in the order in which they asked for it."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A lock for `count` threads at a time, first come, first served. A thread that gives its turn away and takes the
    next one comes after all that waited before: so answers advance token by token in turn.

    A context manager, which holds a turn.
    """

    def __init__(self, count: int = 1) -> None:
        self._guard = threading.Lock()
        self._free = count
        self._waiting: deque[threading.Lock] = deque()

    def take(self) -> None:
        with self._guard:
            if self._free:
                self._free -= 1
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        gate.acquire()

    def give(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._free += 1

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.give()
