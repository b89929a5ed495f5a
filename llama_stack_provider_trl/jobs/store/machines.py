"""The machines of a service in its job database: those that have joined with their credentials, their tasks, and those
that were requested of pools, which are recorded before the request is sent."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

from ..decisions.demands import Queued
from ..decisions.pools import Allocation, AllocationState
from .database import Database
from .records import CredentialRecord, NodeMode, NodeRecord, NodeTaskRecord
from .row_mapping import record_of, task_record

_REPLACED_SECONDS = 30.0
"""Seconds for which the credential of a node stays valid after its successor was used: requests with it may be in
flight."""
_REVOKED_SECONDS = 30 * 24 * 3600.0
"""Seconds for which the credential of a removed node is recognised as such."""
_UNUSED_CREDENTIALS = 4


class Nodes:
    """The nodes of a job database. Every method may raise StoreError."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def join(self, name: str, machine_id: str, boot_id: str, report: str, credential: str | None = None) -> None:
        """Record a node as it describes itself. If it is another machine than before, or has rebooted since, its tasks
        count as gone.

        Args:
            credential: sha256 of the one that this join issues.
        """
        row = {"name": name, "machine_id": machine_id, "boot_id": boot_id, "report": report, "now": self._clock()}
        with self._database.transaction() as execute:
            known = execute("select_node", row).fetchone()
            if known is not None and (known["machine_id"], known["boot_id"]) != (machine_id, boot_id):
                execute("note_tasks_gone", {"node": name})
            execute("upsert_node", row)
            if credential is not None:
                execute("insert_credential", {"sha256": credential, "node": name})
                execute("limit_unused_credentials", {"node": name, "most": _UNUSED_CREDENTIALS})

    def credential(self, sha256: str) -> CredentialRecord | None:
        """The credential with this hash; None: there is none, or it has expired."""
        rows = self._database.select("select_credential", {"sha256": sha256, "now": self._clock()})
        return CredentialRecord(rows[0]["node"], bool(rows[0]["used"]), bool(rows[0]["revoked"])) if rows else None

    def has_used_credential(self, node: str) -> bool:
        """Whether a node has sent a request with a credential that is valid."""
        return bool(self._database.select("select_used_credential", {"node": node, "now": self._clock()}))

    def record_credential_use(self, node: str, sha256: str) -> None:
        """Record that a node uses this credential. Those that were issued before it expire soon."""
        now = self._clock()
        with self._database.transaction() as execute:
            if execute("use_credential", {"sha256": sha256}).rowcount:
                row = {"node": node, "sha256": sha256, "expires_at": now + _REPLACED_SECONDS}
                execute("expire_credentials_before", row)
                execute("delete_expired_credentials", {"now": now})

    def all(self) -> Sequence[NodeRecord]:
        """All nodes in the order in which they first joined."""
        return [record_of(NodeRecord, row) for row in self._database.select("select_nodes", {})]

    def get(self, name: str) -> NodeRecord | None:
        """The node of this name; None: there is none."""
        rows = self._database.select("select_node", {"name": name})
        return record_of(NodeRecord, rows[0]) if rows else None

    def record_heartbeat(self, name: str) -> None:
        """Record that a node has sent a request now."""
        with self._database.transaction() as execute:
            execute("note_seen", {"name": name, "now": self._clock()})

    def set_mode(self, name: str, mode: NodeMode) -> bool:
        """Change whether a node accepts jobs. Returns whether there is such a node."""
        with self._database.transaction() as execute:
            return execute("change_mode", {"name": name, "mode": mode}).rowcount == 1

    def remove(self, name: str) -> None:
        """Delete a node with its loads, and revoke its credentials; its tasks count as gone."""
        now = self._clock()
        with self._database.transaction() as execute:
            execute("note_tasks_gone", {"node": name})
            execute("delete_node", {"name": name})
            execute("delete_loads", {"name": name})
            execute("revoke_credentials", {"node": name, "expires_at": now + _REVOKED_SECONDS})
            execute("delete_expired_credentials", {"now": now})


