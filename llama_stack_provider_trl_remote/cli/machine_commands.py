"""`nodes commands`: what to run on each machine of a cluster, by hand."""

from __future__ import annotations

from argparse import Namespace
from urllib.parse import urlsplit

from llama_stack_provider_trl.errors import InvalidRequest

from ..client import ServiceClient
from .agent_lines import worker_lines
from .found_machines import print_found_commands
from .terminal import emit


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
