"""Name and description of this machine: the report with which a node joins, and the credential that it gets. No torch
is imported."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import platform
import re
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ValidationError

from llama_stack_provider_trl import __version__
from llama_stack_provider_trl.errors import TrlError
from llama_stack_provider_trl.launch.gpus import gpu_of, is_slice
from llama_stack_provider_trl.launch.torchrun import configured_threads
from llama_stack_provider_trl.specs.names import problem_of_name
from llama_stack_provider_trl.specs.schema import schema_digest
from llama_stack_provider_trl.system import token_file
from llama_stack_provider_trl.system.data_dir import NodeDir, read_own
from llama_stack_provider_trl.system.files import atomic_write, atomic_write_json, free_bytes
from llama_stack_provider_trl.system.hub_cache import cached_models
from llama_stack_provider_trl.system.process import machine_memory, usable_cpus

from ..wire import MOST_MODELS, NAME, SPECS, DeviceReport, NodeReport

DEFAULT_DATA_DIR = "~/.llama/trl-node"
"""Of an agent."""
MACHINE_ID = "TRL_NODE_MACHINE_ID"
HOST_ID = "TRL_NODE_HOST_ID"
ADDRESS = "TRL_NODE_ADDRESS"
_MACHINE_ID_FILES = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_REPORTED = ("torch", "trl", "transformers", "peft")
_PROBE = (
    "import json, sys; from importlib import metadata as m\n"
    "found = dict(python='.'.join(map(str, sys.version_info[:3])))\n"
    "for name in sys.argv[1:]:\n"
    "    try: found[name] = m.version(name)\n"
    "    except m.PackageNotFoundError: found[name] = ''\n"
    "print(json.dumps(found))"
)


class NodeError(TrlError, ValueError):
    """Raised when this machine cannot be a node; names the remedy."""


def read_token(file: str) -> str:
    """The token in `file`, without white space around it. Raises NodeError: as `system.token_file.read_token` raises
    ValueError."""
    try:
        return token_file.read_token(file)
    except ValueError as error:
        raise NodeError(str(error)) from error


def machine_id(environ: Mapping[str, str], files: Iterable[Path] = _MACHINE_ID_FILES) -> str:
    """Identifier of the system that has an agent: TRL_NODE_MACHINE_ID, else that of its installation. Where the system
    has none, its name and the address of a network card."""
    return _installed_id(environ, files) or f"{platform.node()}-{uuid.getnode():012x}"


def host_id(environ: Mapping[str, str], files: Iterable[Path] = _MACHINE_ID_FILES) -> str:
    """Identifier of the physical machine, the same for all agents on it: TRL_NODE_HOST_ID, else as `machine_id`. Where
    the system has none, as in most containers, the run of the kernel, which all containers of a machine share."""
    if chosen := environ.get(HOST_ID, "").strip():
        return chosen
    return _installed_id(environ, files) or (boot_id() if _BOOT_ID.exists() else machine_id(environ, files))


def _installed_id(environ: Mapping[str, str], files: Iterable[Path]) -> str:
    """TRL_NODE_MACHINE_ID, else the id of the system's installation; empty: it has none."""
    if chosen := environ.get(MACHINE_ID, "").strip():
        return chosen
    for file in files:
        with suppress(OSError):
            if found := file.read_text().strip():
                return found
    return ""


def boot_id() -> str:
    """Identifier of this run of the operating system: processes of another one are gone."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # macOS
        done = subprocess.run(["sysctl", "-n", "kern.boottime"], capture_output=True, text=True, check=False)
        return done.stdout.strip() or "unknown"


def agent_id(data_dir: Path) -> str:
    """Identifier of a data directory, which one agent at a time uses; created at the first call."""
    place = NodeDir(data_dir).agent_id
    found = read_own(place, _parsed_id)
    if found is None:
        data_dir.mkdir(parents=True, exist_ok=True)
        found = uuid.uuid4().hex
        atomic_write(place, found.encode())
    return found


def _parsed_id(data: bytes) -> str:
    return uuid.UUID(data.decode().strip()).hex


def node_name(chosen: str | None) -> str:
    """The name under which a machine joins; its host name where none is chosen. Raises NodeError: the name is not
    valid."""
    name = chosen or socket.gethostname()
    if not re.fullmatch(NAME, name):
        raise NodeError(
            f"{name!r} cannot be a node's name: use letters, digits, '.', '_' and '-' (--name, or TRL_NODE_NAME)"
        )
    return name


def reachable_address(url: str, environ: Mapping[str, str]) -> str:
    """The address at which other nodes reach this one: TRL_NODE_ADDRESS, else the source address of packets to the
    service. Raises NodeError: it is a loopback address, or the service's address has no route."""
    if chosen := environ.get(ADDRESS, "").strip():
        try:
            address = ipaddress.ip_address(chosen)
        except ValueError as error:
            raise NodeError(
                f"{ADDRESS}={chosen!r} is not an IP address: set the one at which other nodes reach this one"
            ) from error
        if address.is_loopback or address.is_unspecified:
            raise NodeError(f"{ADDRESS}={chosen!r}: other machines cannot reach this one there: set its own address")
        return chosen
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            address = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError as error:
        raise NodeError(
            f"the service's address {host} cannot be reached from here: {error.strerror or error}"
        ) from error
    if address.is_loopback:
        raise NodeError(
            f"the service's address {host} is this machine's own ({target[0]}), where no other machine reaches it: use "
            f"an address of its network (MASTER_ADDR, --service), or set {ADDRESS} to this machine's"
        )
    return str(address)


