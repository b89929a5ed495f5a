"""`nodes discover` and `nodes commands`: the machines of a network, and what makes each of them a node, by hand."""

from __future__ import annotations

import shlex
from argparse import Namespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from llama_stack_provider_trl.errors import InvalidRequest

from ..client import ServiceClient
from .node_commands import DEFAULT_SECONDS
from .nodes_ssh import is_this_machine_only
from .terminal import emit, table

if TYPE_CHECKING:
    from ..nodes.discovery.machines import FoundMachine
    from ..nodes.discovery.search import Search
    from ..nodes.discovery.sightings import Sighting


async def print_commands(client: ServiceClient, options: Namespace) -> int:
    """Print the command of each machine; does not call the service."""
    if options.torchrun:
        from .torchrun_lines import print_torchrun

        options.port, options.python = options.port or 29500, options.python or "python"
        options.sharding = options.sharding or "FULL_SHARD"
        return await print_torchrun(client, options)
    for name in ("data", "validation", "directory", "address", "sharding", "port", "threads", "python"):
        if getattr(options, name):
            raise InvalidRequest(f"--{name}", getattr(options, name), "it belongs to --torchrun: add that.")
    if options.discover:
        if options.nodes is not None:
            raise InvalidRequest("--nodes", options.nodes, "leave it out: --discover finds the machines.")
        return await print_found_commands(client, options)
    for name in ("subnet", "seconds"):
        if getattr(options, name):
            raise InvalidRequest(f"--{name}", getattr(options, name), "it belongs to --discover: add that.")
    options.nodes = 2 if options.nodes is None else options.nodes
    lines = worker_lines(client.url, options.nodes, options.token_file, options.certificate)
    text = [f"# machine 0 ({urlsplit(client.url).hostname}) runs the service, which trains there too"]
    for rank, line in enumerate(lines, start=1):
        text += [f"# machine {rank}", line]
    emit(options, [{"node_rank": rank, "command": line} for rank, line in enumerate(lines, start=1)], *text)
    return 0


Row = dict[str, Any]
_NOTHING = (
    "nothing was found: services with `announce: true` and agents with --announce are, and in a --subnet every "
    "service on port 8322 and Ollama on port 11434"
)
_UNVERIFIED = "# What was found is not verified. Run a line only on a machine that is yours."


async def discover(client: ServiceClient, options: Namespace) -> int:
    """Print the machines that were found, and the commands that would make them nodes. Calls no service with a token,
    joins nothing."""
    found = await _search(options)
    rows = [_row(machine) for machine in found.machines]
    notes = [*found.notes, *_shared(found)]
    try:
        lines = proposed_lines(found, client.url, options.token_file, options.certificate)
    except InvalidRequest as error:
        lines = []
        notes += [error.hint] if found.machines else []
    answer = {"machines": rows, "commands": lines, "notes": notes}
    emit(options, answer, *_text(found, lines, notes))
    return 0


async def print_found_commands(client: ServiceClient, options: Namespace) -> int:
    """Print the command of each machine that was found."""
    found = await _search(options)
    lines = proposed_lines(found, client.url, options.token_file, options.certificate)
    notes = [f"# {note}" for note in found.notes]
    emit(options, lines, *notes, *commands_text(lines))
    return 0


async def _search(options: Namespace) -> Search:
    from ..nodes.discovery.search import search

    return await search(options.subnet, options.seconds or DEFAULT_SECONDS)


def proposed_lines(found: Search, url: str, token_file: str, certificate: str | None) -> list[Row]:
    """What to run on each machine, that of the service first, which has no command; machines with an agent neither.

    The service is the one at `url`, or where that is an address of this machine only, the only one that was found. No
    text from the network is part of a command. Raises InvalidRequest: there is no such service, or there are several.
    """
    url = _service_url(found, url)
    host = urlsplit(url).hostname or ""
    head = next((machine for machine in found.machines if host in machine.addresses), None)
    rows: list[Row] = [{"node_rank": 0, "address": host, "service": url, "agents": [], "command": None}]
    for machine in found.machines:
        if machine is head:
            continue
        rank, agents = len(rows), [one.name for one in machine.of_kind("agent")]
        line = None if agents else agent_line(rank, url, token_file, certificate)
        rows.append({"node_rank": rank, "address": machine.addresses[0], "agents": agents, "command": line})
    return rows


def _service_url(found: Search, url: str) -> str:
    if not is_this_machine_only(url):
        return url
    services = [(machine, one) for machine in found.machines for one in machine.of_kind("service")]
    if not services:
        raise InvalidRequest("--url", url, "found no service: start one on machine 0, or name its address with --url.")
    urls = [one.url(_reached(machine, one)) for machine, one in services]
    if len(urls) > 1:
        raise InvalidRequest("--url", url, f"found {len(urls)} services: name one with --url: {', '.join(urls[:10])}.")
    if is_this_machine_only(urls[0]):
        hint = f"other machines cannot reach the service at {urls[0]}: name another address with --url."
        raise InvalidRequest("--url", urls[0], hint)
    return urls[0]


