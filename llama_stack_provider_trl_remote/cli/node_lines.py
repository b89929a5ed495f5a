"""`nodes commands`: what to run on each machine of a cluster, by hand."""

from __future__ import annotations

import ipaddress
import shlex
from argparse import Namespace
from urllib.parse import urlsplit

from llama_stack_provider_trl.errors import InvalidRequest

from ..client import ServiceClient
from .terminal import emit

MOST_NODES = 10_000
SCRIPT = "./scripts/run-remote-fsdp-server.sh"


async def print_commands(client: ServiceClient, options: Namespace) -> int:
    """Print the command of each machine; does not call the service."""
    if options.torchrun:
        from .by_hand import print_torchrun

        options.port, options.python = options.port or 29500, options.python or "python"
        options.sharding = options.sharding or "FULL_SHARD"
        return await print_torchrun(client, options)
    for name in ("data", "validation", "directory", "address", "sharding", "port", "threads", "python"):
        if getattr(options, name):
            raise InvalidRequest(f"--{name}", getattr(options, name), "it belongs to --torchrun: add that.")
    if options.discover:
        from .found_machines import print_found_commands

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


def worker_lines(url: str, nodes: int, token_file: str, certificate: str | None = None) -> list[str]:
    """The commands of the machines 1 to `nodes - 1`; machine 0 runs the service at `url`.

    Raises:
        InvalidRequest: there are no machines, or more than one and others cannot reach the service at `url`.
    """
    if not 0 < nodes <= MOST_NODES:
        raise InvalidRequest("--nodes", nodes, f"name 1 to {MOST_NODES} machines.")
    if nodes > 1 and is_this_machine_only(urlsplit(url).hostname or ""):
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


def is_this_machine_only(host: str) -> bool:
    """Whether other machines cannot reach this host."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.rstrip(".").lower() == "localhost" or host.lower().endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def _quoted(value: str) -> str:
    """For a shell, which still replaces `~/` at the beginning."""
    return "~/" + shlex.quote(value[2:]) if value.startswith("~/") and value != "~/" else shlex.quote(value)
