"""The parts of attempts that nodes run: what each node is ordered to do, and what it has reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

from ...decisions.demands import Queued
from ..database import Database
from ..records import NodeTaskRecord
from ..row_mapping import task_record


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
