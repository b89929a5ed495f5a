"""Asks pools for what waiting jobs lack, and gives back what none needs.

Decisions are made in the supervisor's thread, right after it has placed jobs: nothing is placed between a decision and
its record. Requests are sent in threads, one for each pool, since they may take minutes. An allocation is
recorded before its request is sent; after a crash it is sent again, with the same id.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from llama_stack_provider_trl import faults
from llama_stack_provider_trl.errors import StoreError, TrlError
from llama_stack_provider_trl.jobs.decisions.placement import Node, Obtainable
from llama_stack_provider_trl.jobs.decisions.pools import (
    OPEN,
    Allocation,
    AllocationState,
    Kind,
    Pooled,
    PoolState,
    decide,
    expected_nodes,
    kind_of_job,
    node_names,
    obtainable_nodes,
)
from llama_stack_provider_trl.jobs.store.store import Store

from ...nodes.pools.base import Given, Pool, PoolOrder, PoolRefusal, PoolUnavailable, Seen

log = logging.getLogger(__name__)
DECISION = 1.0
"""Seconds between two decisions."""
OBSERVATION = 3.0
"""Seconds between two observations of an allocation."""
FIRST_WAIT, LONGEST_WAIT = 30.0, 1800.0
"""Seconds without requests to a pool after an allocation has failed: twice as many after each."""
_SHOWN = 20
"""Allocations of a pool that are shown after their end."""
BUDGET_SECONDS = 30 * 24 * 3600.0
"""Seconds before now that a budget counts."""


@dataclass(frozen=True)
class ManagedPool:
    """A pool with its limits."""

    name: str
    pool: Pool
    shape: Node
    """What each of its nodes has."""
    what: str
    """Its nodes in words, such as `8 GPUs`."""
    max_nodes: int
    node_hours: float | None = None
    """Hours of nodes that may be used in 30 days; None: any number."""
    idle_seconds: float = 300.0
    join_seconds: float = 600.0
    """Seconds from the grant within which every node joins."""
    partial_seconds: float | None = None
    """Seconds for which some machines of an allocation are kept while the others are missing; None: no limit."""


class PoolReport(NamedTuple):
    """A pool as operators see it."""

    pool: ManagedPool
    closed: str
    """The reason for which nothing is requested of it at the moment; empty: requests are sent."""
    hours_used: float
    """Hours of its nodes in 30 days."""
    allocations: Sequence[Allocation]
    """Those that have not ended, and the last ones that have; the oldest first."""


@dataclass
class _Trouble:
    """Why nothing is requested of a pool at the moment."""

    failures: int = 0
    until: float = 0.0
    message: str = ""


class Pools:
    """The pools of a service.

    Args:
        remove: removes a node from the service; may raise TrlError where it still has jobs.
        wake: has the supervisor make a pass.
    """

    def __init__(
        self,
        store: Store,
        pools: Sequence[ManagedPool],
        remove: Callable[[str], None],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._remove, self._wake, self._clock = store, remove, wake, clock
        self.pools = {pool.name: pool for pool in pools}
        shapes = [Obtainable(pool.name, pool.shape, pool.max_nodes) for pool in pools]
        self.pooled = Pooled(shapes)
        """What the placement sees of them, as of the last decision; replaced where it changes."""
        self._closed: Mapping[str, str] = {}
        self._unused_since: dict[str, float] = {}
        self._trouble = {name: _Trouble() for name in self.pools}
        self._partial_since: dict[str, float] = {}
        """Allocation -> the time since which it has some of its machines, as this process has seen it."""
        self._decided_at = float("-inf")
        self._tended = threading.Event()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def why_closed(self, node: str) -> str:
        """The reason for which a node of a pool takes no jobs; empty: it may."""
        return self._closed.get(node, "")

    def start(self) -> None:
        """Ask pools from now on, in daemon threads; while `tend` is called."""
        now = self._clock()
        known = self._store.allocations.all(now - BUDGET_SECONDS)
        self._closed = _closed(known)
        # Before the first decision: jobs of which machines are expected keep those that are there.
        states = [self._state(pool, known, now) for pool in self.pools.values()]
        self.pooled = _pooled(states, known, {record.name for record in self._store.nodes.all()}, {})
        for name in sorted({one.pool for one in self._store.allocations.all()} - self.pools.keys()):
            log.warning(
                "pool %s is no longer configured, and has nodes: configure it, with max_nodes 0, until "
                "`trl-remote nodes pools` shows none; the service cannot give them back without its settings",
                name,
            )
        for name in self.pools:
            thread = threading.Thread(target=self._serve, args=(name,), name=f"trl-pool-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Send no more requests. Allocations stay: the next service continues with them."""
        self._stopping.set()
        self._tended.set()
        for thread in self._threads:
            thread.join(5.0)

    def reports(self) -> list[PoolReport]:
        """Every pool, in the order in which they are tried."""
        now = self._clock()
        known = self._store.allocations.all(now - BUDGET_SECONDS)
        reports = []
        for pool in self.pools.values():
            own = [one for one in known if one.pool == pool.name]
            ended = [one for one in own if one.state is AllocationState.ended]
            shown = [one for one in own if one not in ended[:-_SHOWN]]
            used = self.hours_used(pool.name, known, now)
            reports.append(PoolReport(pool, self._state(pool, known, now).closed, used, shown))
        return reports

    def tend(self, nodes: Callable[[], Sequence[Node]]) -> None:
        """Decide, and record what was decided; in the supervisor's thread, after it has placed jobs. `nodes` returns
        those that jobs may run on."""
        now = self._clock()
        if now < self._decided_at:
            self._after_clock_was_set_back(now)
        if now - self._decided_at < DECISION:
            return
        self._decided_at = now
        known = self._store.allocations.all(now - BUDGET_SECONDS)
        current = [one for one in known if one.state is not AllocationState.ended]
        if not self.pools and not known:
            return
        self._closed = _closed(known)
        there = nodes()
        queued = self._store.queue()
        states = [self._state(pool, known, now) for pool in self.pools.values()]
        plan = decide(queued, there, self._store.holders(), current, states, self._unused_since, now)
        self._unused_since = plan.unused_since
        by_id = {one.request_id: one for one in current}
        for request_id in plan.drains:
            for name in node_names(by_id[request_id]):
                self._store.nodes.set_mode(name, "draining")
        for request_id in plan.returns:
            self._return(by_id[request_id], "no job needs it")
        for ask in plan.asks:
            self._record(ask.pool, ask.nodes, ask.job_uuid)
        kinds = {job.job_uuid: kind_of_job(job) for job in queued}
        current = list(self._store.allocations.all())
        joined = {node.name for node in there}
        notes = {kinds[job]: f"no pool serves it: {why}" for job, why in plan.refused.items() if self.pools}
        for one in current:
            if one.state not in OPEN or one.requested_for not in kinds:
                continue
            if not joined.issuperset(node_names(one)):
                notes[kinds[one.requested_for]] = self._requested(one)
            elif one.message:  # its nodes have joined, and the pool has not answered since
                notes[kinds[one.requested_for]] = f"{one.pool}: {one.message}"
        pooled = _pooled(states, current, joined, notes)
        if pooled != self.pooled:
            self.pooled = pooled
            self._wake()
        self._closed = _closed([*current, *known])
        self._remove_nodes(known, joined)
        self._tended.set()

    def _after_clock_was_set_back(self, now: float) -> None:
        """Wait for no time that has been a moment ago, and is hours away now."""
        self._decided_at = float("-inf")
        self._unused_since = {name: min(since, now) for name, since in self._unused_since.items()}
        for trouble in self._trouble.values():
            trouble.until = min(trouble.until, now + LONGEST_WAIT)

    def _state(self, pool: ManagedPool, known: Sequence[Allocation], now: float) -> PoolState:
        trouble = self._trouble[pool.name]
        closed = f"{trouble.message}; requested again after {_at(trouble.until)}" if now < trouble.until else ""
        over = self.over(pool, known, now)
        return PoolState(pool.name, pool.shape, pool.max_nodes, pool.idle_seconds, over or closed, bool(over))

    def over(self, pool: ManagedPool, known: Sequence[Allocation], now: float) -> str:
        """Why a pool's budget allows no more; empty: it does."""
        if pool.node_hours is None or self.hours_used(pool.name, known, now) < pool.node_hours:
            return ""
        return f"its {pool.node_hours:g} node-hours of 30 days are used up"

    def hours_used(self, pool: str, known: Sequence[Allocation], now: float) -> float:
        """Hours of a pool's nodes in the last 30 days."""
        return sum(one.seconds_used(now - BUDGET_SECONDS, now) for one in known if one.pool == pool) / 3600

    def _requested(self, one: Allocation) -> str:
        what = self.pools[one.pool].what if one.pool in self.pools else "nodes"
        text = f"requested {one.nodes} x {what} from {one.pool} at {_at(one.recorded_at)}"
        if one.state is AllocationState.granted:
            text = f"{one.pool} has given {one.nodes} x {what}, whose agents have not all joined yet"
        return f"{text}: {one.message}" if one.message else text

    def _record(self, name: str, nodes: int, job_uuid: str) -> None:
        taken = [one.handle for one in self._store.allocations.all() if one.pool == name]
        request_id = uuid.uuid4().hex[:12]
        try:
            handle = self.pools[name].pool.choose(request_id, nodes, taken)
        except (PoolRefusal, PoolUnavailable) as error:
            self._fail(name, str(error))
            return
        self._store.allocations.record(request_id, name, nodes, job_uuid, handle)
        log.info("pool %s: %d nodes are wanted for job %s (%s)", name, nodes, job_uuid, request_id)
        faults.reach("pool-recorded")

    def _return(self, one: Allocation, why: str) -> bool:
        moved = self._store.allocations.move(one, AllocationState.returning, why)
        if moved:
            self._partial_since.pop(one.request_id, None)
            log.info("pool %s: %s is given back: %s", one.pool, one.request_id, why)
            faults.reach("pool-returning")
        return moved

    def _remove_nodes(self, known: Sequence[Allocation], joined: set[str]) -> None:
        """Remove the nodes of allocations that have ended."""
        for one in known:
            if one.state is AllocationState.ended:
                for name in joined.intersection(node_names(one)):
                    with suppress(TrlError):  # it still has jobs, and was not silent for long enough
                        self._remove(name)

    # In the threads of the pools

    def _serve(self, name: str) -> None:
        while not self._stopping.is_set():
            if self._tended.wait(OBSERVATION):
                self._tended.clear()
                self.work(name)
                self._stopping.wait(OBSERVATION)

    def work(self, name: str) -> None:
        """Ask a pool for what is recorded, and record what it has of each allocation."""
        for one in self._store.allocations.all():
            if one.pool == name and not self._stopping.is_set():
                try:
                    self._advance(self.pools[name], one)
                except PoolUnavailable as error:
                    self._store.allocations.note(one, str(error))
                except StoreError as error:
                    log.error("pool %s: %s", name, error)
                except Exception:  # a fault of the pool's own code must not end the thread
                    log.exception("pool %s: allocation %s could not be handled", name, one.request_id)

    def _advance(self, pool: ManagedPool, one: Allocation) -> None:
        order = PoolOrder(one.request_id, node_names(one), one.handle)
        match one.state:
            case AllocationState.wanted:
                try:
                    pool.pool.request(order)
                except PoolRefusal as error:
                    self._end(one, str(error), failed=True)
                    return
                faults.reach("pool-requested")
                self._store.allocations.move(one, AllocationState.requested)
            case AllocationState.requested | AllocationState.granted:
                self._observe(pool, one, pool.pool.observe(order))
            case AllocationState.returning:
                pool.pool.release(order)
                faults.reach("pool-released")
                seen = pool.pool.observe(order)
                if seen.given is Given.nothing:
                    self._end(one, one.message)

    def _observe(self, pool: ManagedPool, one: Allocation, seen: Seen) -> None:
        if seen.given is Given.nothing:
            message = seen.message or f"{one.pool} has nothing left of it"
            missing = self._missing(one)
            if missing and one.state is AllocationState.granted:
                message = f"{', '.join(missing)} did not join: {message}; see the agent's output there"
            self._end(one, message, failed=bool(missing))
        elif seen.given in (Given.pending, Given.some):
            self._store.allocations.note(one, seen.message)
            if one.state is AllocationState.requested and seen.given is Given.some:
                self._expect_the_others(pool, one, seen)
            else:
                self._partial_since.pop(one.request_id, None)
        elif one.state is AllocationState.requested:
            self._partial_since.pop(one.request_id, None)
            if self._store.allocations.move(one, AllocationState.granted):
                log.info("pool %s: %s is given: %s", one.pool, one.request_id, ", ".join(node_names(one)))
        else:
            self._store.allocations.note(one, "")  # it answers again
            self._expect(pool, one, seen)

    def _expect_the_others(self, pool: ManagedPool, one: Allocation, seen: Seen) -> None:
        """Give an allocation back that has had only some of its machines for too long: the job that they are for cannot
        use them, and other users could."""
        now = self._clock()
        since = self._partial_since[one.request_id] = min(now, self._partial_since.get(one.request_id, now))
        if pool.partial_seconds is not None and now - since > pool.partial_seconds:
            message = (
                f"some of its {one.nodes} machines waited {pool.partial_seconds:g} s for the others: {seen.message}"
            )
            if self._return(one, message):
                self._fail(one.pool, message)

    def _expect(self, pool: ManagedPool, one: Allocation, seen: Seen) -> None:
        """Give a granted allocation back whose agents do not all join."""
        missing = self._missing(one)
        if not missing:
            self._trouble[one.pool] = _Trouble()
        elif self._clock() - (one.granted_at or 0.0) > pool.join_seconds:
            why = f"{', '.join(missing)} did not join within {pool.join_seconds:g} s"
            message = f"{why}: {seen.message}" if seen.message else f"{why}: see the agent's log there"
            if self._return(one, message):
                self._fail(one.pool, message)

    def _missing(self, one: Allocation) -> list[str]:
        """Those of its nodes that have not joined."""
        return [name for name in node_names(one) if self._store.nodes.get(name) is None]

    def _end(self, one: Allocation, message: str, *, failed: bool = False) -> None:
        self._partial_since.pop(one.request_id, None)
        if self._store.allocations.move(one, AllocationState.ended, message):
            log.info("pool %s: %s has ended: %s", one.pool, one.request_id, message)
            if failed:
                self._fail(one.pool, message)

    def _fail(self, name: str, message: str) -> None:
        """Ask a pool for nothing for a while, longer each time."""
        before = self._trouble[name]
        wait = min(FIRST_WAIT * 2**before.failures, LONGEST_WAIT)
        self._trouble[name] = _Trouble(before.failures + 1, self._clock() + wait, message)
        log.warning("pool %s: %s; the next request follows in %.0f s or later", name, message, wait)


def _closed(allocations: Sequence[Allocation]) -> dict[str, str]:
    """Node -> the reason for which it takes no jobs."""
    whys = {AllocationState.returning: "being given back to", AllocationState.ended: "no longer of"}
    return {
        name: f"{whys[one.state]} {one.pool}" for one in allocations if one.state in whys for name in node_names(one)
    }


def _pooled(
    states: Sequence[PoolState], known: Sequence[Allocation], joined: Container[str], notes: Mapping[Kind, str]
) -> Pooled:
    """What the placement sees of pools.

    Args:
        joined: names of the nodes that have joined.
    """
    current = [one for one in known if one.state is not AllocationState.ended]
    return Pooled(obtainable_nodes(states, current, joined), expected_nodes(states, current, joined), notes)


def _at(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S} UTC"
