"""The machines that jobs may run on, for the placement."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from llama_stack_provider_trl.jobs.decisions.placement import Node
from llama_stack_provider_trl.jobs.store.records import NodeRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.schema import schema_digest

from ...nodes.discovery.sightings import machine_hash
from ...wire import SPECS, NodeReport, OwnerUse, Poll
from .presence import Presence, silent_since

FORMING = 20.0
"""Seconds after a node's first join in which others are expected to follow it."""
log = logging.getLogger(__name__)
NodeCondition = Literal[
    "open", "cordoned", "draining", "leaving", "absent", "awaited", "other_build", "in_use", "unreadable"
]
"""Whether a node takes jobs, and if not, why: by an operator's order, or since it goes back to its pool (`leaving`),
does not call (`absent`), has not called since the service was started (`awaited`), is of another build, is loaned and
not known to be free of its owner (`in_use`), or its stored report cannot be read."""
_OWNER = {
    OwnerUse.high: "in use by its owner",
    OwnerUse.unknown: "loaned, and its owner's load is not known yet",
}
"""Why a loaned node takes no jobs."""


def incarnation(node: NodeReport | Poll | NodeRecord) -> str:
    """Identifies one boot of a node's machine together with its agent's data directory: a node's tasks end with it."""
    return node.boot_id if isinstance(node, NodeRecord) else f"{node.boot_id} {node.agent_id}".strip()


