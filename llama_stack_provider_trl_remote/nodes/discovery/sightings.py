"""What was found on the network, with all text from there made harmless."""

from __future__ import annotations

import hashlib
import ipaddress
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["service", "agent", "ollama"]
SERVICE_TYPE, AGENT_TYPE = "_trl-service._tcp.local.", "_trl-agent._tcp.local."
KINDS: dict[str, Kind] = {SERVICE_TYPE: "service", AGENT_TYPE: "agent"}
MOST_TEXT = 100
"""Characters of a text from the network."""
MOST_ADDRESSES = 16
"""Addresses of one announcement."""
MOST_MODELS = 50
"""Models of one Ollama host."""
_MACHINE = re.compile(r"[0-9a-f]{32}")
_MOST_NUMBER = 1_000_000


@dataclass(frozen=True)
class Sighting:
    """A service, an agent or an Ollama host, by one announcement or one answer."""

    kind: Kind
    addresses: tuple[str, ...]
    """Literal ones."""
    port: int
    """0: an agent, which listens nowhere."""
    name: str = ""
    version: str = ""
    machine: str | None = None
    """Hash of the machine's id; None: unknown."""
    tls: bool = False
    service: str = ""
    """Of an agent: its service's address."""
    cpus: int | None = None
    gpus: int | None = None
    models: tuple[str, ...] = ()
    """Of an Ollama host."""

    def url(self, address: str) -> str:
        """Made of numbers only: no text from the network is in it."""
        host = f"[{address}]" if ":" in address else address
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


def machine_hash(machine_id: str) -> str:
    """What is announced of a machine's id, which itself must stay on the machine (machine-id(5))."""
    return hashlib.sha256(b"llama_stack_provider_trl discovery\0" + machine_id.encode()).hexdigest()[:32]


def cleaned(text: object, most: int = MOST_TEXT) -> str:
    """Text from the network as one line of printable characters; of other types, nothing."""
    if isinstance(text, bytes):
        text = text[: 4 * most].decode("utf-8", "replace")
    if not isinstance(text, str):
        return ""
    # Category C: control characters, those that change the direction of text, surrogates and unassigned ones.
    kept = (" " if one.isspace() else one for one in text[: 4 * most] if one.isspace() or _is_shown(one))
    return " ".join("".join(kept).split())[:most]


def _is_shown(character: str) -> bool:
    return not unicodedata.category(character).startswith("C")


def literal_addresses(found: Iterable[str]) -> tuple[str, ...]:
    """Those that another machine can have, without scopes; each once, the first `MOST_ADDRESSES`."""
    kept: dict[str, None] = {}
    for text in found:
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            continue
        if not (address.is_loopback or address.is_unspecified or address.is_multicast or address.is_link_local):
            kept[str(address)] = None
        if len(kept) == MOST_ADDRESSES:
            break
    return tuple(kept)


def properties_of(sighting: Sighting) -> dict[str, str]:
    """The TXT record of an announcement."""
    values = {
        "name": sighting.name,
        "version": sighting.version,
        "machine": sighting.machine,
        "tls": "1" if sighting.tls else None,
        "service": sighting.service,
        "cpus": sighting.cpus,
        "gpus": sighting.gpus,
    }
    return {name: str(value)[:200] for name, value in values.items() if value not in (None, "")}


def announced(
    kind: Kind, addresses: Iterable[str], port: int | None, properties: Mapping[bytes, bytes | None]
) -> Sighting | None:
    """Read an announcement; None: it has no address that can be reached."""
    usable = literal_addresses(addresses)
    if not usable or (kind == "service" and not port):
        return None
    machine = cleaned(properties.get(b"machine"))
    return Sighting(
        kind,
        usable,
        port or 0,
        name=cleaned(properties.get(b"name")),
        version=cleaned(properties.get(b"version"), 40),
        machine=machine if _MACHINE.fullmatch(machine) else None,
        tls=properties.get(b"tls") == b"1",
        service=cleaned(properties.get(b"service")),
        cpus=_number(properties.get(b"cpus")),
        gpus=_number(properties.get(b"gpus")),
    )


def _number(text: bytes | None) -> int | None:
    if text is None or not re.fullmatch(rb"[0-9]{1,7}", text):
        return None
    return min(int(text), _MOST_NUMBER)