def _reached(machine: FoundMachine, one: Sighting) -> str:
    """The address of a sighting at which this machine reaches it."""
    return next(address for address in machine.addresses if address in one.addresses)


def commands_text(lines: list[Row]) -> list[str]:
    text = [_UNVERIFIED, f"# machine 0 ({lines[0]['address']}) runs the service, which trains there too"]
    for row in lines[1:]:
        agents = ", ".join(row["agents"])
        text.append(f"# machine {row['node_rank']} ({row['address']})" + (f" has an agent: {agents}" if agents else ""))
        text += [row["command"]] if row["command"] else []
    return text


def _shared(found: Search) -> list[str]:
    """Where nodes would train in parallel on one machine."""
    return [
        f"parallel will not help on {', '.join(one.name for one in agents)}: these agents are on one machine "
        f"({machine.addresses[0]}), and share the same cores"
        for machine in found.machines
        if len(agents := machine.of_kind("agent")) > 1
    ]


def _row(machine: FoundMachine) -> Row:
    return {
        "addresses": list(machine.addresses),
        "this_machine": machine.is_here,
        "found": [_entry(machine, one) for one in machine.sightings],
    }


def _entry(machine: FoundMachine, one: Sighting) -> Row:
    values: Row = {"kind": one.kind, "name": one.name, "version": one.version}
    if one.kind == "agent":
        values |= {"service": one.service}
    else:
        values |= {"url": one.url(_reached(machine, one))}
    more = {"cpus": one.cpus, "gpus": one.gpus, "models": list(one.models) if one.kind == "ollama" else None}
    return values | {name: value for name, value in more.items() if value is not None}


def _text(found: Search, lines: list[Row], notes: list[str]) -> list[str]:
    if not found.machines:
        return [_NOTHING, *(f"note: {note}" for note in notes)]
    rows = [
        (str(number), _addresses(machine) if first else "", _what(machine, one))
        for number, machine in enumerate(found.machines, start=1)
        for first, one in ((one is machine.sightings[0], one) for one in machine.sightings)
    ]
    count = len(found.machines)
    text = [*table(("machine", "addresses", "found there"), rows), "", f"{count} machine{'s' if count > 1 else ''}"]
    if notes:
        text += ["", *(f"note: {note}" for note in notes)]
    if lines:
        text += ["", *commands_text(lines)]
    return text


def _addresses(machine: FoundMachine) -> str:
    shown = ", ".join(machine.addresses[:4]) + (" ..." if len(machine.addresses) > 4 else "")
    return f"{shown} (this machine)" if machine.is_here else shown


def _what(machine: FoundMachine, one: Sighting) -> str:
    if one.kind == "ollama":
        models = ", ".join(one.models) or "no models"
        return f"Ollama {one.version}".rstrip() + f" at {one.url(_reached(machine, one))}: {models}"
    numbers = ((one.cpus, "CPU"), (one.gpus, "GPU"))
    sizes = [f"{number} {what}{'s' if number != 1 else ''}" for number, what in numbers if number is not None]
    size = f" ({', '.join(sizes)})" if sizes else ""
    if one.kind == "agent":
        return f"agent {one.name}{size} of {one.service or 'an unknown service'}"
    return f"service {one.name}".rstrip() + f"{size} at {one.url(_reached(machine, one))}"


MOST_NODES = 10_000
SCRIPT = "./scripts/run-remote-fsdp-server.sh"


def worker_lines(url: str, nodes: int, token_file: str, certificate: str | None = None) -> list[str]:
    """The commands of the machines 1 to `nodes - 1`; machine 0 runs the service at `url`. Raises InvalidRequest: there
    are no machines, or more than one and others cannot reach the service at `url`."""
    if not 0 < nodes <= MOST_NODES:
        raise InvalidRequest("--nodes", nodes, f"name 1 to {MOST_NODES} machines.")
    if nodes > 1 and is_this_machine_only(url):
        raise InvalidRequest(
            "--url", url, "other machines cannot reach this address: name the one at which they reach the service."
        )
    return [agent_line(rank, url, token_file, certificate) for rank in range(1, nodes)]


def agent_line(rank: int, url: str, token_file: str, certificate: str | None) -> str:
    """The command that makes a machine a node of the service at `url`."""
    given = {"TRL_SERVICE_URL": url, "TRL_SERVICE_NODE_TOKEN_FILE": token_file}
    if certificate is not None:
        given["SSL_CERT_FILE"] = certificate
    words = " ".join(f"{name}={_quoted(value)}" for name, value in given.items())
    return f"NODE_RANK={rank} {words} {SCRIPT}"


def _quoted(value: str) -> str:
    """For a shell, which still replaces `~/` at the beginning."""
    return "~/" + shlex.quote(value[2:]) if value.startswith("~/") and value != "~/" else shlex.quote(value)
