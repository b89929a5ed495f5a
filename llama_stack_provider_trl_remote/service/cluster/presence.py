"""Records the time of each node's last call.

Silence counts only while this service was demonstrably able to receive a call: a service that is overloaded, out of
connections or stopped receives none, and its nodes are as alive as before."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from .states import ABSENT, CALL_DUE, Contact, NodeState, node_state

GAP = 5.0
"""Seconds between two reads, or two proofs, after which this process itself was stopped or could not be reached: missed
calls are not the nodes' fault."""


class Presence:
    """Keeps the time of each node's last call in memory, at the earliest the start of the service.

    From `require_proofs` on, silence counts up to the last `note_proof` only. A proof after GAP seconds starts the
    clocks of all nodes again.

    Safe to share between threads.

    Args:
        own: name of this machine, whose agent reaches the service without a network.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, own: str = "") -> None:
        self._clock, self._own = clock, own
        self._calls: dict[str, float] = {}
        self._floor = self._read_at = self._others = self._others_again = clock()
        self._proven: float | None = None
        """Time of the last proof that this service receives calls; None: none is required."""

    def note_call(self, node: str) -> None:
        self._calls[node] = now = self._clock()
        if node != self._own:
            if now - self._others > CALL_DUE:
                self._others_again = now
            self._others = now

    def require_proofs(self) -> None:
        """Count silence from now on only while proofs come."""
        if self._proven is None:
            self._proven = self._clock()

    def require_no_proofs(self) -> None:
        """Count silence without proofs: nothing can prove that this service receives calls."""
        self._proven = None

    def note_proof(self) -> None:
        """Record that a call of this service was answered that takes the way of the nodes' calls."""
        now = self._clock()
        if self._proven is not None and now - self._proven > GAP:
            self._floor = now
        self._proven = now

    def silence(self, node: str) -> float:
        """Seconds since a node's last call, or since this service could receive one; what is not proven does not
        count."""
        now = self._clock()
        if now - self._read_at > GAP:
            self._floor = now
        self._read_at = now
        until = now if self._proven is None else self._proven
        return max(0.0, until - max(self._calls.get(node, self._floor), self._floor))

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
        """Whether a node has called since the start of this process."""
        return node in self._calls

    def forget(self, node: str) -> None:
        self._calls.pop(node, None)


def silent_since(seconds: float) -> str:
    return f"silent since {datetime.fromtimestamp(time.time() - seconds, UTC):%H:%M:%S} UTC"
