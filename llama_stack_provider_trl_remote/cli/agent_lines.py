"""The commands that make machines nodes of a service."""

from __future__ import annotations

import ipaddress
import shlex
from urllib.parse import urlsplit

from llama_stack_provider_trl.errors import InvalidRequest

MOST_NODES = 10_000
SCRIPT = "./scripts/run-remote-fsdp-server.sh"


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
