"""The load of each machine: the last one in memory, and means of each minute in the job database for a day."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from llama_stack_provider_trl.errors import StoreError
from llama_stack_provider_trl.jobs.loads import NodeLoads
from llama_stack_provider_trl.jobs.store import Store

from ...nodes.load import mean
from ...wire import Load

log = logging.getLogger(__name__)
_MINUTE = 60
_FRESH = 30.0
"""Seconds after which the last load of a machine is no longer shown as that of now."""


class Loads:
    """Records the loads of machines. Safe to share between threads.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._stored = NodeLoads(store.database)
        self._clock = clock
        self._lock = threading.Lock()
        self._minutes: dict[str, tuple[int, list[Load]]] = {}
        """Node -> the minute (seconds since the epoch) that it is in, and the loads of that minute so far."""
        self._last: dict[str, tuple[float, Load]] = {}

    def note(self, node: str, load: Load) -> None:
        """Record a load that was measured just now. The first one of a minute stores the mean of the minute before."""
        now = self._clock()
        minute = int(now) // _MINUTE * _MINUTE
        with self._lock:
            before, loads = self._minutes.get(node, (minute, []))
            self._minutes[node] = (minute, [load] if before != minute else [*loads, load])
            self._last[node] = (now, load)
        if before != minute:
            try:
                self._stored.add(node, before, mean(loads).model_dump_json(exclude_none=True))
            except StoreError as error:  # a full disk: a gap in a curve, which must not fail the call
                log.warning("the load of node %s is not stored: %s", node, error)

    def last(self, node: str) -> Load | None:
        """The load of a machine now; None: it has reported none for a while."""
        at, load = self._last.get(node, (float("-inf"), None))
        return load if self._clock() - at < _FRESH else None

    def of(self, node: str, since: float) -> Sequence[tuple[int, Load]]:
        """The means of each minute that began at `since` or later, with its begin (seconds since the epoch); the last
        one is of a minute that may not be over. Minutes without a report are missing."""
        found = [(minute, Load.model_validate_json(text)) for minute, text in self._stored.of(node, since)]
        with self._lock:
            minute, loads = self._minutes.get(node, (0, []))
        if loads and minute >= since:
            found.append((minute, mean(loads)))
        return found

    def forget(self, node: str) -> None:
        """Drop what is known of a machine that was removed."""
        with self._lock:
            self._minutes.pop(node, None)
            self._last.pop(node, None)
