"""Places the jobs of a store, pass by pass: which of them start now, and what the others wait for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ..decisions.cores import Held
from ..decisions.demands import CRITICAL, Queued
from ..decisions.placement import Node, Placed, place
from ..decisions.pools import Pooled, kind_of_job
from ..decisions.preemption import Preemptible, Preemption, preempt
from ..decisions.states import JobState
from ..decisions.waits import why_waits
from ..store.store import Store

log = logging.getLogger(__name__)


class Placing:
    """Places waiting jobs. Every method may raise StoreError.

    Args:
        nodes: returns all machines, the service's own first.
        pooled: returns what pools may give, and what was requested of them.
        preempts: whether critical jobs have others save and wait.
    """

    def __init__(
        self, store: Store, nodes: Callable[[], Sequence[Node]], pooled: Callable[[], Pooled], preempts: bool = False
    ) -> None:
        self._store, self._nodes, self._pooled, self._preempts = store, nodes, pooled, preempts
        self.victims: Mapping[str, str] = {}
        """Preemptible job that is to save and wait -> the critical one that gets its devices."""
        self._promised: Mapping[str, str] = {}
        """Place that was or will be given up -> the critical job that gets it."""
        self._last_without_start: tuple[object, ...] | None = None

    @contextmanager
    def placed(self, now: float) -> Iterator[Placed]:
        """Yields the jobs that are to start, with their places; then records what the others wait for.

        Skipped while jobs with their claims, devices and nodes are the same as at the last pass that yielded none: time
        alone only keeps more devices for old jobs, and frees none.

        Args:
            now: seconds since the epoch.
        """
        holders, nodes, pooled = self._store.holders(), self._nodes(), self._pooled()
        joined = {node.name for node in nodes}
        expected = [node for node in pooled.expected if node.name not in joined]
        taken = Held(holders)
        some_free = any(
            not taken.is_full(node.place(device), node.cpus)
            for node in nodes
            if not node.why_closed
            for device in node.devices
        )
        queue = self._store.queue() if some_free or self._preempts else self._store.kinds_waiting()
        grown = sum(job.claim(now)[0] for job in queue)
        seen = nodes, holders, queue, pooled, grown
        if seen == self._last_without_start:
            yield {}
            return
        preemption = self._preemption(queue, nodes, expected, holders, pooled, now)
        for victim, critical in preemption.victims.items():
            if self.victims.get(victim) != critical:
                log.info("job %s saves and waits: the critical job %s gets its devices", victim, critical)
        self.victims, self._promised = preemption.victims, preemption.reserved
        waiting_for = set(preemption.reserved.values())
        found = {}
        if some_free:
            others = [job for job in queue if job.job_uuid not in waiting_for]
            taken_places = [*holders, *preemption.reserved]
            found = {
                **preemption.starts,
                **place(others, [*nodes, *expected], taken_places, now, pooled.obtainable),
            }
        yield found
        if found:
            holders = self._store.holders()
        kept = "" if found or not some_free else "waiting: the free devices are kept for jobs that come first"
        waiting = [(kind, _why(kind, holders, nodes, pooled) or kept) for kind in self._store.kinds_waiting()]
        if changed := [(kind, why) for kind, why in waiting if why != kind.detail]:
            self._store.set_waiting_details(changed)
        self._last_without_start = None if found else seen

    def _preemption(
        self,
        queue: Sequence[Queued],
        nodes: Sequence[Node],
        expected: Sequence[Node],
        holders: Mapping[str, str],
        pooled: Pooled,
        now: float,
    ) -> Preemption:
        if not self._preempts or not any(job.priority >= CRITICAL for job in queue):
            return Preemption()
        running = [
            Preemptible(
                job.job_uuid,
                job.spec.lifecycle.priority,
                job.devices,
                job.attempt,
                self._store.attempts(job.job_uuid)[-1].launched_at.timestamp(),
                job.state in (JobState.pausing, JobState.cancelling) or job.job_uuid in self.victims,
            )
            for job in self._store.active()
            if job.devices
        ]
        return preempt(
            queue, running, nodes, holders, now, pooled.obtainable, expected=expected, promised=self._promised
        )


def _why(kind: Queued, holders: Mapping[str, str], nodes: Sequence[Node], pooled: Pooled) -> str:
    """Why jobs of a kind wait, and what was requested of pools for them."""
    texts = why_waits(kind, holders, nodes, pooled.obtainable), pooled.notes.get(kind_of_job(kind))
    return "; ".join(text for text in texts if text)
