"""`trl-remote nodes up`, `down` and `status`: the machines of an inventory over SSH."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import sys
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from llama_stack_provider_trl.errors import ServiceRefusal, TrlError

from .shared_options import at_service

if TYPE_CHECKING:
    from ..client import ServiceClient
    from ..nodes.pools.inventory import Inventory, InventoryHost
    from ..nodes.pools.ssh import NodePlan, Progress

AT_ONCE = 16
"""Machines that are worked on at the same time."""
LISTED = 30.0
"""Seconds until the service lists a node that has joined."""
REMOVED = 60.0
"""Seconds until the service finds a node whose agent has ended absent (15 s), and removes it."""
_POLL = 0.5
Row = dict[str, Any]


def add_parsers(commands: Any) -> None:
    """Add the commands to the parsers of `nodes`."""
    up = _command(commands, "up", "make the machines of an inventory nodes, over SSH")
    up.add_argument("--wheel", type=Path, metavar="FILE", help="install this wheel (that of this installation)")
    up.add_argument("--offline", action="store_true", help="call no package index: what is needed is there")
    up.add_argument("--site-packages", action="store_true", help="use the packages of the machine's Python (torch ...)")
    down = _command(commands, "down", "end their agents and all that these started, and remove the nodes")
    down.add_argument("--drain", action="store_true", help="first have their jobs save and continue elsewhere")
    down.add_argument(
        "--drain-timeout", type=float, default=600.0, metavar="S", help="seconds for that; a node with jobs stays (600)"
    )
    _command(commands, "status", "what runs on the machines of an inventory, and what the service knows of them")


def _command(commands: Any, name: str, meaning: str) -> argparse.ArgumentParser:
    command = at_service(commands.add_parser(name, help=meaning), below=True)
    command.add_argument("--inventory", type=Path, default=Path("nodes.yaml"), metavar="FILE", help="(nodes.yaml)")
    command.add_argument("names", nargs="*", metavar="NAME", help="nodes of the inventory (all)")
    return command


async def up(client: ServiceClient, options: Namespace) -> int:
    inventory, hosts = await asyncio.to_thread(_chosen, options)
    plan = await _plan(client, options, inventory)

    async def one(host: InventoryHost, progress: Progress) -> Row:
        from ..nodes.pools.ssh import start_node

        found = await start_node(host, plan, progress)
        state = await _listed(client, host.name)
        remark = "" if state == "open" else f"; it takes no jobs: {state} (trl-remote nodes uncordon {host.name})"
        return {"result": found["state"], "detail": f"joined, pid {found['pid']}, Python {found['python']}{remark}"}

    return await _on_each(options, hosts, one)


async def down(client: ServiceClient, options: Namespace) -> int:
    _, hosts = await asyncio.to_thread(_chosen, options)

    async def one(host: InventoryHost, progress: Progress) -> Row:
        from ..nodes.pools.ssh import stop_node

        if options.drain:
            progress("draining")
            await _drain(client, host.name, options.drain_timeout)
        found = await stop_node(host, progress)
        progress("removing the node")
        removed = await _remove(client, host.name)
        there = {"ended": f"{found['ended']} processes ended", "absent": "it has never been a node"}
        return {
            "result": "down",
            "detail": f"{there.get(found['state'], 'no process ran')}; "
            + ("removed at the service" if removed else "the service has no such node"),
        }

    return await _on_each(options, hosts, one)


async def status(client: ServiceClient, options: Namespace) -> int:
    _, hosts = await asyncio.to_thread(_chosen, options)
    listed = {row["node"]: row["state"] for row in (await client.get_all("/v1/nodes"))["data"]}

    async def one(host: InventoryHost, progress: Progress) -> Row:
        from ..nodes.pools.ssh import observe_node

        found = await observe_node(host)
        agent = f"agent {found['pid']}, {found['processes']} processes" if found["pid"] else "no agent"
        return {"result": found["state"], "detail": f"{agent}; at the service: {listed.get(host.name, 'unknown')}"}

    return await _on_each(options, hosts, one)


def _chosen(options: Namespace) -> tuple[Inventory, list[InventoryHost]]:
    from ..nodes.pools.inventory import read_inventory
    from ..nodes.pools.ssh import require_asyncssh

    require_asyncssh()
    inventory = read_inventory(options.inventory)
    return inventory, inventory.chosen(options.names)


async def _plan(client: ServiceClient, options: Namespace, inventory: Inventory) -> NodePlan:
    """What all machines get. Raises NodeError, and the errors of the service."""
    from ..nodes.identity import NodeError
    from ..nodes.pools.ssh import NodePlan, equal_versions
    from ..nodes.pools.wheel import read_wheel, wheel_of_this_installation

    url = inventory.service or client.url
    if is_this_machine_only(url):
        raise NodeError(
            f"other machines cannot reach the service at {url}: set `service` of the inventory to its address for them"
        )
    token = _join_token(os.environ)
    nodes = (await client.get_all("/v1/nodes"))["data"]
    versions = next((node.get("versions") or {} for node in nodes if node.get("head")), {})
    wheel = await asyncio.to_thread(
        lambda: read_wheel(options.wheel) if options.wheel else wheel_of_this_installation()
    )
    texts = {}
    for key in ("certificate", "constraints"):
        path: Path | None = getattr(inventory, key)
        try:
            texts[key] = None if path is None else path.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise NodeError(f"`{key}` of the inventory, {path}, cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise NodeError(f"`{key}` of the inventory, {path}, is not text in UTF-8") from error
    return NodePlan(
        url=url,
        token=token,
        wheel=wheel,
        certificate=texts["certificate"],
        constraints=texts["constraints"] or equal_versions(versions),
        offline=options.offline,
        site_packages=options.site_packages,
    )


def is_this_machine_only(url: str) -> bool:
    """Whether other machines cannot reach the host of this address."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.rstrip(".").lower() == "localhost" or host.lower().endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def _join_token(environ: Mapping[str, str]) -> str:
    from ..address import checked_token
    from ..nodes.identity import NodeError

    try:
        token = checked_token(environ.get("TRL_SERVICE_NODE_TOKEN"))
    except ValueError as error:
        raise NodeError(f"TRL_SERVICE_NODE_TOKEN: {error}") from None
    if token is None:
        raise NodeError(
            "nodes join with a token of the role node, found none: set TRL_SERVICE_NODE_TOKEN to that of the service"
        )
    return token


