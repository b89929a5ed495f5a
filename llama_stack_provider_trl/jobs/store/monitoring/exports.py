"""What trackers have of the points of jobs: a cursor per job and tracker. The exporter alone changes it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from ..database import Database
from ..records import ExportRecord
from ..row_mapping import record_of

DUE = 200
"""Exports that one pass handles."""


class Exports:
    """The exports of a job database. Every method may raise StoreError.

    Methods that change a record return whether its cursor was still the given record's; if not, nothing changes.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def of_job(self, job_uuid: str) -> Sequence[ExportRecord]:
        """The exports of a job, by tracker."""
        return [record_of(ExportRecord, row) for row in self._database.select("select_exports", {"job_uuid": job_uuid})]

    def due(self, trackers: Iterable[str], limit: int = DUE) -> Sequence[ExportRecord]:
        """Exports to some trackers with points to send, soon or now, or with an end to report; the oldest job's first.
        Their `behind` is 0."""
        values = {"trackers": json.dumps(list(trackers)), "limit": limit}
        return [record_of(ExportRecord, row) for row in self._database.select("select_exports_due", values)]

    def begun_since(self, record: ExportRecord) -> tuple[int, int] | None:
        """The attempts that have begun to train after the record's: the last one, and the earliest step that one of
        them resumed from. None: there are none."""
        (row,) = self._database.select("select_begun", {"job_uuid": record.job_uuid, "attempt": record.attempt})
        return None if row["attempt"] is None else (row["attempt"], row["start_step"])

    def last_step(self, job_uuid: str) -> int:
        """The last step that can be exported; -1: none. A later attempt may add to the newest step of a job that has
        not ended."""
        (row,) = self._database.select("select_last_step", {"job_uuid": job_uuid})
        return -1 if row["step"] is None else int(row["step"])

    def restart(self, record: ExportRecord, attempt: int) -> bool:
        """Begin another copy in the tracker, with the points of the store as they are since `attempt` has begun."""
        return self._change("restart_export", record, new_attempt=attempt)

    def intend(self, record: ExportRecord, sent_step: int, attempt: int) -> bool:
        """Record that points up to `sent_step` are being sent, as they are since `attempt` has begun."""
        return self._change("intend_export", record, sent_step=sent_step, new_attempt=attempt)

    def accept(self, record: ExportRecord, step: int, position: dict[str, Any]) -> bool:
        """Record that the tracker has accepted the points up to `step`."""
        return self._change("accept_export", record, new_step=step, new_position=json.dumps(position))

    def finish(self, record: ExportRecord) -> bool:
        """Record that the tracker has all points of the job, and its end."""
        return self._change("finish_export", record)

    def fail(self, record: ExportRecord, error: str) -> bool:
        """Record why the tracker did not accept points; they are sent again."""
        return self._change("fail_export", record, error=error)

    def _change(self, name: str, record: ExportRecord, **values: Any) -> bool:
        assumed = {field: getattr(record, field) for field in ("job_uuid", "tracker", "key", "generation", "step")}
        with self._database.transaction() as execute:
            changed: sqlite3.Cursor = execute(name, {**assumed, **values})
            return changed.rowcount == 1
