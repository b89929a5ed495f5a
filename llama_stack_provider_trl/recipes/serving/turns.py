"""Lets threads use something in the order in which they asked for it."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A lock, first come, first served. A thread that gives its turn away and takes the next one comes after all that
    waited before: so answers advance token by token in turn.

    A context manager, which holds the turn.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._free = True
        self._waiting: deque[threading.Lock] = deque()

    def take(self) -> None:
        with self._guard:
            if self._free:
                self._free = False
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
                self._free = True

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.give()
