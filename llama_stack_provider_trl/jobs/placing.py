"""Places the jobs of a store, pass by pass: which of them start now, and what the others wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from .cores import Held
from .demands import Queued
from .placement import Node, Placed, place
from .pooling import Pooled, kind_of_job
from .store import Store
from .waits import why_waits


class Placing:
    """Places waiting jobs. Every method may raise StoreError.

    Args:
        nodes: returns all machines, the service's own first.
        pooled: returns what pools may give, and what was requested of them.
    """

    def __init__(self, store: Store, nodes: Callable[[], Sequence[Node]], pooled: Callable[[], Pooled]) -> None:
        self._store, self._nodes, self._pooled = store, nodes, pooled
        self._last_without_start: tuple[object, ...] | None = None

    @contextmanager
    def placed(self, now: float) -> Iterator[Placed]:
        """Yields the jobs that are to start, with their places; then records what the others wait for.

        Skipped while jobs, devices and nodes are the same as at the last pass that yielded none: time alone only keeps
        more devices for old jobs, and frees none.

        Args:
            now: seconds since the epoch.
        """
        holders, nodes, pooled = self._store.holders(), self._nodes(), self._pooled()
        joined = {node.name for node in nodes}
        expected = [node for node in pooled.expected if node.name not in joined]
        taken = Held(holders)
        some_free = any(
            not taken.is_full(node.place(device), node.cpus)
            for node in nodes
            if not node.why_closed
            for device in node.devices
        )
        queue = self._store.queue() if some_free else self._store.kinds_waiting()
        seen = nodes, holders, queue, pooled
        if seen == self._last_without_start:
            yield {}
            return
        found = place(queue, [*nodes, *expected], holders, now, pooled.obtainable) if some_free else {}
        yield found
        if found:
            holders = self._store.holders()
        waiting = [(kind, _why(kind, holders, nodes, pooled)) for kind in self._store.kinds_waiting()]
        if changed := [(kind, why) for kind, why in waiting if why != kind.detail]:
            self._store.set_waiting_details(changed)
        self._last_without_start = None if found else seen


def _why(kind: Queued, holders: Mapping[str, str], nodes: Sequence[Node], pooled: Pooled) -> str:
    """Why jobs of a kind wait, and what was requested of pools for them."""
    texts = why_waits(kind, holders, nodes, pooled.obtainable), pooled.notes.get(kind_of_job(kind))
    return "; ".join(text for text in texts if text)
