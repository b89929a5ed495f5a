"""Records the time of each node's last call."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from .states import ABSENT, CALL_DUE, Contact, NodeState, node_state

_GAP = 5.0
"""Seconds between two reads after which this process itself was stopped, and missed calls are not the nodes' fault."""


class Presence:
    """Keeps the time of each node's last call in memory, at the earliest the start of the service.

    Safe to share between threads.

    Args:
        own: name of this machine, whose agent reaches the service without a network.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, own: str = "") -> None:
        self._clock, self._own = clock, own
        self._calls: dict[str, float] = {}
        self._floor = self._read_at = self._others = self._others_again = clock()

    def note_call(self, node: str) -> None:
        self._calls[node] = now = self._clock()
        if node != self._own:
            if now - self._others > CALL_DUE:
                self._others_again = now
            self._others = now

    def silence(self, node: str) -> float:
        """Seconds since a node's last call, or since this process could receive one."""
        now = self._clock()
        if now - self._read_at > _GAP:
            self._floor = now
        self._read_at = now
        return now - max(self._calls.get(node, self._floor), self._floor)

    def state(self, node: str) -> NodeState:
        """See `states.NODE_TRANSITIONS`."""
        silence = self.silence(node)
        # After a time without any call, each node gets time for its next one.
        expected = max(self._calls.get(node, 0.0), self._floor, self._others_again)
        return node_state(Contact(self.has_called(node), silence, self._others - expected))

    def is_absent(self, node: str) -> bool:
        return self.state(node) in ABSENT

    def seconds_alone(self) -> float:
        """Seconds since the last call of any other machine."""
        return self._clock() - self._others

    def has_called(self, node: str) -> bool:
        """Seconds since the start of this process."""
        return node in self._calls

    def forget(self, node: str) -> None:
        self._calls.pop(node, None)


def silent_since(seconds: float) -> str:
    return f"silent since {datetime.fromtimestamp(time.time() - seconds, UTC):%H:%M:%S} UTC"
