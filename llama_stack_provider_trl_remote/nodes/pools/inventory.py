"""The inventory `nodes.yaml`: machines that are reached over SSH, and how each becomes a node."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from llama_stack_provider_trl.specs.exact import ExactValues, numbers_as_text
from llama_stack_provider_trl.system.bounded_yaml import UniqueKeys
from llama_stack_provider_trl.system.texts import decoded

from ...address import checked_url
from ...wire import NAME
from ..identity import DEFAULT_DATA_DIR, NodeError

KNOWN_HOSTS = "~/.ssh/known_hosts"
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|API_KEY")
_Text = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f]+$")]
_Label = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class InventoryHost(ExactValues, BaseModel):
    """A machine of the inventory."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.:_%-]*$", max_length=255)]
    """Its address, or the name that resolves to it. `~/.ssh/config` is not read."""
    name: str = Field("", pattern=NAME)
    """As a node; default: `host`."""
    port: int = Field(22, ge=1, le=65535)
    user: _Text | None = None
    """Default: the user who runs the command."""
    key_file: Path | None = None
    """Private key; default: the keys of the SSH agent and of ~/.ssh."""
    known_hosts: Path = Path(KNOWN_HOSTS)
    """File with the machine's host key."""
    host_key: (
        Annotated[str, StringConstraints(pattern=r"^(ssh|ecdsa|sk)-[a-z0-9@.-]+ AAAA[A-Za-z0-9+/=]+( .*)?$")] | None
    ) = None
    """The machine's host key itself, as in its /etc/ssh/ssh_host_ed25519_key.pub; known_hosts is not read then."""
    labels: dict[_Label, _Label] = {}
    device: _Text = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    data_dir: _Text = DEFAULT_DATA_DIR
    """The node's own directory there. `~` is the home directory of `user`."""
    python: _Text | None = None
    """Python >= 3.12 there; default: the first of python3.12, python3.13, python3.14 and python3 on the PATH."""
    environment: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = {}
    """Variables of the agent and of pip, such as HF_HOME; no secrets, which other processes of the user could read."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return value if not isinstance(value, dict) or value.get("name") else {**value, "name": value.get("host", "")}

    @field_validator("labels", "environment", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return numbers_as_text(value)

    @field_validator("environment")
    @classmethod
    def _without_secrets(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if _SECRET.search(name.upper()):
                raise ValueError(f"{name} looks like a secret, which does not belong into the inventory")
            if not text.isprintable():
                raise ValueError(f"{name} has a character that cannot be printed")
        return value

    @property
    def where(self) -> str:
        """The machine in messages: `gpu-a (10.0.0.11)`, `gpu-a (10.0.0.11:2222)`."""
        port = "" if self.port == 22 else f":{self.port}"
        return self.name if self.name == self.host and not port else f"{self.name} ({self.host}{port})"


class Inventory(ExactValues, BaseModel):
    """A file `nodes.yaml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    nodes: list[InventoryHost] = Field(min_length=1, max_length=1000)
    service: str | None = None
    """Address of the service as the nodes reach it; default: that of the command (--url, TRL_SERVICE_URL)."""
    certificate: Path | None = None
    """The service's tls_cert, where no authority that the nodes trust has signed it."""
    constraints: Path | None = None
    """Versions for pip (`pip install -c`); default: those of the service's machine."""

    @field_validator("service")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        return None if value is None else checked_url(value)

    def chosen(self, names: Sequence[str]) -> list[InventoryHost]:
        """The machines of these names, all without names. Raises NodeError: there is none of that name."""
        known = {host.name: host for host in self.nodes}
        for name in names:
            if name not in known:
                raise NodeError(f"there is no node {name!r} in the inventory: it has {', '.join(sorted(known))}")
        return [host for host in self.nodes if not names or host.name in names]


def read_inventory(path: Path) -> Inventory:
    """Read an inventory. Its relative paths begin at its own directory, and keys of `defaults` count for every machine
    that lacks them. Raises NodeError: the file cannot be read, has an unknown key or an invalid value, or a machine or
    name twice; one sentence with the file and the key."""
    try:
        found = yaml.load(decoded(path.read_bytes()), UniqueKeys)
    except OSError as error:
        raise NodeError(
            f"the inventory {path} cannot be read ({error.strerror}): name one with --inventory, see "
            "docs/how-to/nodes-over-ssh.md"
        ) from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise NodeError(f"{path} is not an inventory: {' '.join(str(error).split())}") from error
    try:
        inventory = Inventory.model_validate(_with_defaults(found))
    except (ValidationError, ValueError) as error:
        raise NodeError(f"{path}: {_sentence(error, found)}") from None
    _refuse_duplicates(path, inventory.nodes)
    base = path.expanduser().absolute().parent
    nodes = [
        host.model_copy(update={key: _path(base, getattr(host, key)) for key in ("key_file", "known_hosts")})
        for host in inventory.nodes
    ]
    files = {key: _path(base, getattr(inventory, key)) for key in ("certificate", "constraints")}
    return inventory.model_copy(update={"nodes": nodes, **files})


def _with_defaults(found: Any) -> Any:
    if not isinstance(found, dict):
        raise ValueError(f"found a {type(found).__name__}, expected a mapping with the key `nodes`")
    defaults = found.get("defaults", {})
    if not isinstance(defaults, dict) or {"host", "name", "host_key"} & defaults.keys():
        raise ValueError("`defaults` is a mapping of keys that machines have in common: not host, name and host_key")
    nodes = found.get("nodes")
    if isinstance(nodes, list):
        nodes = [{**defaults, **one} if isinstance(one, dict) else one for one in nodes]
    return {key: value for key, value in {**found, "nodes": nodes}.items() if key != "defaults"}


def _sentence(error: Exception, found: Any) -> str:
    """The first fault, with the key's place as a user reads it: `node gpu-a: unknown key 'usr'`."""
    if not isinstance(error, ValidationError):
        return str(error)
    fault = error.errors()[0]
    place = [str(part) for part in fault["loc"]]
    where = ""
    if place[:1] == ["nodes"] and len(place) > 1:
        one = found["nodes"][int(place[1])]
        named = (one.get("name") or one.get("host")) if isinstance(one, dict) else None
        where, place = f"node {named or f'number {int(place[1]) + 1}'}: ", place[2:]
    key = ".".join(part for part in place if part != "[key]")
    if fault["type"] == "extra_forbidden":
        model = InventoryHost if where else Inventory
        known = [*model.model_fields, *(["defaults"] if model is Inventory else [])]
        return f"{where}unknown key {key!r}, expected {', '.join(known)}"
    if fault["type"] == "missing":
        return f"{where}the key {key!r} is missing"
    if fault["type"] == "value_error":
        return f"{where}{key}: {fault['ctx']['error']}"
    shown = repr(fault["input"])
    return f"{where}{key}={shown if len(shown) <= 100 else shown[:100] + '...'}: {fault['msg']}"


def _refuse_duplicates(path: Path, nodes: Sequence[InventoryHost]) -> None:
    for name, count in Counter(host.name for host in nodes).items():
        if count > 1:
            raise NodeError(f"{path}: {count} nodes have the name {name!r}: set another `name` for one of them")
    taken: dict[tuple[str, int, str], str] = {}
    for host in nodes:
        place = (host.host.lower(), host.port, host.data_dir.rstrip("/"))
        if place in taken:
            raise NodeError(
                f"{path}: {taken[place]} and {host.name} have the same host {host.host} and data_dir {host.data_dir}: "
                "one of them is a duplicate, or needs a data_dir of its own"
            )
        taken[place] = host.name


def _path(base: Path, path: Path | None) -> Path | None:
    return None if path is None else base / path.expanduser()
