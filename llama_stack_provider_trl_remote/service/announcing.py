"""Announces the service on the local network, where `announce` is set."""

from __future__ import annotations

import ipaddress
import os
import socket

from llama_stack_provider_trl import __version__
from llama_stack_provider_trl.system.process import usable_cpus

from ..nodes.discovery.mdns import announce, own_addresses
from ..nodes.discovery.sightings import Sighting, literal_addresses, machine_hash
from ..nodes.identity import host_id
from .context import Service


async def run_announcement(service: Service, listener: socket.socket) -> None:
    """Announce until cancelled."""
    host, port = listener.getsockname()[:2]

    def make() -> Sighting:
        addresses = own_addresses() if ipaddress.ip_address(host).is_unspecified else literal_addresses([host])
        return Sighting(
            "service",
            addresses,
            port,
            name=service.node_name,
            version=__version__,
            machine=machine_hash(host_id(os.environ)),
            tls=service.settings.tls_cert is not None,
            cpus=usable_cpus(),
            gpus=sum(device.startswith("cuda") for device in service.devices),
        )

    await announce(make)
