"""The routes with which operators list and manage the machines that jobs run on, and list the pools that give more;
`agents` has those of their agents."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated

from fastapi import Path, Query, Response

from llama_stack_provider_trl.jobs.decisions.pools import Allocation, node_names
from llama_stack_provider_trl.specs.event_fields import LAST_TIME

from ...wire import NAME
from ..cluster.pools import PoolReport, Pools
from ..dependencies import NodeRowsDep, NodesDep, PoolsDep
from ..http.declared_routes import Routes
from ..http.errors import NotFound, declared
from ..http.node_bodies import AllocationRow, ListNodesResponse, ListPoolsResponse, NodeLoadResponse, NodeRow, PoolRow
from ..http.places import MOST, After, Limit, ListPlace, page_of
from ..security.access import ADMINS, READERS, GuardedRoute
from .jobs import as_json

router = Routes(GuardedRoute, prefix="/nodes", tags=["nodes"])
pool_router = Routes(GuardedRoute, prefix="/pools", tags=["nodes"])
Name = Annotated[str, Path(pattern=NAME, description="The node's name")]


@router.get("", dependencies=[READERS], response_model=ListNodesResponse, responses=declared())
async def nodes(listed: NodeRowsDep, limit: Limit = MOST, after: After = None) -> Response:
    """The machines that jobs may run on, by name and the service's own first, and the jobs on their devices."""
    rows = await asyncio.to_thread(listed.all)
    page, following = page_of(rows, lambda row: ListPlace(0.0 if row.head else 1.0, row.node), limit, after)
    return as_json(ListNodesResponse(data=[*page], next=following))


@router.get("/{name}", dependencies=[READERS], response_model=NodeRow, responses=declared(404))
async def node(listed: NodeRowsDep, name: Name) -> Response:
    """One machine, as the list has it."""
    for row in await asyncio.to_thread(listed.all):
        if row.node == name:
            return as_json(row)
    raise NotFound(f"there is no node {name!r} here: GET /v1/nodes lists them")


@router.get("/{name}/load", dependencies=[READERS], response_model=NodeLoadResponse, responses=declared(404))
async def node_load(
    listed: NodeRowsDep,
    name: Name,
    since: Annotated[float, Query(ge=0, le=LAST_TIME, description="Minutes from then on, seconds since the epoch")] = 0,
) -> Response:
    """How loaded a machine was: means of minutes, of the last day at most."""
    return as_json(await asyncio.to_thread(listed.load, name, since))


@router.post("/{name}/cordon", dependencies=[ADMINS], status_code=204, responses=declared(404, 409))
async def cordon(machines: NodesDep, name: Name) -> Response:
    """Give a node no further jobs."""
    await asyncio.to_thread(machines.set_mode, name, "cordoned")
    return Response(status_code=204)


@router.post("/{name}/uncordon", dependencies=[ADMINS], status_code=204, responses=declared(404, 409))
async def uncordon(machines: NodesDep, name: Name) -> Response:
    """Give a node jobs again."""
    await asyncio.to_thread(machines.set_mode, name, "open")
    return Response(status_code=204)


@router.post("/{name}/drain", dependencies=[ADMINS], status_code=204, responses=declared(404, 409))
async def drain(machines: NodesDep, name: Name) -> Response:
    """Give a node no further jobs; those that train there save and continue elsewhere."""
    await asyncio.to_thread(machines.set_mode, name, "draining")
    return Response(status_code=204)


@router.delete("/{name}", dependencies=[ADMINS], status_code=204, responses=declared(404, 409))
async def remove(machines: NodesDep, name: Name) -> Response:
    """Remove a node that is gone or has been emptied. Its agent ends; a restarted agent joins again."""
    await asyncio.to_thread(machines.remove, name)
    return Response(status_code=204)


@pool_router.get("", dependencies=[READERS], response_model=ListPoolsResponse, responses=declared())
async def pools(managed: PoolsDep) -> Response:
    """The pools of machines, what was requested of them, and what is left of their limits."""
    return as_json(ListPoolsResponse(data=await asyncio.to_thread(pool_rows, managed)))


def pool_rows(managed: Pools) -> list[PoolRow]:
    """The pools, in the order in which they are tried."""
    return [_row(report) for report in managed.reports()]


def _row(report: PoolReport) -> PoolRow:
    pool = report.pool
    return PoolRow(
        pool=pool.name,
        what=pool.what,
        max_nodes=pool.max_nodes,
        nodes=sum(one.nodes for one in report.allocations if one.ended_at is None),
        node_hours=pool.node_hours,
        node_hours_used=round(report.hours_used, 3),
        state=report.closed or "open",
        allocations=[_allocation(one) for one in report.allocations],
    )


def _allocation(one: Allocation) -> AllocationRow:
    return AllocationRow(
        request_id=one.request_id,
        nodes=node_names(one),
        state=one.state,
        requested_for=one.requested_for,
        recorded_at=datetime.fromtimestamp(one.recorded_at, UTC),
        granted_at=None if one.granted_at is None else datetime.fromtimestamp(one.granted_at, UTC),
        ended_at=None if one.ended_at is None else datetime.fromtimestamp(one.ended_at, UTC),
        message=one.message,
    )
