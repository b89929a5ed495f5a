"""Joins: a machine becomes a node, or its agent comes back after a restart."""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from llama_stack_provider_trl import __version__
from llama_stack_provider_trl.errors import InvalidRequest, StoreError
from llama_stack_provider_trl.jobs.store.records import NodeRecord
from llama_stack_provider_trl.jobs.store.store import Store

from ...wire import SILENCE, SPECS, VERSIONS, Joined, NodeReport
from ..http.errors import Conflict
from ..security.access import Caller, Refused
from .credentials import new_credential
from .joined_nodes import JoinedNodes
from .membership import Cluster, has_other_build, incarnation
from .presence import Presence

log = logging.getLogger(__name__)
_MOST_NODES = 1024
"""Nodes that tokens of agents may add; each is a row, and a part of every placement."""


class Joins:
    """Records nodes that join, and issues their credentials.

    Args:
        head: name of the service's own machine.
        on_loopback: whether the service listens for this machine alone.
        versions: of the packages that nodes must have too; called at the first join.
        wake: has the supervisor check the jobs now.
    """

    def __init__(
        self,
        store: Store,
        nodes: JoinedNodes,
        presence: Presence,
        cluster: Cluster,
        head: str,
        on_loopback: bool,
        versions: Callable[[], Mapping[str, str]],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._nodes, self._presence, self._cluster = store, nodes, presence, cluster
        self._head, self._on_loopback, self._versions, self._wake = head, on_loopback, versions, wake
        self._clock = clock
        self._joining = threading.Lock()
        """Lock from the check of a name until it is taken."""

    def join(self, caller: Caller, report: NodeReport) -> Joined:
        """Record a node. The answer has its new credential; empty: the caller has one that is not replaced. Raises
        InvalidRequest, Conflict; Refused: 403, the credential of another node."""
        self._check_address(report)
        ours = self._versions()
        for package in VERSIONS:
            theirs = report.versions.get(package, "").partition("+")[0]
            if theirs != ours[package]:
                raise Conflict(
                    f"node {report.name!r} has {package} {theirs or 'none'}, the service has "
                    f"{ours[package] or 'none'}: install the same version on both"
                )
        theirs, is_other = report.versions.get(SPECS, ""), has_other_build(report)
        # This machine's own agent has a token that lasts as long as this process.
        credential, sha256 = ("", None) if report.name == self._head else new_credential()
        with self._joining:
            known = self._store.nodes.get(report.name)
            self._check_name(caller, report, known)
            # An agent that has joined already keeps its trainings, and gets no further ones (`Cluster.why_closed`).
            if is_other and (known is None or known.boot_id != incarnation(report)):
                raise Conflict(
                    f"node {report.name!r} has another build of llama_stack_provider_trl {__version__}: its job "
                    f"specifications have the digest {theirs or 'none'}, the service's {ours[SPECS]}. Install the same "
                    "build on both, which is the wheel or the checkout of the newer one, and start the agent again"
                )
            if known is None and caller.node is None and len(self._store.nodes.all()) >= _MOST_NODES:
                raise Conflict(
                    f"there are {_MOST_NODES} nodes already: remove those that are gone (trl-remote nodes remove "
                    f"NAME), and start the agent of {report.name!r} again"
                )
            note_used(self._store, caller)
            self._nodes.note_join(report.name)
            self._store.nodes.join(
                report.name, report.machine_id, incarnation(report), report.model_dump_json(), sha256
            )
            self._presence.note_call(report.name)
            self._cluster.allow_again(report.name)
        self._wake()
        if known is None:
            devices = ", ".join(device.name for device in report.devices)
            log.info("node %s (%s) has joined with %s", report.name, report.address, devices)
        return Joined(node=report.name, head=self._head, version=__version__, credential=credential)

    def _check_address(self, report: NodeReport) -> None:
        """Check that other nodes may reach a node. Raises InvalidRequest."""
        try:
            address = ipaddress.ip_address(report.address)
        except ValueError as error:
            hint = "give the literal IP address at which the other nodes reach this one (TRL_NODE_ADDRESS)"
            raise InvalidRequest("address", report.address, hint) from error
        mapped = getattr(address, "ipv4_mapped", None) or address
        if mapped.is_unspecified or mapped.is_multicast:
            raise InvalidRequest("address", report.address, "send the address of one of its network interfaces")
        if mapped.is_loopback and not self._on_loopback:
            hint = "other nodes cannot reach that: give the address of the interface that they share (TRL_NODE_ADDRESS)"
            raise InvalidRequest("address", report.address, hint)

    def _check_name(self, caller: Caller, report: NodeReport, known: NodeRecord | None) -> None:
        """Check that a join may use its name. No message here discloses anything about the other machine. Raises
        Conflict: it is another node's; Refused: 403, the caller is another node."""
        name, same_machine = report.name, known is not None and known.machine_id == report.machine_id
        if caller.node is not None and caller.node != name:
            raise Refused(403, f"this credential is another node's: only {name!r} itself may join under this name")
        if name == self._head and caller.node != name:
            raise Conflict(
                f"the node {name!r} is there already: it is the service's own machine; choose another name "
                "(--name, TRL_NODE_NAME)"
            )
        if known is None or (caller.node == name and (same_machine or name == self._head)):
            return
        if self._is_live(known):
            # Until a credential was used, the answer with it may be lost: the same agent then joins again.
            is_same_agent = same_machine and known.boot_id == incarnation(report)
            if is_same_agent and not self._store.nodes.has_used_credential(name):
                return
            raise Conflict(
                f"the node {name!r} is there already: choose another name (--name, TRL_NODE_NAME); if this is its "
                f"machine with a new data directory, stop its agent and start this one {SILENCE:.0f} s later"
            )
        if caller.node != name and not same_machine:
            raise Conflict(
                f"the node {name!r} joined from another machine before: choose another name (--name, TRL_NODE_NAME), "
                f"or have the operator remove it (trl-remote nodes remove {name})"
            )

    def _is_live(self, record: NodeRecord) -> bool:
        """Whether the node called within SILENCE, before the service was started too."""
        if self._presence.has_called(record.name):
            return not self._presence.is_absent(record.name)
        return abs(self._clock() - record.seen_at.timestamp()) < SILENCE  # abs: the clock may have been set back


def note_used(store: Store, caller: Caller) -> None:
    """Record the first use of a credential, with which those before it expire."""
    if caller.node is not None and caller.unused_credential:
        with suppress(StoreError):  # a full disk: those before it stay valid, and the next call tries again
            store.nodes.record_credential_use(caller.node, caller.unused_credential)
