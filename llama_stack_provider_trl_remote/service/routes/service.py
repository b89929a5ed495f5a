"""The routes of the service itself: health and description."""

from __future__ import annotations

import asyncio

from fastapi import Request, Response
from starlette.responses import JSONResponse

from llama_stack_provider_trl import __version__

from ..dependencies import DisksDep, MetricsDep, SupervisorDep
from ..http.bodies import Health
from ..http.declared_routes import Routes
from ..http.errors import declared
from ..security.access import ANYONE, METRICS, READERS, GuardedRoute
from .jobs import as_json

router = Routes(GuardedRoute, tags=["service"])
"""Served with and without the version of the API: probes of load balancers expect `/health`."""
pages = Routes(GuardedRoute)


@router.get("/health", dependencies=[ANYONE], response_model=Health, responses=declared())
async def health(disks: DisksDep, supervisor: SupervisorDep) -> Response:
    """Whether the service answers, and can store what it gets. Needs no token."""
    return as_json(
        Health(
            status="OK",
            version=__version__,
            supervising=supervisor.supervising,
            storage_problem=disks.problem(),
        )
    )


@pages.get("/metrics", dependencies=[METRICS], include_in_schema=False)
async def metrics(measured: MetricsDep, request: Request) -> Response:
    """Metrics of jobs, nodes and the service, for Prometheus."""
    text, content_type = await asyncio.to_thread(measured.render, request.headers.get("accept", ""))
    return Response(text, headers={"Content-Type": content_type})


@pages.get("/openapi.json", dependencies=[READERS], include_in_schema=False)
async def openapi(request: Request) -> Response:
    """The description of every call, for programs."""
    return JSONResponse(request.app.openapi())
