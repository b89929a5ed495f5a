"""A bounded probe of given subnets: two ports, training services and Ollama hosts. Sends no token, follows nothing."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import ssl
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from llama_stack_provider_trl.errors import InvalidRequest

from .sightings import MOST_MODELS, Sighting, cleaned

SERVICE_PORT, OLLAMA_PORT = 8322, 11434
MOST_ADDRESSES = 1024
"""Addresses of all given subnets together."""
AT_ONCE = 256
"""Connections at a time; a process may have 1024 files open where nothing else is configured."""
CONNECT = 0.5
"""Seconds for a connection: on a local network it takes milliseconds."""
ANSWER = 1.5
MOST_BYTES = 1 << 20
"""Of one answer."""
_NEIGHBOURS = Path("/proc/net/arp")
_COMPLETE = 0x2
_NO_HTTP = object()


@dataclass(frozen=True)
class Probed:
    """The result of a probe."""

    sightings: tuple[Sighting, ...]
    left: int
    """Addresses that were not reached within the time."""


def addresses_of(subnets: Sequence[str]) -> list[str]:
    """Every address of these subnets, once. Raises InvalidRequest: one is no subnet or not of a local network, or they
    have more than `MOST_ADDRESSES`."""
    networks = []
    for text in subnets:
        try:
            network = ipaddress.ip_network(text, strict=False)
        except ValueError as error:
            raise InvalidRequest("--subnet", text, "expected a network such as 10.0.0.0/24.") from error
        if network.is_global or network.is_multicast or network.is_unspecified:
            raise InvalidRequest("--subnet", text, "expected a network of private addresses: others are not searched.")
        networks.append(network)
    total = sum(network.num_addresses for network in networks)
    # /22 has 1,024 with those of the network and of its broadcasts, which are left out.
    if total > MOST_ADDRESSES:
        raise InvalidRequest(
            "--subnet",
            ",".join(subnets),
            f"found {total} addresses, expected {MOST_ADDRESSES} at most: name smaller ones.",
        )
    return list(dict.fromkeys(str(address) for network in networks for address in network.hosts()))


async def probe(addresses: Iterable[str], seconds: float) -> Probed:
    """Try both ports of each address; ends after these seconds."""
    left = [(address, port) for address in addresses for port in (SERVICE_PORT, OLLAMA_PORT)]
    left.reverse()
    found: list[Sighting] = []
    untrusted = ssl.create_default_context()
    untrusted.check_hostname, untrusted.verify_mode = False, ssl.CERT_NONE  # nothing secret is sent
    connector = aiohttp.TCPConnector(limit=0, ssl=untrusted, force_close=True)
    timeout = aiohttp.ClientTimeout(total=ANSWER)
    unfinished: set[tuple[str, int]] = set()
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
    ) as session:

        async def work() -> None:
            while left:
                address, port = left.pop()
                unfinished.add((address, port))
                if await _listens(address, port):
                    one = await (_service if port == SERVICE_PORT else _ollama)(session, address)
                    if one is not None:
                        found.append(one)
                unfinished.discard((address, port))

        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for _ in range(min(AT_ONCE, len(left))):
                    group.create_task(work())
    return Probed(tuple(found), len({address for address, _ in (*unfinished, *left)}))


async def _listens(address: str, port: int) -> bool:
    try:
        async with asyncio.timeout(CONNECT):
            _, writer = await asyncio.open_connection(address, port)
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True


async def _service(session: aiohttp.ClientSession, address: str) -> Sighting | None:
    for tls in (False, True):
        one = Sighting("service", (address,), SERVICE_PORT, tls=tls)
        answer = await _json(session, f"{one.url(address)}/health")
        match answer:
            case {"status": "OK", "version": str(version), "supervising": bool()}:
                return Sighting("service", (address,), SERVICE_PORT, version=cleaned(version, 40), tls=tls)
        if answer is not _NO_HTTP:
            break
    return None


async def _ollama(session: aiohttp.ClientSession, address: str) -> Sighting | None:
    one = Sighting("ollama", (address,), OLLAMA_PORT)
    tags, version = await asyncio.gather(
        _json(session, f"{one.url(address)}/api/tags"), _json(session, f"{one.url(address)}/api/version")
    )
    match tags:
        case {"models": list(models)}:
            names = (cleaned(model.get("name")) for model in models if isinstance(model, dict))
            kept = tuple(dict.fromkeys(name for name in names if name))[:MOST_MODELS]
        case _:
            return None
    number = cleaned(version.get("version"), 40) if isinstance(version, dict) else ""
    return Sighting("ollama", (address,), OLLAMA_PORT, version=number, models=kept)


async def _json(session: aiohttp.ClientSession, url: str) -> Any:
    """The answer to a GET as JSON; None: there is none; _NO_HTTP: what came is not HTTP."""
    try:
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        async with session.get(url, allow_redirects=False, headers=headers) as answer:
            if answer.status != 200:
                return None
            body = b""
            async for part in answer.content.iter_chunked(1 << 16):
                body += part
                if len(body) > MOST_BYTES:
                    return None
            return json.loads(body)
    except TimeoutError:  # also a kind of OSError
        return None
    except (aiohttp.ClientError, OSError):
        return _NO_HTTP
    except (ValueError, RecursionError):
        return None


def neighbours(table: Path = _NEIGHBOURS) -> dict[str, str]:
    """Address -> hardware address of this network's machines, as far as the kernel knows them (Linux, IPv4)."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if len(fields) < 4 or not re.fullmatch(r"([0-9a-f]{2}:){5}[0-9a-f]{2}", fields[3].lower()):
                continue
            if int(fields[2], 16) & _COMPLETE and fields[3] != "00:00:00:00:00:00":
                found[fields[0]] = fields[3].lower()
    return found
