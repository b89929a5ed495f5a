"""The route that shows the pools of machines."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from fastapi import Response

from llama_stack_provider_trl.jobs.decisions.pools import Allocation, node_names

from ..cluster.pools import PoolReport, Pools
from ..dependencies import PoolsDep
from ..http.declared_routes import Routes
from ..http.errors import declared
from ..http.node_bodies import AllocationRow, ListPoolsResponse, PoolRow
from ..security.access import USERS, GuardedRoute
from .jobs import as_json

router = Routes(GuardedRoute, prefix="/pools", tags=["nodes"])


@router.get("", dependencies=[USERS], response_model=ListPoolsResponse, responses=declared())
async def pools(managed: PoolsDep) -> Response:
    """The pools of machines, what was requested of them, and what is left of their limits."""
    return as_json(ListPoolsResponse(data=await asyncio.to_thread(pool_rows, managed)))


def pool_rows(pools: Pools) -> list[PoolRow]:
    """The pools, in the order in which they are tried."""
    return [_row(report) for report in pools.reports()]


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
