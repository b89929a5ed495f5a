"""The page of nodes, and the forms on it."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import Path, Request, Response

from llama_stack_provider_trl.jobs.store.records import NodeMode

from ...nodes.joining import how_to_add_a_node
from ..dependencies import NodeRowsDep, NodesDep, PoolsDep, PresenceDep
from ..http.declared_routes import Routes
from ..http.node_bodies import NodeRow
from ..routes.nodes import Name, pool_rows
from ..security.access import ADMINS_FORM, READERS, CurrentCaller
from .login import checked_form, see_other
from .rendering import page
from .route import PageRoute

router = Routes(PageRoute, prefix="/nodes", include_in_schema=False)

_MODES: dict[str, NodeMode] = {"cordon": "cordoned", "uncordon": "open", "drain": "draining"}
Action = Annotated[Literal["cordon", "uncordon", "drain", "remove"], Path()]


@router.get("", dependencies=[READERS])
async def nodes_page(request: Request, listed: NodeRowsDep, pools: PoolsDep, presence: PresenceDep) -> Response:
    """Machines, their devices, the job that has each, how loaded they are, and why a node gets no jobs."""
    nodes = await asyncio.to_thread(listed.all)
    return page(
        request,
        "nodes.html",
        nodes=nodes,
        pools=await asyncio.to_thread(pool_rows, pools),
        removable={node.node for node in nodes if _is_removable(presence, node)},
        how_to_add=how_to_add_a_node(str(request.base_url).rstrip("/")),
    )


@router.post("/{name}/{action}", dependencies=[ADMINS_FORM])
async def change_node(
    request: Request, machines: NodesDep, caller: CurrentCaller, name: Name, action: Action
) -> Response:
    """Cordon, uncordon, drain or remove a node."""
    await checked_form(request, caller)
    if action == "remove":
        await asyncio.to_thread(machines.remove, name)
    else:
        await asyncio.to_thread(machines.set_mode, name, _MODES[action])
    return see_other("/nodes")


def _is_removable(presence: PresenceDep, node: NodeRow) -> bool:
    """Whether the page offers to remove a node: the API also removes one that waits for jobs."""
    return not node.head and node.state != "open" and (not node.jobs or presence.is_absent(node.node))
