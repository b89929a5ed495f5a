"""Searches the local network: announcements by mDNS, and a probe of given subnets, at the same time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..identity import host_id
from .machines import FoundMachine, Here, machines_of
from .mdns import DiscoveryError, browse, own_networks
from .probe import addresses_of, neighbours, probe
from .sightings import Sighting, machine_hash


@dataclass(frozen=True)
class Search:
    machines: tuple[FoundMachine, ...]
    notes: tuple[str, ...]
    """What was not searched, and why."""


def here(environ: Mapping[str, str] = os.environ) -> Here:
    """This machine, as others find it."""
    return Here(machine_hash(host_id(environ)), own_networks())


async def search(subnets: Sequence[str], seconds: float) -> Search:
    """Search for so long, at most. Raises InvalidRequest: see `addresses_of`; DiscoveryError: mDNS cannot be used here,
    and no subnet is named."""
    addresses = addresses_of(subnets)
    notes: list[str] = []

    async def announcements() -> list[Sighting]:
        try:
            return await browse(seconds)
        except DiscoveryError as error:
            if not addresses:
                raise
            notes.append(f"only the named subnets were searched: {error}")
            return []

    announced, probed = await asyncio.gather(announcements(), probe(addresses, seconds))
    if probed.left:
        notes.append(
            f"{probed.left} of {len(addresses)} addresses were not searched within {seconds:g} s: name smaller "
            "subnets, or more --seconds"
        )
    return Search(tuple(machines_of([*announced, *probed.sightings], neighbours(), here())), tuple(notes))