async def _on_each(
    options: Namespace, hosts: Sequence[InventoryHost], one: Callable[[InventoryHost, Progress], Awaitable[Row]]
) -> int:
    """Work on each machine, several at once; the failure of one leaves the others alone."""
    from llama_stack_provider_trl.system.console import show_lines

    from .terminal import emit, table

    free = asyncio.Semaphore(AT_ONCE)
    width = max(len(host.name) for host in hosts)

    async def bounded(host: InventoryHost) -> Row:
        def progress(text: str) -> None:
            show_lines(f"{host.name:<{width}}  {text}", flush=True, to=sys.stderr)

        async with free:
            try:
                found = await one(host, progress)
            except TrlError as error:
                problem = getattr(error, "problem", None) or str(error)
                found = {"result": "failed", "detail": problem}
        return {"node": host.name, "host": host.host, **found}

    rows = await asyncio.gather(*(bounded(host) for host in hosts))
    head = ("node", "host", "result", "detail")
    emit(options, rows, *table(head, ([row[key] for key in head] for row in rows), cut=("detail",)))
    return 1 if any(row["result"] == "failed" for row in rows) else 0


# --- at the service


async def _listed(client: ServiceClient, name: str) -> str:
    """The state of a node that has joined, once its agent calls. Raises NodeError: the service lists none."""
    from ..nodes.identity import NodeError

    deadline = time.monotonic() + LISTED
    while True:
        row = next(
            (row for row in (await client.get_all("/v1/nodes"))["data"] if row["node"] == name), {"agent": False}
        )
        state = str(row.get("state", "open"))
        if row["agent"] and not state.startswith(("silent", "not seen")):
            return state
        if time.monotonic() > deadline:
            raise NodeError(
                f"its agent runs, but the service at {client.url} does not list it ({state}): check that `service` of "
                "the inventory is this service"
            )
        await asyncio.sleep(_POLL)


async def _drain(client: ServiceClient, name: str, limit: float) -> None:
    """Have a node's jobs continue elsewhere. Raises NodeError: it still has some."""
    from ..nodes.identity import NodeError

    try:
        await client.post(f"/v1/nodes/{quote(name, safe='')}/drain")
    except ServiceRefusal as refusal:
        if refusal.status == 404:
            return
        raise
    deadline = time.monotonic() + limit
    while True:
        row = next((row for row in (await client.get_all("/v1/nodes"))["data"] if row["node"] == name), None)
        jobs = sorted(set(row["jobs"].values())) if row else []
        if not jobs:
            return
        if time.monotonic() > deadline:
            raise NodeError(
                f"it still has {', '.join(jobs)} after {limit:g} s and was left alone, draining: repeat the command, "
                "or leave out --drain"
            )
        await asyncio.sleep(_POLL)


async def _remove(client: ServiceClient, name: str) -> bool:
    """Remove a node whose agent has ended; False: the service has none of that name."""
    deadline = time.monotonic() + REMOVED
    while True:
        try:
            await client.delete(f"/v1/nodes/{quote(name, safe='')}")
            return True
        except ServiceRefusal as refusal:
            if refusal.status == 404:
                return False
            # Its jobs count as there until it has been silent for 15 s.
            if refusal.status != 409 or time.monotonic() > deadline:
                raise
        await asyncio.sleep(_POLL)
