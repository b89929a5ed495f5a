"""Decides which machines to request of pools for waiting jobs, and which to give back. Pure functions, as `placement`.

A pool owns machines: a Slurm cluster, for example. What is requested of it at once, for one job, is an allocation;
its nodes join like any others, under names that follow from it (`node_names`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from .demands import Queued, demand
from .placement import Node, Obtainable, auto_kind, place, unsuited


class AllocationState(StrEnum):
    """State of an allocation, in the order in which it has them."""

    wanted = "wanted"
    """It is recorded. The pool may know of it or not."""
    requested = "requested"
    """The pool has accepted it."""
    granted = "granted"
    """The pool has given its machines; their agents join."""
    returning = "returning"
    """Its nodes get no jobs; it is to be given back."""
    ended = "ended"
    """The pool has nothing left of it."""


OPEN = frozenset({AllocationState.wanted, AllocationState.requested, AllocationState.granted})
"""States of an allocation whose nodes get jobs, or will."""


class Allocation(NamedTuple):
    """Machines of a pool that were requested at once, as they are stored."""

    request_id: str
    pool: str
    nodes: int
    state: AllocationState
    requested_for: str
    """Name of the job that it was requested for."""
    recorded_at: float
    """Seconds since the epoch, as all times here."""
    granted_at: float | None = None
    ended_at: float | None = None
    message: str = ""
    """The pool's last word about it: the reason for which it waits, or has ended."""
    handle: str = ""
    """What the pool finds it by; its own format."""

    def seconds_used(self, since: float, now: float) -> float:
        """Seconds of its nodes, together, that count for a budget from `since` on: while it is granted."""
        if self.granted_at is None:
            return 0.0
        return self.nodes * max(0.0, (now if self.ended_at is None else self.ended_at) - max(self.granted_at, since))


@dataclass(frozen=True)
class PoolState:
    """A pool as the decision sees it."""

    name: str
    shape: Node
    """What each of its nodes has, as configured."""
    max_nodes: int
    idle_seconds: float
    """Seconds for which an allocation that no job needs is kept."""
    closed: str = ""
    """The reason for which nothing is requested of it at the moment; empty: requests are sent."""
    overdrawn: bool = False
    """Whether its budget is used up: its nodes are to be emptied and given back."""


Kind = tuple[str, int, str, bool]
"""Device, ranks, demand and whether it was tried: jobs of one kind lack the same."""


def kind_of_job(job: Queued) -> Kind:
    return job.device, job.ranks, job.demand, job.tried


class Pooled(NamedTuple):
    """What the placement sees of all pools."""

    obtainable: Sequence[Obtainable] = ()
    expected: Sequence[Node] = ()
    """Machines that were requested and had not joined at the last decision."""
    notes: Mapping[Kind, str] = MappingProxyType({})
    """Kind of waiting jobs -> what was requested of pools for them."""


class Ask(NamedTuple):
    """Nodes to ask a pool for."""

    pool: str
    nodes: int
    job_uuid: str
    """The job that lacks them."""


@dataclass
class Plan:
    asks: list[Ask] = field(default_factory=list)
    returns: list[str] = field(default_factory=list)
    """Allocations that no job needs any more."""
    drains: list[str] = field(default_factory=list)
    """Allocations whose jobs are to save and to wait for other nodes."""
    unused_since: dict[str, float] = field(default_factory=dict)
    """Allocation -> time since which no job has needed it; for the next decision."""
    refused: dict[str, str] = field(default_factory=dict)
    """Job that lacks nodes and for which nothing is requested -> why, for each pool."""


def node_names(allocation: Allocation) -> list[str]:
    """Names under which the nodes of an allocation join."""
    return [f"{allocation.pool}-{allocation.request_id}-{number}" for number in range(allocation.nodes)]


def expected_nodes(pools: Iterable[PoolState], allocations: Iterable[Allocation], joined: Container[str]) -> list[Node]:
    """The machines of open allocations that have not joined."""
    shapes = {pool.name: pool.shape for pool in pools if not pool.overdrawn}
    return [
        replace(
            shapes[one.pool],
            name=name,
            expected="granted" if one.state is AllocationState.granted else "requested",
        )
        for one in allocations
        if one.state in OPEN and one.pool in shapes
        for name in node_names(one)
        if name not in joined
    ]


def obtainable_nodes(
    pools: Iterable[PoolState], allocations: Sequence[Allocation], joined: Container[str]
) -> list[Obtainable]:
    """What each pool may give beside the nodes that have joined and the expected ones. What is given back and has not
    left counts once it has: jobs wait for it."""
    found = []
    for pool in pools:
        own = [one for one in allocations if one.pool == pool.name]
        there = sum(one.state in OPEN or name in joined for one in own for name in node_names(one))
        found.append(Obtainable(pool.name, pool.shape, max(0, pool.max_nodes - there)))
    return found


