"""The page of nodes, and the forms on it."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Request, Response

from llama_stack_provider_trl.jobs.records import NodeMode

from ...nodes.joining import how_to_add_a_node
from ..context import Context
from ..routes.nodes import Name, node_rows, set_mode
from ..security.access import ADMINS_FORM, USERS, CurrentCaller
from .login import checked_form, see_other
from .rendering import page
from .route import PageRoute

router = APIRouter(route_class=PageRoute, prefix="/nodes", include_in_schema=False)

_MODES: dict[str, NodeMode] = {"cordon": "cordoned", "uncordon": "open", "drain": "draining"}
Action = Annotated[Literal["cordon", "uncordon", "drain"], Path()]


@router.get("", dependencies=[USERS])
async def nodes_page(request: Request, service: Context, caller: CurrentCaller) -> Response:
    """Machines, their devices, the job that has each, and why a node gets no jobs."""
    return page(
        request,
        "nodes.html",
        nodes=await asyncio.to_thread(node_rows, service),
        is_admin=caller.role == "admin",
        how_to_add=how_to_add_a_node(str(request.base_url).rstrip("/")),
    )


@router.post("/{name}/{action}", dependencies=[ADMINS_FORM])
async def change_node(
    request: Request, service: Context, caller: CurrentCaller, name: Name, action: Action
) -> Response:
    """Cordon, uncordon or drain a node."""
    await checked_form(request, caller)
    await set_mode(service, name, _MODES[action])
    return see_other("/nodes")
