"""The order of each node's polls: what an earlier one reports does not replace what a later one has reported."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ...wire import Poll


class PollOrder:
    """Keeps the last poll of each node whose reports were recorded. Safe to share between threads.

    An agent abandons a poll for news and sends the next one, while a thread of the service may still be about to record
    the first: a task that began in between would be missing in its reports, and count as gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[str, _Last] = {}

    @contextmanager
    def recording(self, node: str, poll: Poll) -> Iterator[bool]:
        """Yields whether the reports of a poll count: none of a later one was recorded. No other poll of the node is
        recorded in the block."""
        with self._lock:
            last = self._nodes.setdefault(node, _Last())
        with last.lock:
            is_earlier = poll.run == last.run and poll.number < last.number
            if not is_earlier:
                last.run, last.number = poll.run, poll.number
            yield not is_earlier

    def forget(self, node: str) -> None:
        """Drop what is known of a node that was removed."""
        with self._lock:
            self._nodes.pop(node, None)


class _Last:
    """The last poll of a node."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.run = ""
        self.number = 0
