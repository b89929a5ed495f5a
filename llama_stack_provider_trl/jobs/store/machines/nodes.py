"""The machines that have joined, and the credentials that they authenticate with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..database import Database
from ..records import CredentialRecord, NodeMode, NodeRecord
from ..row_mapping import node_record

_REPLACED_SECONDS = 30.0
"""Seconds for which the credential of a node stays valid after its successor was used: requests with it may be in
flight."""
_REVOKED_SECONDS = 30 * 24 * 3600.0
"""Seconds for which the credential of a removed node is recognised as such."""
_UNUSED_CREDENTIALS = 4


class Nodes:
    """The nodes of a job database. Every method may raise StoreError.

    Args:
        clock: seconds since the epoch.
    """

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
        return [node_record(row) for row in self._database.select("select_nodes", {})]

    def get(self, name: str) -> NodeRecord | None:
        """The node of this name; None: there is none."""
        rows = self._database.select("select_node", {"name": name})
        return node_record(rows[0]) if rows else None

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