class Cluster:
    """Lists the machines that jobs may run on: this one, and those that have joined.

    Args:
        head: name of this machine; its agent joins under it too.
        cpus: of this machine, until its agent has reported them.
        slices: those of its devices that are MIG slices.
        closed: the reason for which a pool lets a node take no jobs; empty: it does.
    """

    def __init__(
        self,
        store: Store,
        presence: Presence,
        head: str,
        host_id: str,
        devices: Sequence[str],
        cpus: int,
        slices: Collection[str] = (),
        closed: Callable[[str], str] = lambda name: "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._clock = store, clock
        self.presence = presence
        self.head = head
        self._closed = closed
        self._unreadable: set[str] = set()
        self._owners: dict[str, OwnerUse] = {}
        """Loaned node -> how much its owner uses it, as its agent has reported last."""
        self._refused: dict[str, dict[str, str]] = {}
        """Node -> job that it cannot start -> reason."""
        self._earlier: dict[str, frozenset[str]] = {}
        """Node -> tasks that were ordered before its agent joined last."""
        self._refusing = threading.Lock()
        """Held where either changes: the supervisor's thread and those of calls do that."""
        self._head = Node(head, tuple(devices), host_id, head=True, joins=False, cpus=cpus, slices=frozenset(slices))

    def nodes(self) -> list[Node]:
        """All machines, this one first."""
        head, others = self._head, []
        for record in self._store.nodes.all():
            report = self.report(record)
            if report is None:
                continue
            if record.name == self.head:
                why = "" if record.mode == "open" else record.mode
                joins = self.presence.has_called(record.name) and not self.presence.is_absent(record.name)
                head = replace(
                    _node(record, report, why, self._refused.get(record.name)),
                    devices=self._head.devices,
                    slices=self._head.slices,
                    machine=self._head.machine,
                    head=True,
                    joins=joins,
                )
            else:
                node = _node(record, report, self.why_closed(record, report), self._refused.get(record.name))
                in_use = self._owner(report) is OwnerUse.high
                evicted = in_use and not node.draining
                is_new = 0 <= self._clock() - record.joined_at.timestamp() < FORMING
                others.append(replace(node, draining=node.draining or in_use, evicted=evicted, is_new=is_new))
        return [head, *others]

    def machines(self) -> dict[str, str]:
        """Node -> hash of its machine's id: nodes with the same one are one machine to the placement."""
        return {node.name: machine_hash(node.where) for node in self.nodes()}

    def report(self, record: NodeRecord) -> NodeReport | None:
        """A node's last report. None: another release stored it and this one cannot read it. The node gets no jobs
        until its agent has joined again; other nodes do."""
        try:
            return NodeReport.model_validate_json(record.report)
        except ValueError as error:
            if record.name not in self._unreadable:
                log.error(
                    "node %s gets no jobs until its agent joins again, its report cannot be read: %s",
                    record.name,
                    error,
                )
            self._unreadable.add(record.name)
            return None

    def note_owner(self, node: str, use: OwnerUse | None) -> bool:
        """Record how much the owner of a loaned node uses it; None: it is not loaned. Returns whether that has
        changed."""
        before = self._owners.get(node)
        if use is None:
            self._owners.pop(node, None)
        else:
            self._owners[node] = use
        return use is not before

    def _owner(self, report: NodeReport) -> OwnerUse:
        return self._owners.get(report.name, OwnerUse.unknown) if report.loaned else OwnerUse.low

    def leave_out(self, node: str, task_id: str, job_uuid: str, why: str) -> None:
        """Give a node no further attempt of a job, until its agent joins again or the service is started again. Has no
        effect if the agent has joined since the task was ordered."""
        with self._refusing:
            if task_id not in self._earlier.get(node, ()):
                jobs = self._refused.get(node, {})
                # Replaced, since a placement may read it in another thread.
                self._refused[node] = {**jobs, job_uuid: why}

    def allow_again(self, node: str) -> None:
        """Let a node whose agent has joined again start any job."""
        with self._refusing:
            self._earlier[node] = frozenset(task.task_id for task in self._store.tasks.of_node(node))
            self._refused.pop(node, None)

    def forget(self, node: str) -> None:
        """Drop what is known of a node that was removed."""
        with self._refusing:
            self._owners.pop(node, None)
            self._refused.pop(node, None)
            self._earlier.pop(node, None)

    def why_closed(self, record: NodeRecord, report: NodeReport) -> str:
        """The reason for which a node takes no jobs; empty: it takes jobs."""
        match self._condition(record, report):
            case "leaving":
                return self._closed(record.name)
            case "absent":
                return silent_since(self.presence.silence(record.name))
            case "awaited":
                return "not seen since the service was started"
            case "other_build":
                return "of another build than the service: install the same one there, and start its agent again"
            case "in_use":
                return _OWNER[self._owner(report)]
            case mode:
                return "" if mode == "open" else mode

    def conditions(self) -> dict[str, NodeCondition]:
        """Node -> whether it takes jobs; the service's own machine first."""
        found: dict[str, NodeCondition] = {self.head: "open"}
        for record in self._store.nodes.all():
            report = self.report(record)
            if record.name == self.head:  # it takes jobs of its own without its agent
                found[record.name] = record.mode
            else:
                found[record.name] = "unreadable" if report is None else self._condition(record, report)
        return found

    def _condition(self, record: NodeRecord, report: NodeReport) -> NodeCondition:
        if self._closed(record.name):
            return "leaving"
        if self.presence.is_absent(record.name):
            return "absent"
        if not self.presence.has_called(record.name):
            return "awaited"
        if record.mode == "open" and record.name != self.head and has_other_build(report):
            return "other_build"
        if record.mode == "open" and record.name != self.head and self._owner(report) is not OwnerUse.low:
            return "in_use"
        return record.mode


def has_other_build(report: NodeReport) -> bool:
    """Whether a node's agent cannot be relied on to parse the service's job specifications."""
    return report.versions.get(SPECS) != schema_digest()


def _node(record: NodeRecord, report: NodeReport, why_closed: str, refused: Mapping[str, str] | None) -> Node:
    return Node(
        name=record.name,
        devices=tuple(device.name for device in report.devices),
        slices=frozenset(device.name for device in report.devices if device.is_slice),
        machine=report.host_id or record.machine_id,
        why_closed=why_closed,
        draining=record.mode == "draining",
        memory={device.name: device.memory_bytes for device in report.devices if device.memory_bytes},
        uuids={device.name: device.uuid for device in report.devices if device.uuid},
        cpus=report.cpus,
        memory_bytes=report.memory_bytes,
        labels=report.labels,
        models=frozenset(report.models),
        refused=refused,
    )
