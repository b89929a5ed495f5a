"""About the service itself."""

from __future__ import annotations

import asyncio
import platform

import psutil
from fastapi import APIRouter, Response

from llama_stack_provider_trl import __version__
from llama_stack_provider_trl.files import free_bytes

from .bodies import Health, ListNodesResponse, Node
from .context import Context, Service
from .errors import declared
from .routes_jobs import as_json

router = APIRouter(tags=["service"])


@router.get("/health", response_model=Health, responses=declared())
async def health(service: Context) -> Response:
    """Whether the service answers. Needs no token."""
    return as_json(Health(status="OK", version=__version__, supervising=service.supervisor.supervising))


@router.get("/nodes", response_model=ListNodesResponse, responses=declared())
async def nodes(service: Context) -> Response:
    """The machines that jobs may run on, and which job has which device."""
    return as_json(ListNodesResponse(data=[await asyncio.to_thread(_this_node, service)]))


def _this_node(service: Service) -> Node:
    memory = psutil.virtual_memory()
    return Node(
        node=platform.node(),
        devices=list(service.devices),
        jobs={device: job.job_uuid for job in service.store.active() for device in job.devices},
        cpus=psutil.cpu_count() or 1,
        memory_bytes=memory.total,
        memory_available_bytes=memory.available,
        disk_free_bytes=free_bytes(service.settings.data_dir),
    )