def node_report(
    name: str,
    address: str,
    devices: Iterable[str],
    data_dir: Path,
    environ: Mapping[str, str] = os.environ,
    *,
    labels: Mapping[str, str] | None = None,
    python: str | None = None,
    models: Callable[[], list[str]] | None = None,
    ollama: Callable[[], tuple[str, ...]] = tuple,
    loaned: bool = False,
) -> NodeReport:
    """Describe this machine.

    Args:
        python: interpreter that trains; None: the interpreter of this process.
        models: names of the models that it has; None: those in the cache that the environment names.
        ollama: names of the models of its Ollama.

    Raises:
        NodeError: see `versions`; a label or an id is too long for a report.
        OSError: the data directory is not writable.
    """
    there = cached_models(environ) if models is None else models()
    reportable = [one for one in there if not problem_of_name(one)]
    found = {
        "name": name,
        "machine_id": machine_id(environ),
        "host_id": host_id(environ),
        "boot_id": boot_id(),
        "agent_id": agent_id(data_dir),
        "address": address,
        "cpus": usable_cpus(),
        "threads": configured_threads(environ),
        "memory_bytes": machine_memory(),
        "disk_free_bytes": free_bytes(data_dir),
        "devices": tuple(_device(device, environ) for device in devices),
        "versions": versions(python),
        "models": tuple(reportable[:MOST_MODELS]),
        "ollama_models": ollama(),
        "labels": dict(labels or {}),
        "loaned": loaned,
    }
    try:
        return NodeReport.model_validate(found)
    except ValidationError as error:
        wrong = error.errors()[0]
        field = ".".join(map(str, wrong["loc"]))
        raise NodeError(
            f"{field} of this node cannot be reported: {wrong['msg']}; found {wrong['input']!r:.100}"
        ) from None


def versions(python: str | None = None) -> dict[str, str]:
    """Versions of the packages that training depends on, in the interpreter that trains; "" where one is not installed.

    Of torch only the public part counts: 2.13.0+cpu and 2.13.0+cu126 are compatible. The digest of the job
    specifications is that of this process."""
    if python is None or python == sys.executable:
        found = {"python": ".".join(map(str, sys.version_info[:3])), **{name: _version(name) for name in _REPORTED}}
    else:
        try:
            done = subprocess.run(
                [python, "-c", _PROBE, *_REPORTED], capture_output=True, text=True, timeout=60, check=True, cwd="/"
            )
            found = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise NodeError(f"the interpreter that trains, {python}, does not report its versions: {error}") from error
    ours = {"llama_stack_provider_trl": __version__, SPECS: schema_digest()}
    return {**ours, **found, "torch": found["torch"].partition("+")[0]}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _device(device: str, environ: Mapping[str, str]) -> DeviceReport:
    if not device.startswith("cuda:"):
        return DeviceReport(name=device)
    gpu, sliced = gpu_of(device, environ), is_slice(device, environ)
    if gpu is None:
        return DeviceReport(name=device, is_slice=sliced)
    return DeviceReport(name=device, memory_bytes=gpu.memory_bytes, model=gpu.model, is_slice=sliced, uuid=gpu.uuid)


log = logging.getLogger(__name__)


class CredentialFile:
    """The file of the credential, with mode 0600.

    Args:
        service, node: issuer and holder of the secret. A secret of another service or name is not used, so that it
            never reaches another service.
    """

    def __init__(self, data_dir: Path, service: str, node: str) -> None:
        self._path = NodeDir(data_dir).credential
        self._owner = {"service": service, "node": node}

    def read(self) -> str | None:
        """Read the credential. None: it is missing or cannot be read."""
        try:
            found = read_own(self._path, _parsed_credential)
        except OSError as error:
            log.warning("%s cannot be read (%s): the node joins with its token", self._path, type(error).__name__)
            return None
        if found is None:
            return None
        credential = found.pop("credential")
        return credential if found == self._owner else None

    def write(self, credential: str) -> None:
        """Write the credential. Raises OSError: nothing was written."""
        atomic_write_json(self._path, {**self._owner, "credential": credential}, mode=0o600)


def _parsed_credential(data: bytes) -> dict[str, str]:
    found = json.loads(data)
    return {**found, "credential": str(found["credential"])}
