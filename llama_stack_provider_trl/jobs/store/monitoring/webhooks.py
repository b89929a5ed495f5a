"""Which ends of jobs the receivers of webhooks have not been told yet.

A trigger of `schema.sql` writes a delivery for each receiver in the transaction that ends the job: no kill comes
between the two. A delivery is deleted once it is made or given up.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from ...decisions.states import JobState
from ..database import Database, Execute
from .totals import WEBHOOKS


class Delivery(NamedTuple):
    """What a receiver is to be told. Times are seconds since the epoch."""

    url: str
    job_uuid: str
    """The job may have been deleted."""
    state: JobState
    """How it ended."""
    ended_at: float
    tries: int
    """Those that have begun."""
    not_before: float
    """Time of the next one."""


class Webhooks:
    """The deliveries of a job database. Every method may raise StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def configure(self, receivers: Mapping[str, Collection[JobState]]) -> int:
        """Tell these addresses of jobs that end in these states from now on, and no others. Writes nothing where that
        is so already. Returns the deliveries to other addresses, which are given up and counted."""
        wanted = {(url, str(state)) for url, states in receivers.items() for state in states}
        if wanted == {(row["url"], row["state"]) for row in self._database.select("select_webhooks", {})}:
            return 0
        with self._database.transaction() as execute:
            execute("delete_webhooks", {})
            for url, state in sorted(wanted):
                execute("insert_webhook", {"url": url, "state": state})
            dropped = int(execute("delete_other_deliveries", {}).rowcount)
            if dropped:
                _count(execute, "given_up", dropped)
            execute("delete_other_rests", {})
        return dropped

    def next(self, url: str) -> Delivery | None:
        """The delivery to an address whose time comes first; new ones come before those that were tried, in the order
        in which the jobs ended. None of them comes while the address rests. None: there is none."""
        rows = self._database.select("select_next_delivery", {"url": url})
        return Delivery(**{**dict(rows[0]), "state": JobState(rows[0]["state"])}) if rows else None

    def begin(self, delivery: Delivery, not_before: float) -> Delivery | None:
        """Record a try, and when the next one comes if this one fails or its process is killed. Returns the delivery as
        it is now; None: it has changed since it was read."""
        row = {**delivery._asdict(), "not_before": not_before}
        with self._database.transaction() as execute:
            begun = execute("begin_delivery", row).rowcount == 1
        return delivery._replace(tries=delivery.tries + 1, not_before=not_before) if begun else None

    def rest(self, url: str, until: float) -> None:
        """Record that no delivery to an address comes before a time: neither one that waits nor one of a job that ends
        meanwhile."""
        with self._database.transaction() as execute:
            execute("put_rest", {"url": url, "rests_until": until})

    def end(self, delivery: Delivery, outcome: Literal["delivered", "given_up"]) -> None:
        """Forget a delivery that `begin` has returned, and count it. An address that has accepted one rests no more."""
        with self._database.transaction() as execute:
            if execute("delete_delivery", delivery._asdict()).rowcount == 1:
                _count(execute, outcome, 1)
            if outcome == "delivered":
                execute("delete_rest", {"url": delivery.url})

    def waiting(self) -> int:
        """The deliveries that have not been made."""
        return int(self._database.select("count_deliveries", {})[0]["waiting"])


def _count(execute: Execute, outcome: Literal["delivered", "given_up"], deliveries: int) -> None:
    execute("count", {"name": WEBHOOKS, "labels": json.dumps([outcome]), "value": float(deliveries)})
