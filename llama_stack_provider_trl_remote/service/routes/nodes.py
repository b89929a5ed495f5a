"""The routes with which operators list and manage the machines that jobs run on; `agents` has those of their agents."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Any

import psutil
from fastapi import APIRouter, Path, Query, Response

from llama_stack_provider_trl.jobs.store.records import NodeMode
from llama_stack_provider_trl.specs.event_fields import LAST_TIME
from llama_stack_provider_trl.system.files import free_bytes

from ...wire import NAME
from ..context import Context, Service
from ..http.errors import Conflict, NotFound, declared
from ..http.node_bodies import DeviceLoads, LastLoad, ListNodesResponse, NodeLoadResponse, NodeRow
from ..http.places import ListPlace
from ..security.access import ADMINS, USERS, GuardedRoute
from .jobs import as_json
from .paging import MOST, After, Limit, page_of

log = logging.getLogger(__name__)
router = APIRouter(route_class=GuardedRoute, prefix="/nodes", tags=["nodes"])
Name = Annotated[str, Path(pattern=NAME, description="The node's name")]


@router.get("", dependencies=[USERS], response_model=ListNodesResponse, responses=declared())
async def nodes(service: Context, limit: Limit = MOST, after: After = None) -> Response:
    """The machines that jobs may run on, by name and the service's own first, and the jobs on their devices."""
    rows = await asyncio.to_thread(node_rows, service)
    page, following = page_of(rows, lambda row: ListPlace(0.0 if row.head else 1.0, row.node), limit, after)
    return as_json(ListNodesResponse(data=[*page], next=following))


@router.get("/{name}", dependencies=[USERS], response_model=NodeRow, responses=declared(404))
async def node(service: Context, name: Name) -> Response:
    """One machine, as the list has it."""
    for row in await asyncio.to_thread(node_rows, service):
        if row.node == name:
            return as_json(row)
    raise NotFound(f"there is no node {name!r} here: GET /v1/nodes lists them")


@router.get("/{name}/load", dependencies=[USERS], response_model=NodeLoadResponse, responses=declared(404))
async def node_load(
    service: Context,
    name: Name,
    since: Annotated[float, Query(ge=0, le=LAST_TIME, description="Minutes from then on, seconds since the epoch")] = 0,
) -> Response:
    """How loaded a machine was: means of minutes, of the last day at most."""
    return as_json(await asyncio.to_thread(_load, service, name, since))


@router.post("/{name}/cordon", dependencies=[ADMINS], status_code=204, responses=declared(404, 409))
async def cordon(service: Context, name: Name) -> Response:
    """Give a node no further jobs."""
    return await set_mode(service, name, "cordoned")


@router.post("/{name}/uncordon", dependencies=[ADMINS], status_code=204, responses=declared(404, 409))
async def uncordon(service: Context, name: Name) -> Response:
    """Give a node jobs again."""
    return await set_mode(service, name, "open")


@router.post("/{name}/drain", dependencies=[ADMINS], status_code=204, responses=declared(404, 409))
async def drain(service: Context, name: Name) -> Response:
    """Give a node no further jobs; those that train there save and continue elsewhere."""
    return await set_mode(service, name, "draining")


@router.delete("/{name}", dependencies=[ADMINS], status_code=204, responses=declared(404, 409))
async def remove(service: Context, name: Name) -> Response:
    """Remove a node that is gone or has been emptied. Its agent ends; a restarted agent joins again."""
    return await remove_node(service, name)


async def set_mode(service: Service, name: str, mode: NodeMode) -> Response:
    """Change which jobs a node gets. Raises NotFound, Conflict."""
    if not await asyncio.to_thread(service.store.nodes.set_mode, name, mode):
        if name == service.node_name:
            raise Conflict(
                f"node {name!r} is the service's own machine and has no agent (the service listens on loopback): jobs "
                "of other nodes do not come here; pause or cancel its own (trl-remote jobs)"
            )
        raise NotFound(f"there is no node {name!r} here: GET /v1/nodes lists them")
    log.info("node %s is %s", name, mode)
    service.supervisor.wake()
    return Response(status_code=204)


async def remove_node(service: Service, name: str) -> Response:
    """Remove a node. Raises NotFound; Conflict: it is the service's own, or it calls and has jobs."""
    await asyncio.to_thread(service.remove_node, name)
    service.supervisor.wake()
    return Response(status_code=204)


def _load(service: Service, name: str, since: float) -> NodeLoadResponse:
    if name != service.node_name:
        service.known_node(name)
    found = service.loads.of(name, since)
    loads = [load for _, load in found]
    of_devices = [{device.name: device for device in load.devices} for load in loads]
    return NodeLoadResponse(
        time=[minute for minute, _ in found],
        cpu_percent=[load.cpu_percent for load in loads],
        memory_used_bytes=[load.memory_used_bytes for load in loads],
        disk_free_bytes=[load.disk_free_bytes for load in loads],
        devices={
            device: DeviceLoads.model_validate(
                {
                    field: [getattr(of_minute.get(device), field, None) for of_minute in of_devices]
                    for field in DeviceLoads.model_fields
                }
            )
            for device in dict.fromkeys(name for of_minute in of_devices for name in of_minute)
        },
    )


def _last_load(service: Service, name: str) -> LastLoad | None:
    found = service.loads.last(name)
    return None if found is None else LastLoad(**dict(found[1]), age_seconds=round(found[0], 1))


def _unreadable(name: str) -> NodeRow:
    """The row of a node whose report another release stored: without it the list would fail for all nodes."""
    return NodeRow(
        node=name,
        devices=[],
        jobs={},
        cpus=0,
        memory_bytes=0,
        memory_available_bytes=None,
        disk_free_bytes=0,
        agent=False,
        state="its stored report cannot be read: start its agent again",
    )


def node_rows(service: Service) -> list[NodeRow]:
    """The machines that jobs may run on; the service's own machine first."""
    holders = service.store.holders()
    machines = service.cluster.machines()
    memory = psutil.virtual_memory()
    found = [
        NodeRow(
            node=service.node_name,
            devices=list(service.devices),
            jobs={place: job for place, job in holders.items() if "/" not in place},
            cpus=psutil.cpu_count() or 1,
            memory_bytes=memory.total,
            memory_available_bytes=memory.available,
            disk_free_bytes=free_bytes(service.settings.data_dir),
            head=True,
            agent=False,
            machine=machines[service.node_name],
            state="open",
            load=_last_load(service, service.node_name),
        )
    ]
    for record in service.store.nodes.all():
        report = service.cluster.report(record)
        if report is None:
            found.append(_unreadable(record.name))
            continue
        shown: dict[str, Any] = {
            "agent": True,
            "machine": machines.get(record.name),
            "load": _last_load(service, record.name),
            "state": service.cluster.why_closed(record, report) or "open",
            "address": report.address,
            "versions": report.versions,
            "labels": report.labels,
            "loaned": report.loaned,
            "models": list(report.models),
            "ollama_models": list(report.ollama_models),
            "memory_of_devices": {one.name: one.memory_bytes for one in report.devices if one.memory_bytes},
        }
        if record.name == service.node_name:
            found[0] = found[0].model_copy(update=shown)
            continue
        begin = f"{record.name}/"
        found.append(
            NodeRow(
                node=record.name,
                devices=[device.name for device in report.devices],
                jobs={place.removeprefix(begin): job for place, job in holders.items() if place.startswith(begin)},
                cpus=report.cpus,
                memory_bytes=report.memory_bytes,
                memory_available_bytes=None,
                disk_free_bytes=report.disk_free_bytes,
                **shown,
            )
        )
    return found
