"""Runs the service's machine as a node of jobs that span several: with the agent of the other nodes, which calls our
own address. Jobs on this machine alone need no agent."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket

from llama_stack_provider_trl.errors import TrlError
from llama_stack_provider_trl.system.data_dir import DataDir

from ..nodes.agent import Agent
from ..nodes.start import NodeSettings, make_agent, switch
from .context import Service
from .own_calls import own_url, trusting
from .settings import ServiceSettings

log = logging.getLogger(__name__)
RETRY = 10.0
"""Seconds between attempts of a machine that cannot take part."""
_ELSEWHERE = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))
"""Unassigned addresses (RFC 5737, RFC 3849): packets to them use the default route."""


async def run_head_agent(service: Service, port: int) -> None:
    """Take part until cancelled. Where that fails, log the reason once and retry."""
    trouble = ""
    while True:
        try:
            await _agent(service, port).run()
        except (TrlError, OSError) as error:
            if str(error) != trouble:
                log.error("this machine takes no part in jobs over several: %s; retrying", error)
            trouble = str(error)
        await asyncio.sleep(RETRY)


def _agent(service: Service, port: int) -> Agent:
    settings = service.settings
    return make_agent(
        NodeSettings(
            url=own_url(settings, port),
            token=service.node_token,
            name=service.node_name,
            data_dir=DataDir(settings.data_dir).node,
            address=address_for_ranks(settings),
            devices=service.devices,
            python=str(settings.train_python) if settings.train_python else None,
            isolation=service.isolation,
            limits=service.limits,
            trust_remote_code=settings.trust_remote_code,
            python_graders=settings.python_graders,
            warm=service.warm,
            ollama=switch("ollama", os.environ.get("TRL_NODE_OLLAMA") or "on"),
            tls=None if settings.tls_cert is None else trusting(settings.tls_cert),
        )
    )


def address_for_ranks(settings: ServiceSettings) -> str:
    """The literal address at which ranks on other machines reach this one: `master_addr`, else the address that the
    service listens on, else the source address of packets to other machines. Raises OSError: this machine has no such
    address."""
    for chosen in (settings.torch_run_config.master_addr, settings.host):
        try:
            address = ipaddress.ip_address(chosen.strip("[]"))
        except ValueError:
            continue
        if not address.is_loopback and not address.is_unspecified:
            return str(address)
    for target, family in _ELSEWHERE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))  # sends nothing
                return str(probe.getsockname()[0])
        except OSError:
            continue
    raise OSError("no address of this machine can be reached by others: set torch_run_config.master_addr to one")
