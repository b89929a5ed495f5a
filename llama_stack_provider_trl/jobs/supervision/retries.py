"""Decides whether a job whose attempt has failed is queued again, and with which changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ...specs.events import Reason
from ..decisions.placement import Node, is_remote
from ..decisions.states import REASONS, JobState
from ..store.records import JobRecord
from ..store.store import Store
from .verdict import Verdict, may_shrink, shrunk_settings

log = logging.getLogger(__name__)
LONGEST_BACKOFF = 600.0
"""Seconds."""
LOSSES_IN_A_ROW = 5
"""Attempts in a row without a step that a job may lose to lost nodes before a further one counts as a retry."""


class Retries:
    """Queues failed jobs again. Every method may raise StoreError, and returns whether the job was queued.

    Args:
        nodes: all machines, this one first.
    """

    def __init__(self, store: Store, nodes: Callable[[], Sequence[Node]]) -> None:
        self._store, self._nodes = store, nodes

    def after(self, job: JobRecord, decided: Verdict) -> bool:
        """Queue a job again after any failure of a whole attempt: without a lost node, with a smaller batch, or as it
        is."""
        if decided.reason is Reason.node_lost and not job.spec.lifecycle.failover:
            return False
        if decided.reason is Reason.node_lost and self._without_the_node(job, decided.message):
            return True
        if decided.state is not JobState.failed:
            return False
        if decided.reason is Reason.launch_failed and self._on_other_nodes(job, decided.message):
            return True
        return self._with_smaller_batch(job, decided) or self.same(job, decided.reason, decided.message)

    def same(self, job: JobRecord, reason: Reason | None, message: str) -> bool:
        """Queue a failed job again as it is, if the failure may be temporary and the job has a retry left."""
        wait = None if reason is None else backoff(reason, job.retries_used, job.spec.lifecycle.retry_backoff)
        if reason is None or wait is None or job.retries_used >= job.spec.lifecycle.retries:
            return False
        moved = self._store.retry(job, reason, message, wait)
        if moved:
            log.warning(
                "job %s: attempt %d ended (%s), retry %d of %d in %.0f s: %s",
                *(job.job_uuid, job.attempt, reason, job.retries_used + 1, job.spec.lifecycle.retries, wait),
                message.partition("\n")[0],
            )
        return moved

    def _with_smaller_batch(self, job: JobRecord, decided: Verdict) -> bool:
        """Queue a job that ran out of memory again, in less memory; it resumes from its last checkpoint."""
        if not may_shrink(job, self._store.attempts(job.job_uuid), decided.reason):
            return False
        smaller = job.spec.in_smaller_parts()
        assert decided.reason is not None
        changes = []
        if smaller is not None:
            was, now = (
                " and ".join(f"{name} {spec.value(name)}" for name in shrunk_settings(job.spec, smaller))
                for spec in (job.spec, smaller)
            )
            changes.append(f"{now} instead of {was}, which gives the same steps")
        if "accumulator_bytes" in ((job.effective or {}).get("effective") or {}):
            limit = "no more than 512 MiB for attention's additions in a fixed order"
            changes.append(f"{limit}, which repeat up to rounding")
        change = f"attempt {job.attempt} ran out of memory: the next ones train with {', and '.join(changes)}"
        self._store.warn(job.job_uuid, f"{change}; oom_retry false forbids it")
        log.warning("job %s: %s", job.job_uuid, change)
        return self._store.retry(job, decided.reason, decided.message, 0.0, counts=False)

    def _without_the_node(self, job: JobRecord, message: str) -> bool:
        """Queue a job that has lost a node again.

        The job is not at fault: the loss counts as a retry only after `LOSSES_IN_A_ROW` attempts without a step."""
        if not is_remote(job.devices):
            return False
        without_step = 0
        for tried in reversed(self._store.attempts(job.job_uuid)):
            if tried.step > tried.start_step or (tried.reason is not Reason.node_lost and tried.attempt != job.attempt):
                break
            without_step += 1
        if without_step >= LOSSES_IN_A_ROW:
            return False
        wait = backoff(Reason.node_lost, max(0, without_step - 1), job.spec.lifecycle.retry_backoff)
        assert wait is not None
        log.warning("job %s: attempt %d has lost a node: %s", job.job_uuid, job.attempt, message.partition("\n")[0])
        return self._store.retry(job, Reason.node_lost, message, wait, counts=False)

    def _on_other_nodes(self, job: JobRecord, message: str) -> bool:
        """Queue a job again that a node cannot start for a lasting reason. This is no retry: the placement leaves that
        node out."""
        on = {place.rpartition("/")[0] for place in job.devices}
        refusing = {"" if node.head else node.name for node in self._nodes() if job.job_uuid in (node.refused or ())}
        if not on & refusing:
            return False
        before = [tried for tried in self._store.attempts(job.job_uuid) if tried.reason is Reason.launch_failed]
        wait = backoff(Reason.launch_failed, len(before), job.spec.lifecycle.retry_backoff)
        assert wait is not None
        log.warning("job %s: attempt %d: %s", job.job_uuid, job.attempt, message.partition("\n")[0])
        return self._store.retry(job, Reason.launch_failed, message, wait, counts=False)


def backoff(reason: Reason, tries: int, first: float | None = None) -> float | None:
    """Seconds to wait before the next try. Returns None where a retry cannot succeed.

    Args:
        tries: retries of the job so far.
        first: the wait before the first retry; None: that of the reason.
    """
    usual = REASONS[reason].backoff
    return None if usual is None else min((first or usual) * 2.0 ** min(tries, 20), LONGEST_BACKOFF)