class NodeTasks:
    """The tasks of a job database. Every method may raise StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._stopping: set[str] = set()
        """Cancelled tasks whose order to end could not be recorded: their nodes get it all the same."""

    def add(self, tasks: Iterable[NodeTaskRecord]) -> None:
        """Order nodes to run their parts of an attempt. Parts that were ordered before do not change."""
        with self._database.transaction() as execute:
            for task in tasks:
                execute("insert_task", {**asdict(task), "places": ",".join(task.places)})

    def of_attempt(self, task_id: str) -> Sequence[NodeTaskRecord]:
        """The parts of an attempt, rank 0's node first."""
        return [task_record(row) for row in self._database.select("select_tasks", {"task_id": task_id})]

    def of_node(self, node: str) -> Sequence[NodeTaskRecord]:
        """What a node is ordered to do."""
        found = [task_record(row) for row in self._database.select("select_tasks_of_node", {"node": node})]
        return [replace(task, stage="stop") if task.task_id in self._stopping else task for task in found]

    def current(self, task_id: str, node: str) -> NodeTaskRecord | None:
        """A node's part of an attempt; None: the attempt is not the current one, or is being stopped."""
        rows = self._database.select("select_current_task", {"task_id": task_id, "node": node})
        return task_record(rows[0]) if rows and task_id not in self._stopping else None

    def job_as_queued(self, job_uuid: str) -> Queued:
        """A job as the placement would see it if its attempt had ended."""
        (row,) = self._database.select("select_as_queued", {"job_uuid": job_uuid})
        return Queued._make(row)

    def has_current_of_job(self, node: str, job_uuid: str) -> bool:
        """Whether a node takes part in the current attempt of a job."""
        return bool(self._database.select("select_current_task_of_job", {"node": node, "job_uuid": job_uuid}))

    def has_current_with_rows(self, node: str, sha256: str) -> bool:
        """Whether a node takes part in the current attempt of a job with these rows."""
        return bool(self._database.select("select_current_task_with_rows", {"node": node, "sha256": sha256}))

    @contextmanager
    def while_current(self, task_id: str, node: str) -> Iterator[bool]:
        """Yields whether a node's part of an attempt is current, which does not change in the block. The block must be
        quick: it is a write transaction."""
        with self._database.transaction() as execute:
            row = {"task_id": task_id, "node": node}
            yield execute("select_current_task", row).fetchone() is not None

    def advance(self, tasks: Iterable[NodeTaskRecord], stage: str) -> None:
        """Order the next stage, with the orders of these records."""
        with self._database.transaction() as execute:
            for task in tasks:
                row = {"task_id": task.task_id, "node": task.node, "source": task.stage}
                execute("advance_task", {**row, "stage": stage, "order": task.order})

    def stop(self, task_id: str, ending: str, cancelled: bool = False) -> None:
        """Order every node to end its part. The first `ending` of an attempt counts.

        Args:
            cancelled: order it even where it cannot be recorded. Other endings must be recorded first: a lost node, for
                one, may return before.
        """
        if cancelled:
            self._stopping.add(task_id)
        with self._database.transaction() as execute:
            execute("stop_tasks", {"task_id": task_id, "ending": ending})
        self._stopping.discard(task_id)

    def record_reports(self, node: str, reports: Mapping[str, str], gone: Iterable[str]) -> bool:
        """Record what a node reports of its tasks: task_id -> report, and the tasks that have no process or file left.
        Returns whether any of it is new."""
        with self._database.transaction() as execute:
            new = 0
            for task_id, report in reports.items():
                new += execute("note_task", {"task_id": task_id, "node": node, "report": report}).rowcount
            for task_id in gone:
                new += execute("note_task_gone", {"task_id": task_id, "node": node}).rowcount
        return new > 0

    def delete_ended(self) -> None:
        """Delete the tasks of attempts that have ended on every node."""
        with self._database.transaction() as execute:
            execute("forget_tasks", {})


KEPT_SECONDS = 31 * 24 * 3600.0
"""Seconds for which an allocation is kept after its end: longer than a budget counts."""


class Allocations:
    """The allocations of a job database. Every method may raise StoreError."""

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