def decide(
    queued: Iterable[Queued],
    nodes: Sequence[Node],
    holders: Mapping[str, str],
    allocations: Iterable[Allocation],
    pools: Sequence[PoolState],
    unused_since: Mapping[str, float],
    now: float,
) -> Plan:
    """Ask pools for what waiting jobs lack, and give back what none needs.

    The jobs are placed on the nodes that exist and on those that were requested. For each job that finds no place, in
    the order of the queue, the nodes that it lacks are requested of the first pools that could serve it and have room;
    devices that it leaves on them serve the next jobs. A pool has room up to its `max_nodes`; what it is giving back
    counts until it has ended. Of a job over several nodes the machines that are free now count, the service's own among
    them, and while nodes that were requested for it have not joined, nothing more is requested for it where the other
    machines would do once they are free. An allocation is given back as a whole, once no job
    has run on its nodes, and none would be placed there, for `idle_seconds`.

    Jobs that run on the service's own machine only need no pool.

    Args:
        nodes: those of allocations among them; the service's own machine first.
        holders: place -> job that has it.
        allocations: that have not ended.
        pools: in the order in which they are tried.
        unused_since: of the last decision.
        now: seconds since the epoch.
    """
    plan, queued, allocations = Plan(), list(queued), list(allocations)
    shapes = {pool.name: pool for pool in pools}
    joined = {node.name for node in nodes}
    coming = expected_nodes(pools, allocations, joined)
    obtainable = obtainable_nodes(pools, allocations, joined)
    placed = place(queued, [*nodes, *coming], holders, now, obtainable, planning=True)
    needed = {_node(place_) for place_ in holders} | {_node(one) for places in placed.values() for one in places}
    for one in allocations:
        if one.state in OPEN:
            _keep_or_return(one, shapes.get(one.pool), needed, unused_since, now, plan)
    planned = {one: name for name, places in placed.items() for one in places}
    waiting_for = {one.name for one in coming}
    decided = {one.requested_for for one in allocations if not waiting_for.isdisjoint(node_names(one))}
    lacking = [
        job
        for job in queued
        if job.job_uuid not in placed
        and not demand(job.demand).home
        and not (
            job.job_uuid in decided
            and demand(job.demand).resources.nodes > 1
            and place([job], [*nodes, *coming], planned, now, obtainable, planning=True)
        )
    ]
    lacking.sort(key=lambda job: job.claim(now))
    _ask(lacking, [*nodes, *coming], dict(holders) | planned, allocations, pools, obtainable, plan)
    return plan


def _node(place_: str) -> str:
    return place_.rpartition("/")[0]


def _keep_or_return(
    one: Allocation,
    pool: PoolState | None,
    needed: set[str],
    unused_since: Mapping[str, float],
    now: float,
    plan: Plan,
) -> None:
    """Decide on an open allocation. Without its pool in the configuration it is given back once it is empty."""
    is_over = pool is None or pool.overdrawn
    if not needed.isdisjoint(node_names(one)):
        if is_over:
            plan.drains.append(one.request_id)
        return
    since = plan.unused_since[one.request_id] = unused_since.get(one.request_id, now)
    if pool is None or is_over or now - since >= pool.idle_seconds:
        plan.returns.append(one.request_id)


def _ask(
    lacking: Iterable[Queued],
    nodes: Sequence[Node],
    holders: Mapping[str, str],
    allocations: Sequence[Allocation],
    pools: Sequence[PoolState],
    obtainable: Sequence[Obtainable],
    plan: Plan,
) -> None:
    closed_head = replace(nodes[0], why_closed="of no pool")
    room = {
        pool.name: max(0, pool.max_nodes - sum(one.nodes for one in allocations if one.pool == pool.name))
        for pool in pools
    }
    fresh: list[Node] = []
    held = dict(holders)
    hopeless: dict[Kind, str] = {}
    for job in lacking:
        kind = kind_of_job(job)
        if kind in hopeless:
            plan.refused[job.job_uuid] = hopeless[kind]
            continue
        wanted = demand(job.demand).resources.nodes
        if job.device == "auto":  # the same kind as at its placement, which sees all machines
            job = job._replace(device=auto_kind(job, nodes, obtainable))
        why_not = {pool.name: _why_not(job, pool) for pool in pools}
        why = {pool.name: why_not[pool.name] or _why_no_room(wanted, room[pool.name], pool) for pool in pools}
        more = {
            f"{pool.name}+{len(fresh) + number}": pool
            for pool in pools
            if not why_not[pool.name]
            for number in range(min(wanted, room[pool.name]))
        }
        new = [replace(pool.shape, name=name, expected="requested") for name, pool in more.items()]
        # A job of one node has found none of the nodes that are there; several may have to be found together.
        there = nodes if wanted > 1 else [closed_head]
        places = place([job], [*there, *fresh, *new], held, planning=True).get(job.job_uuid)
        if not places:
            hopeless[kind] = plan.refused[job.job_uuid] = "; ".join(f"{name}: {one}" for name, one in why.items())
            continue
        held |= dict.fromkeys(places, job.job_uuid)
        used = {_node(one) for one in places}
        taken = [node for node in new if node.name in used]
        fresh += taken
        for pool in pools:
            if count := sum(more[node.name] is pool for node in taken):
                room[pool.name] -= count
                plan.asks.append(Ask(pool.name, count, job.job_uuid))


def _why_not(job: Queued, pool: PoolState) -> str:
    """The reason for which a pool gets no request for a job; empty: it can serve it."""
    if pool.closed:
        return pool.closed
    why = unsuited(job, pool.shape, job.device)
    return f"a node of it {why}" if why else ""


def _why_no_room(wanted: int, room: int, pool: PoolState) -> str:
    if pool.max_nodes == 0:
        return "its max_nodes is 0"
    if room == 0:
        return f"all of max_nodes {pool.max_nodes} are requested"
    return f"{room} more are left of max_nodes {pool.max_nodes}, too few for {wanted} nodes with those that are free"
