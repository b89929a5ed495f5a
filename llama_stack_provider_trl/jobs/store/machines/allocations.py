"""The machines that were requested of pools. A request is recorded here before it is sent."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence

from ...decisions.pools import Allocation, AllocationState
from ..database import Database

KEPT_SECONDS = 31 * 24 * 3600.0
"""Seconds for which an allocation is kept after its end: longer than a budget counts."""


class Allocations:
    """The allocations of a job database. Every method may raise StoreError.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def all(self, since: float = float("inf")) -> Sequence[Allocation]:
        """Allocations that have not ended, and those that ended after `since`; the oldest first."""
        return [_allocation(row) for row in self._database.select("select_allocations", {"since": since})]

    def record(self, request_id: str, pool: str, nodes: int, requested_for: str, handle: str = "") -> Allocation:
        """Record what is to be requested of a pool, in the state `wanted`."""
        now = self._clock()
        row = {"request_id": request_id, "pool": pool, "nodes": nodes, "requested_for": requested_for, "handle": handle}
        with self._database.transaction() as execute:
            execute("insert_allocation", {**row, "now": now})
            execute("delete_old_allocations", {"oldest": now - KEPT_SECONDS})
        return Allocation(request_id, pool, nodes, AllocationState.wanted, requested_for, now, handle=handle)

    def move(self, one: Allocation, state: AllocationState, message: str = "") -> bool:
        """Change the state of an allocation. Returns whether it was still the one that it has here."""
        row = {"request_id": one.request_id, "assumed": one.state, "state": state, "message": message}
        with self._database.transaction() as execute:
            changed: sqlite3.Cursor = execute("change_allocation", {**row, "now": self._clock()})
            return changed.rowcount == 1

    def note(self, one: Allocation, message: str) -> None:
        """Record the reason for which an allocation waits."""
        if message != one.message:
            with self._database.transaction() as execute:
                execute("note_allocation", {"request_id": one.request_id, "message": message})


def _allocation(row: sqlite3.Row) -> Allocation:
    return Allocation(**{**dict(row), "state": AllocationState(row["state"])})
