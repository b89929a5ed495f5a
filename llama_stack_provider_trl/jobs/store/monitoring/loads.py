"""How loaded each machine was, a row per minute, for a day."""

from __future__ import annotations

from collections.abc import Sequence

from ..database import Database

KEPT_SECONDS = 24 * 3600
"""Seconds for which loads are kept."""


class NodeLoads:
    """The loads of machines in a job database. Every method may raise StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, node: str, minute: int, load: str) -> None:
        """Store the load of a minute, and drop those that are too old.

        Args:
            minute: its begin, seconds since the epoch.
            load: as JSON.
        """
        row = {"node": node, "minute": minute, "load": load, "oldest": minute - KEPT_SECONDS}
        with self._database.transaction() as execute:
            execute("upsert_load", row)
            execute("delete_old_loads", row)

    def of(self, node: str, since: float) -> Sequence[tuple[int, str]]:
        """Minutes that began at `since` or later and their loads, the oldest first."""
        rows = self._database.select("select_loads", {"node": node, "since": since})
        return [(row["minute"], row["load"]) for row in rows]
