"""The routes with which operators list and manage the machines that jobs run on; `agents` has those of their agents."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Path, Query, Response

from llama_stack_provider_trl.specs.event_fields import LAST_TIME

from ...wire import NAME
from ..dependencies import NodeRowsDep, NodesDep
from ..http.declared_routes import Routes
from ..http.errors import NotFound, declared
from ..http.node_bodies import ListNodesResponse, NodeLoadResponse, NodeRow
from ..http.places import ListPlace
from ..security.access import ADMINS, USERS, GuardedRoute
from .jobs import as_json
from .paging import MOST, After, Limit, page_of

router = Routes(GuardedRoute, prefix="/nodes", tags=["nodes"])
Name = Annotated[str, Path(pattern=NAME, description="The node's name")]


@router.get("", dependencies=[USERS], response_model=ListNodesResponse, responses=declared())
async def nodes(listed: NodeRowsDep, limit: Limit = MOST, after: After = None) -> Response:
    """The machines that jobs may run on, by name and the service's own first, and the jobs on their devices."""
    rows = await asyncio.to_thread(listed.all)
    page, following = page_of(rows, lambda row: ListPlace(0.0 if row.head else 1.0, row.node), limit, after)
    return as_json(ListNodesResponse(data=[*page], next=following))


@router.get("/{name}", dependencies=[USERS], response_model=NodeRow, responses=declared(404))
async def node(listed: NodeRowsDep, name: Name) -> Response:
    """One machine, as the list has it."""
    for row in await asyncio.to_thread(listed.all):
        if row.node == name:
            return as_json(row)
    raise NotFound(f"there is no node {name!r} here: GET /v1/nodes lists them")


@router.get("/{name}/load", dependencies=[USERS], response_model=NodeLoadResponse, responses=declared(404))
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
