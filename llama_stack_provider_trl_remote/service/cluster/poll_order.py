"""The order of each node's polls: what an earlier one reports does not replace what a later one has reported. And their
rate."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from ...wire import Poll
from ..security.limits import Bucket, Clock

POLLS_PER_SECOND, POLLS_AT_ONCE = 40.0, 80.0
"""Of a node. An agent gathers news for 0.1 s, and follows a poll that it has abandoned by one that is answered at once:
20 a second at most."""
_MOST_NODES = 4096
"""Nodes whose polls are counted: an admin may poll for any name."""


class PollOrder:
    """Keeps the last poll of each node whose reports were recorded. Safe to share between threads.

    An agent abandons a poll for news and sends the next one, while a thread of the service may still be about to record
    the first: a task that began in between would be missing in its reports, and count as gone.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._nodes: dict[str, _Last] = {}
        self._rates: OrderedDict[str, Bucket] = OrderedDict()

    def take(self, node: str) -> float:
        """Count a poll. Returns 0, or the seconds until the node may send the next one."""
        with self._lock:
            bucket = self._rates.get(node) or Bucket(POLLS_PER_SECOND, POLLS_AT_ONCE, self._clock)
            self._rates[node] = bucket
            self._rates.move_to_end(node)
            if len(self._rates) > _MOST_NODES:
                self._rates.popitem(last=False)
            return bucket.take()

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
