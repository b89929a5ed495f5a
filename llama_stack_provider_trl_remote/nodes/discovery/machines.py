"""Which findings are one physical machine. Pure functions."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from .sightings import Sighting


@dataclass(frozen=True)
class Here:
    """The machine that searches."""

    machine: str
    """Hash of its id."""
    networks: tuple[str, ...] = ()
    """Its addresses with the lengths of their networks, `10.0.0.7/24`."""

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(network.partition("/")[0] for network in self.networks)


@dataclass(frozen=True)
class FoundMachine:
    """One physical machine, as far as it can be distinguished from others."""

    addresses: tuple[str, ...]
    """The one at which this machine reaches it is the first."""
    sightings: tuple[Sighting, ...]
    is_here: bool = False

    def of_kind(self, kind: str) -> tuple[Sighting, ...]:
        return tuple(one for one in self.sightings if one.kind == kind)


def machines_of(found: Sequence[Sighting], macs: Mapping[str, str], here: Here) -> list[FoundMachine]:
    """Group what was found by machine.

    The hash of the machine's id decides. What lacks it belongs to the machine that has its address or its hardware
    address, where exactly one has: docker0 has the same address on every machine.

    Args:
        macs: address -> hardware address, of the neighbour table.
    """
    groups = _groups(found, macs, here)
    machines = [_machine(one, here) for one in groups.values()]
    return sorted(machines, key=lambda machine: _order(machine.addresses[0]))


def _groups(found: Sequence[Sighting], macs: Mapping[str, str], here: Here) -> dict[str, list[Sighting]]:
    groups: dict[str, list[Sighting]] = defaultdict(list)
    by_address: dict[str, set[str]] = defaultdict(set)
    for one in found:
        if one.machine is not None:
            groups[one.machine].append(one)
            for address in one.addresses:
                by_address[address].add(one.machine)
    by_address |= {address: {here.machine} for address in (*here.addresses, "127.0.0.1", "::1")}
    by_mac: dict[str, set[str]] = defaultdict(set)
    for address, names in by_address.items():
        if address in macs and len(names) == 1:
            by_mac[macs[address]] |= names
    unknown = count(1)
    for one in found:
        if one.machine is not None:
            continue
        own_macs = {macs[address] for address in one.addresses if address in macs}
        name = _only(by_address, one.addresses) or _only(by_mac, own_macs) or f"unknown {next(unknown)}"
        groups[name].append(one)
        for address in one.addresses:
            by_address[address].add(name)
        for mac in own_macs:
            by_mac[mac].add(name)
    return groups


def _only(names: Mapping[str, set[str]], keys: Iterable[str]) -> str | None:
    """The only machine that has one of these keys; None: no machine, or several."""
    found = {name for key in keys for name in names.get(key, ())}
    return found.pop() if len(found) == 1 else None


def _machine(sightings: list[Sighting], here: Here) -> FoundMachine:
    addresses = dict.fromkeys(address for one in sightings for address in one.addresses)
    is_here = any(one.machine == here.machine for one in sightings) or any(
        address in here.addresses or ipaddress.ip_address(address).is_loopback for address in addresses
    )
    ordered = sorted(addresses, key=lambda address: (not _is_reached(address, here), _order(address)))
    return FoundMachine(tuple(ordered), tuple(_once(sightings)), is_here)


def _is_reached(address: str, here: Here) -> bool:
    """Whether it is in a network of this machine, and not an address that this machine has itself."""
    if address in here.addresses:
        return False
    wanted = ipaddress.ip_address(address)
    networks = (ipaddress.ip_network(network, strict=False) for network in here.networks)
    return any(wanted.version == network.version and wanted in network for network in networks)


def _once(sightings: Sequence[Sighting]) -> list[Sighting]:
    """One entry for what was found several ways, with the addresses of all. An announcement is the fuller one."""
    kept: list[Sighting] = []
    for one in sorted(sightings, key=lambda one: (one.kind, one.port, one.machine is None, one.name)):
        position = next((number for number, other in enumerate(kept) if _is_same(other, one)), None)
        if position is None:
            kept.append(one)
        else:
            addresses = dict.fromkeys((*kept[position].addresses, *one.addresses))
            kept[position] = replace(kept[position], addresses=tuple(addresses))
    return kept


def _is_same(one: Sighting, other: Sighting) -> bool:
    if (one.kind, one.port) != (other.kind, other.port):
        return False
    return one == other if one.machine is not None and other.machine is not None else True


def _order(address: str) -> tuple[int, int]:
    parsed = ipaddress.ip_address(address)
    return parsed.version, int(parsed)
