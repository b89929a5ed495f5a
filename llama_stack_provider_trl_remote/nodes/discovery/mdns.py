"""Announcements by mDNS: made where the operator has switched them on, and searched for."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

import psutil

from llama_stack_provider_trl.errors import TrlError

from .sightings import (
    AGENT_TYPE,
    KINDS,
    MOST_ADDRESSES,
    SERVICE_TYPE,
    Sighting,
    announced,
    literal_addresses,
    properties_of,
)

log = logging.getLogger(__name__)
MOST_ANNOUNCEMENTS = 512
"""Announcements that are read; a flood of more is ignored."""
AT_ONCE = 32
CHECK = 30.0
"""Seconds between two checks of this machine's addresses, and between two attempts to announce."""
_TTL = 120
_LEAVE = 2.0
_RESOLVE = 1.0
"""Seconds for the records of one announcement."""


class DiscoveryError(TrlError, RuntimeError):
    """Raised when the network cannot be searched, or nothing can be announced; names the remedy."""


def require_zeroconf(what: str) -> ModuleType:
    """Import zeroconf. Raises DiscoveryError: it is not installed."""
    try:
        import zeroconf.asyncio
    except ImportError as error:
        raise DiscoveryError(
            f"{what} needs the package zeroconf: pip install 'llama_stack_provider_trl[discovery]'"
        ) from error
    return zeroconf


def own_networks() -> tuple[str, ...]:
    """This machine's addresses that others may reach, with the lengths of their networks; IPv4 first."""
    found: list[str] = []
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6) and (usable := literal_addresses([one.address])):
                mask = one.netmask or ("255.255.255.255" if one.family == socket.AF_INET else "ffff:" * 7 + "ffff")
                length = bin(int(ipaddress.ip_address(mask))).count("1")
                found.append(f"{usable[0]}/{length}")
    return tuple(sorted(found, key=lambda text: ":" in text))


def own_addresses() -> tuple[str, ...]:
    return tuple(network.partition("/")[0] for network in own_networks())[:MOST_ADDRESSES]


async def announce(make: Callable[[], Sighting]) -> None:
    """Announce until cancelled. Where that fails, log the reason once and retry.

    Args:
        make: what is announced; called again every `CHECK` seconds, since addresses change.
    """
    library, trouble = require_zeroconf("announce"), ""
    while True:
        try:
            await _announce(library, make)
            trouble = ""
        except (OSError, library.Error) as error:
            if str(error) != trouble:
                log.warning("this machine is not announced by mDNS: %s; retrying", error or type(error).__name__)
            trouble = str(error)
            await asyncio.sleep(CHECK)


async def _announce(library: ModuleType, make: Callable[[], Sighting]) -> None:
    """Until the addresses change."""
    sighting = make()
    if not sighting.addresses:
        raise OSError("no network interface has an address that others can reach")
    zone = SERVICE_TYPE if sighting.kind == "service" else AGENT_TYPE
    # The name is unique by itself: names of nodes may have dots, and two machines the same host name.
    info = library.ServiceInfo(
        zone,
        f"{uuid.uuid4().hex}.{zone}",
        port=sighting.port,
        parsed_addresses=list(sighting.addresses),
        properties=properties_of(sighting),
        server=f"trl-{uuid.uuid4().hex[:16]}.local.",
        host_ttl=_TTL,
        other_ttl=_TTL,
    )
    mdns = library.asyncio.AsyncZeroconf(interfaces=_interfaces(sighting.addresses))
    try:
        await (await mdns.async_register_service(info))
        log.info("announced by mDNS as a %s at %s", sighting.kind, ", ".join(sighting.addresses))
        while make().addresses == sighting.addresses:
            await asyncio.sleep(CHECK)
    finally:
        with suppress(TimeoutError, OSError, library.Error):
            async with asyncio.timeout(_LEAVE):
                await (await mdns.async_unregister_service(info))
        await mdns.async_close()


async def browse(seconds: float) -> list[Sighting]:
    """Announcements that come within these seconds. Raises DiscoveryError: zeroconf is not installed, or no interface
    can be searched."""
    library = require_zeroconf("mDNS")
    addresses = own_addresses()
    if not addresses:
        raise DiscoveryError("mDNS: no network interface of this machine has an address that others can reach")
    names: asyncio.Queue[tuple[str, str]] = asyncio.Queue(MOST_ANNOUNCEMENTS)
    known: set[str] = set()

    def note(zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
        if name not in known and len(known) < MOST_ANNOUNCEMENTS:
            known.add(name)
            names.put_nowait((service_type, name))

    try:
        mdns = library.asyncio.AsyncZeroconf(interfaces=_interfaces(addresses))
    except OSError as error:
        raise DiscoveryError(f"mDNS cannot be used on {', '.join(addresses)}: {error}") from error
    found: list[Sighting] = []
    try:
        browser = library.asyncio.AsyncServiceBrowser(mdns.zeroconf, list(KINDS), handlers=[note])
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(_resolve(library, mdns.zeroconf, names, found))
        await browser.async_cancel()
    finally:
        await mdns.async_close()
    return found


async def _resolve(
    library: ModuleType, mdns: Any, names: asyncio.Queue[tuple[str, str]], found: list[Sighting]
) -> None:
    while True:
        service_type, name = await names.get()
        with suppress(OSError, library.Error, ValueError):
            info = library.asyncio.AsyncServiceInfo(service_type, name)
            if not await info.async_request(mdns, _RESOLVE * 1000):
                continue
            one = announced(KINDS[service_type], info.parsed_addresses(), info.port, info.properties)
            if one is not None:
                found.append(one)


def _interfaces(addresses: Sequence[str]) -> list[str]:
    """Those to send on: of IPv4, where there is any."""
    return [one for one in addresses if ":" not in one] or list(addresses)
