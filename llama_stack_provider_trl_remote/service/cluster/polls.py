"""Polls of agents: what a node reports, and the orders that it gets."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from llama_stack_provider_trl.errors import InvalidRequest, JobNotFound, StoreError
from llama_stack_provider_trl.jobs.decisions.states import TERMINAL
from llama_stack_provider_trl.jobs.store.records import NodeRecord
from llama_stack_provider_trl.jobs.store.store import Store
from llama_stack_provider_trl.specs.events import Failed

from ...wire import SILENCE, Orders, Poll, Stage, StageProgress, TaskOrder, TaskReport
from ..http.errors import Conflict, Gone, NotFound
from ..security.access import Caller
from ..views.service_logs import ServiceLogs
from .credentials import removed
from .joined_nodes import JoinedNodes
from .joins import note_used
from .loads import Loads
from .membership import Cluster, incarnation
from .poll_order import PollOrder
from .presence import Presence
from .reports import observation

log = logging.getLogger(__name__)


class Polls:
    """Records what polls report, and reads the orders of their nodes."""

    def __init__(
        self,
        store: Store,
        nodes: JoinedNodes,
        presence: Presence,
        cluster: Cluster,
        loads: Loads,
        order: PollOrder,
        logs: ServiceLogs,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._nodes, self._presence, self._cluster = store, nodes, presence, cluster
        self._loads, self._order, self._logs, self._clock = loads, order, logs, clock

    def node_of(self, name: str, poll: Poll) -> NodeRecord:
        """The node that polls. The errors may arise while the call waits for its answer. Raises NotFound; Gone: it was
        removed; Conflict: it has not joined since it was started."""
        try:
            record = self._nodes.get(name)
        except NotFound:
            # Checked after the read: another thread may remove the node meanwhile, which notes it before it deletes.
            if self._nodes.was_removed(name, incarnation(poll)):
                raise Gone(removed(name)) from None
            raise
        if record.boot_id != incarnation(poll):
            raise Conflict(f"node {name!r} has joined as another agent, or before this machine was started: join again")
        return record

    def record(self, caller: Caller, name: str, poll: Poll) -> bool:
        """Record the reports of a node. Returns whether any is new. Raises InvalidRequest, and the errors of
        `node_of`."""
        record = self.node_of(name, poll)
        for report in poll.tasks:
            _check(report)
        self._presence.note_call(name)
        note_used(self._store, caller)
        with self._order.recording(name, poll) as counts:
            is_new = counts and self._record(record, poll)
        if self._store.nodes.get(name) is None:  # another thread has removed it since it was found
            self._nodes.forget(name)
        return is_new

    def orders(self, record: NodeRecord, kept: Sequence[str]) -> Orders:
        """The orders of a node, and those of its kept jobs that are over."""
        orders = []
        for task in self._store.tasks.of_node(record.name):
            order = TaskOrder.model_validate_json(task.order)
            orders.append(order.model_copy(update={"stage": Stage(task.stage)}))
        over = tuple(job_uuid for job_uuid in kept if self._has_ended(job_uuid))
        return Orders(revision=record.revision, tasks=tuple(orders), over=over)

    def _record(self, record: NodeRecord, poll: Poll) -> bool:
        """Record what a node reports. Returns whether any of its tasks, or of its owner's use, is new."""
        name = record.name
        if poll.load is not None and name != self._cluster.head:  # which the service measures itself
            self._loads.note(name, poll.load)
        if poll.log is not None:
            self._logs.add(name, poll.log)
        if poll.leaving and record.mode == "open":
            self._store.nodes.set_mode(name, "draining")
            log.info("node %s is draining: its machine is about to be taken away", name)
        if abs(self._clock() - record.seen_at.timestamp()) > SILENCE / 3:  # abs: the clock may have been set back
            self._store.nodes.record_heartbeat(name)
        reports = {report.task_id: report for report in poll.tasks}
        gone = [
            task.task_id
            for task in self._store.tasks.of_node(name)
            # Without an order to stop its agent has ended it.
            if (task.stage == Stage.stop or task.task_id in reports) and _is_over(reports.get(task.task_id))
        ]
        is_new = self._store.tasks.record_reports(
            name, {key: report.model_dump_json() for key, report in reports.items()}, gone
        )
        return self._cluster.note_owner(name, poll.owner) or is_new

    def _has_ended(self, job_uuid: str) -> bool:
        """Whether a job has ended. An unknown one has not: the database may be another one than before."""
        try:
            return self._store.get(job_uuid).state in TERMINAL
        except (JobNotFound, StoreError):
            return False


def _check(report: TaskReport) -> None:
    """Check a report. Raises InvalidRequest: a report that the supervisor cannot read would block the job."""
    try:
        if report.observation is not None:
            observation(report.observation)
        if report.failed is not None:
            Failed.model_validate(report.failed)
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidRequest(f"tasks of {report.task_id}", str(error)[:200], "send a `TaskReport`") from error


def _is_over(report: TaskReport | None) -> bool:
    """Whether nothing of a task that was ordered to stop is left. None: the node does not know it (any more)."""
    return report is None or (report.stage is Stage.stop and report.progress is StageProgress.done)
