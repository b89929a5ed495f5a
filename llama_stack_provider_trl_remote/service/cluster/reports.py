"""Reports of nodes about their tasks, read from the job store."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from llama_stack_provider_trl.jobs.store.records import NodeTaskRecord
from llama_stack_provider_trl.launch.base import Observation, TaskState
from llama_stack_provider_trl.specs.events import Failed

from ...wire import Stage, StageProgress, TaskOrder, TaskReport

log = logging.getLogger(__name__)
_OBSERVATION = TypeAdapter(Observation)
_TEXTS = ("detail", "launch_error", "stacks")
_MOST_TEXT = 65_536
"""Characters of a text in a report that are kept."""


class ReportedPart:
    """One node's part of an attempt: its record, its order and its last report."""

    def __init__(self, record: NodeTaskRecord) -> None:
        self.record = record
        self.node = record.node
        self.order = TaskOrder.model_validate_json(record.order)
        self.report, self.observed = _reported(record)
        self.has_exited = self.observed.state is TaskState.exited

    def is_done(self, stage: Stage) -> bool:
        report = self.report
        if report is None or report.stage is not stage or report.progress is not StageProgress.done:
            return False
        return report.port is not None or stage is not Stage.prepare

    @property
    def has_failed(self) -> bool:
        return self.report is not None and self.report.progress is StageProgress.failed

    @property
    def error(self) -> str:
        """The reason for which its stage failed."""
        assert self.report is not None
        return self.report.error or f"{self.report.stage} failed without a reason"

    @property
    def failed_event(self) -> Failed | None:
        """The `failed` event of a rank on a node without rank 0."""
        return None if self.report is None or self.report.failed is None else Failed.stored(self.report.failed)


def observation(values: Mapping[str, Any]) -> Observation:
    """Read the result of `dataclasses.asdict`. Long texts are cut. Raises ValueError: a value is missing, has a wrong
    type, or is no possible exit code or rank."""
    if unknown := set(values) - set(Observation.__dataclass_fields__):
        raise ValueError(f"an observation has the unknown fields {', '.join(sorted(unknown))[:100]}")
    found = _OBSERVATION.validate_python(dict(values))
    if abs(found.exit_code or 0) > 2**31 or not 0 <= (found.rank or 0) < 2**20:
        raise ValueError("the exit code or the rank is out of range")
    cut = {name: text[:_MOST_TEXT] for name in _TEXTS if len(text := getattr(found, name)) > _MOST_TEXT}
    return replace(found, **cut)


def combined(parts: Sequence[ReportedPart], exited: Mapping[str, float]) -> Observation:
    """The observation of the part that exited first with an error; where none did, of rank 0's node."""
    in_order = sorted(parts, key=lambda part: (exited[part.node], part.record.node_rank))
    by_runner = [part for part in in_order if part.observed.ended is not None or part.observed.launch_error]
    failed = [part for part in in_order if part.observed.exit_code != 0]
    first = (by_runner or failed or list(parts))[0]
    error = first.observed.launch_error
    return replace(first.observed, launch_error=f"node {first.node}: {error}" if error else "")


def progress_detail(parts: Sequence[ReportedPart], stage: Stage) -> str:
    """The current work of the nodes, for the job's status."""
    details = []
    for part in parts:
        report = part.report
        if report is None or report.stage is not stage:
            if stage in (Stage.prepare, Stage.probe):
                details.append(f"{part.node}: ordered to {stage}")
        elif detail := report.detail or part.observed.detail:
            details.append(f"{part.node}: {detail}")
    return "; ".join(details)


def _reported(record: NodeTaskRecord) -> tuple[TaskReport | None, Observation]:
    """A node's last report of its part. A report that another release stored and this one cannot read counts as none: a
    live node sends a new one within seconds."""
    unknown = Observation(TaskState.unknown)
    if record.report is None:
        return None, unknown
    try:
        report = TaskReport.model_validate_json(record.report)
        return report, unknown if report.observation is None else observation(report.observation)
    except ValueError as error:
        log.warning("task %s: the report of node %s cannot be read: %s", record.task_id, record.node, error)
        return None, unknown
