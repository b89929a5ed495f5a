"""Starts an agent: from a shell on a worker, or by the service for its own machine."""

from __future__ import annotations

import asyncio
import math
import os
import pwd
import signal
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from llama_stack_provider_trl import __version__
from llama_stack_provider_trl.launch.devices import usable_devices
from llama_stack_provider_trl.launch.isolation import Isolation, Mode, isolate
from llama_stack_provider_trl.launch.local import LocalLauncher
from llama_stack_provider_trl.launch.runner import Limits
from llama_stack_provider_trl.launch.warm_processes import WarmProcesses
from llama_stack_provider_trl.requests.settings import TrustedModel
from llama_stack_provider_trl.system.console import show_lines
from llama_stack_provider_trl.system.data_dir import NodeDir
from llama_stack_provider_trl.system.logs import LogLevel, Unsent, start_logging
from llama_stack_provider_trl.system.owned_paths import UnsafePath, own_directory
from llama_stack_provider_trl.system.process import hide_from_other_processes, usable_cpus

from ..wire import POLL_SECONDS
from .agent import Agent
from .calls import NodeClient, Pace
from .consent import OPTION
from .discovery.mdns import announce, require_zeroconf
from .discovery.sightings import Sighting, machine_hash
from .identity import DEFAULT_DATA_DIR, NodeError, host_id, node_name, node_report, reachable_address
from .load import LoadMeter
from .models import Models
from .ollama import ollama_models
from .owner import LoanTerms, OwnerWatch

SHORTEST_INTERVAL = 0.5
"""Seconds between two heartbeats."""


@dataclass(frozen=True)
class NodeSettings:
    url: str
    """The service's address."""
    token: str | None
    name: str
    data_dir: Path
    address: str
    """Literal IP address at which other nodes reach this one."""
    devices: tuple[str, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    upload_mb_per_s: float | None = None
    download_mb_per_s: float | None = None
    heartbeat_interval: float = POLL_SECONDS
    """Seconds between two calls of the service."""
    python: str | None = None
    """Interpreter that trains; None: the interpreter of this process."""
    isolation: Isolation | None = None
    """How its trainings are isolated; None: the value of `isolation_mode`."""
    isolation_mode: Mode = "auto"
    limits: Limits = field(default_factory=Limits)
    """Limits of the processes of a training, together."""
    log_level: LogLevel = "info"
    unsent: Unsent | None = None
    """Entries of the log that are sent to the service."""
    warm_start: bool = False
    """Whether it keeps warm processes of its own."""
    warm: WarmProcesses | None = None
    """Warm processes of the service that it belongs to."""
    ollama: bool = True
    """Whether the models of this machine's Ollama are reported."""
    announce: bool = False
    """Whether it is announced on the local network by mDNS."""
    loan: LoanTerms | None = None
    """When it takes jobs, of a machine that is loaned; None: at any time."""
    trust_remote_code: tuple[str, ...] = ()
    """Models whose own code may run here: directories, or ORG/NAME@REVISION."""
    python_graders: bool = False
    """Whether the source of graders may run here, in processes that can only compute."""
    check_path: bool = True
    """Whether the agent does not start where another user could put something into its data directory."""
    tls: ssl.SSLContext | None = None
    """Trusted certificates for an https address; None: those of the system."""


def make_agent(settings: NodeSettings, environ: Mapping[str, str] = os.environ) -> Agent:
    """Build the agent of this machine; call `run` in one event loop."""
    models = Models(settings.data_dir.resolve(), environ)
    report = partial(
        node_report,
        settings.name,
        settings.address,
        settings.devices,
        settings.data_dir,
        environ,
        labels=settings.labels,
        python=settings.python,
        models=models.names,
        ollama=ollama_models if settings.ollama else tuple,
        loaned=settings.loan is not None,
    )
    client = NodeClient(
        settings.url,
        settings.token,
        settings.name,
        _pace(settings.upload_mb_per_s),
        settings.tls,
        downloads=_pace(settings.download_mb_per_s),
    )
    isolation = settings.isolation or isolate(settings.isolation_mode, [settings.data_dir])
    if settings.isolation_mode != "off" and not isolation.how:
        hide_from_other_processes()
    warm = settings.warm or (WarmProcesses() if settings.warm_start else None)  # they end with this process
    launcher = LocalLauncher(isolation=isolation, limits=settings.limits, warm=warm)
    launcher.warm_up(settings.python)
    return Agent(
        client,
        report,
        settings.data_dir,
        launcher,
        python=settings.python,
        load=LoadMeter(settings.devices, settings.data_dir, environ).read,
        unsent=settings.unsent,
        heartbeat_interval=settings.heartbeat_interval,
        models=models,
        owner=None if settings.loan is None else OwnerWatch(settings.loan),
        trusted=settings.trust_remote_code,
        python_graders=settings.python_graders,
    )


def _pace(mb_per_s: float | None) -> Pace:
    return Pace(None if mb_per_s is None else mb_per_s * (1 << 20), time.monotonic)


def worker_settings(
    url: str,
    environ: Mapping[str, str],
    *,
    name: str | None = None,
    data_dir: str | None = None,
    device: str | None = None,
    labels: Mapping[str, str] | None = None,
    upload_mb_per_s: float | None = None,
    download_mb_per_s: float | None = None,
    isolation: str | None = None,
    warm_start: str | None = None,
    heartbeat_interval: str | None = None,
    announce: str | None = None,
    ollama: str | None = None,
    log_level: str | None = None,
    loaned: bool = False,
    loaned_max_load: str | None = None,
    loaned_idle_seconds: str | None = None,
    loaned_user: str | None = None,
    trust_remote_code: Sequence[str] = (),
    python_graders: bool = False,
) -> NodeSettings:
    """Settings of a worker, from its command line and its environment. Raises NodeError: there is no token, the
    service's address cannot be used by other machines, or SSL_CERT_FILE names no file; InvalidRequest: there is no such
    device."""
    token = environ.get("TRL_SERVICE_NODE_TOKEN") or environ.get("TRL_SERVICE_TOKEN")
    if not token:
        raise NodeError(
            "a worker needs a token of the service: set TRL_SERVICE_NODE_TOKEN_FILE or TRL_SERVICE_NODE_TOKEN (role "
            "node), or TRL_SERVICE_TOKEN"
        )
    certificate = environ.get("SSL_CERT_FILE")
    if (
        certificate and url.lower().startswith("https://") and not Path(certificate).exists()
    ):  # OpenSSL does not report it
        raise NodeError(
            f"SSL_CERT_FILE names {certificate}, which does not exist: copy the service's tls_cert from its machine"
        )
    return NodeSettings(
        url=url,
        token=token,
        name=node_name(name or environ.get("TRL_NODE_NAME")),
        data_dir=Path(data_dir or environ.get("TRL_NODE_DATA_DIR") or DEFAULT_DATA_DIR).expanduser().absolute(),
        address=reachable_address(url, environ),
        devices=tuple(usable_devices(device or environ.get("TRL_NODE_DEVICE") or "auto")),
        labels=labels or {},
        upload_mb_per_s=upload_mb_per_s,
        download_mb_per_s=download_mb_per_s,
        heartbeat_interval=_interval(heartbeat_interval or environ.get("TRL_NODE_HEARTBEAT_INTERVAL")),
        log_level=_chosen("log_level", log_level or environ.get("TRL_NODE_LOG_LEVEL") or "info", get_args(LogLevel)),
        unsent=Unsent(),
        isolation_mode=_chosen("isolation", isolation or environ.get("TRL_NODE_ISOLATION") or "auto", get_args(Mode)),
        warm_start=switch("warm_start", warm_start or environ.get("TRL_NODE_WARM_START") or "on"),
        ollama=switch("ollama", ollama or environ.get("TRL_NODE_OLLAMA") or "on"),
        announce=switch("announce", announce or environ.get("TRL_NODE_ANNOUNCE") or "off"),
        check_path=_checks_path(environ),
        trust_remote_code=_trusted(trust_remote_code or environ.get("TRL_NODE_TRUST_REMOTE_CODE", "").split(",")),
        python_graders=python_graders or switch("python_graders", environ.get("TRL_NODE_PYTHON_GRADERS") or "off"),
        limits=Limits(processes=4096),
        loan=_loan(environ, loaned, loaned_max_load, loaned_idle_seconds, loaned_user),
    )


def _loan(
    environ: Mapping[str, str], loaned: bool, max_load: str | None, idle_seconds: str | None, user: str | None
) -> LoanTerms | None:
    """When a loaned machine takes jobs; None: it is not loaned. Raises NodeError."""
    loaned = loaned or switch("loaned", environ.get("TRL_NODE_LOANED") or "off")
    given = {
        "max_load": max_load or environ.get("TRL_NODE_LOANED_MAX_LOAD"),
        "idle_seconds": idle_seconds or environ.get("TRL_NODE_LOANED_IDLE_SECONDS"),
        "user": user or environ.get("TRL_NODE_LOANED_USER"),
    }
    terms = LoanTerms()
    for name, text in given.items():
        if not text:
            continue
        option = f"--loaned-{name.replace('_', '-')}, TRL_NODE_LOANED_{name.upper()}"
        if not loaned:
            raise NodeError(f"loaned_{name}={text!r}: this machine is not loaned; set --loaned too ({option})")
        if name == "user":
            try:
                pwd.getpwnam(text)
            except KeyError:
                raise NodeError(f"loaned_user={text!r}: this machine has no such user ({option})") from None
            terms = replace(terms, user=text)
            continue
        most = 1.0 if name == "max_load" else 86_400.0
        number = _number(text)
        if not 0 < number <= most:
            what = "a share of the cores above 0, at most 1" if name == "max_load" else "seconds above 0, at most 86400"
            raise NodeError(f"loaned_{name}={text!r}: expected {what} ({option})")
        terms = replace(terms, max_load=number) if name == "max_load" else replace(terms, idle_seconds=number)
    return terms if loaned else None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _interval(text: str | None) -> float:
    """Seconds between two heartbeats. With more than POLL_SECONDS, one failed call would count as a lost node."""
    if not text:
        return POLL_SECONDS
    seconds = _number(text)
    if not SHORTEST_INTERVAL <= seconds <= POLL_SECONDS:
        raise NodeError(
            f"heartbeat_interval={text!r}: expected seconds from {SHORTEST_INTERVAL:g} to {POLL_SECONDS:g} "
            "(--heartbeat-interval, TRL_NODE_HEARTBEAT_INTERVAL)"
        )
    return seconds


def _chosen(name: str, text: str, choices: Sequence[str], separator: str = ", ") -> Any:
    """The value of an option. Raises NodeError: it is none of those that it may have."""
    if text not in choices:
        options = f"--{name.replace('_', '-')}, TRL_NODE_{name.upper()}"
        raise NodeError(f"{name}={text!r}: use {separator.join(choices)} ({options})")
    return text


def _trusted(entries: Sequence[str]) -> tuple[str, ...]:
    """Models whose own code may run. Raises NodeError."""
    try:
        return TypeAdapter(tuple[TrustedModel, ...]).validate_python(
            [entry.strip() for entry in entries if entry.strip()]
        )
    except ValidationError as error:
        raise NodeError(f"{OPTION}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error


def _checks_path(environ: Mapping[str, str]) -> bool:
    """Whether the data directory is checked, as anywhere but in a container without other users. Raises NodeError."""
    text = environ.get("TRL_NODE_CHECK_PATH") or "on"
    if text not in ("on", "off"):
        raise NodeError(f"TRL_NODE_CHECK_PATH={text!r}: use on or off")
    return text == "on"


def switch(name: str, text: str) -> bool:
    """Whether an option is on. Raises NodeError: it is neither on nor off."""
    return bool(_chosen(name, text, ("on", "off"), " or ") == "on")


def serve(settings: NodeSettings) -> int:
    """Run a worker node until SIGTERM or SIGINT, when trainings continue; or after SIGUSR1, which a batch system sends
    before it takes the machine away, until its jobs have saved. Raises the errors of `Agent.run`; DiscoveryError: it
    cannot be announced; NodeError: other users could change its data directory."""
    if settings.check_path:
        try:
            own_directory(settings.data_dir)
        except UnsafePath as error:
            raise NodeError(f"the data directory {settings.data_dir} is not used: {error}") from error
    if settings.announce:
        require_zeroconf("--announce")
    path = NodeDir(settings.data_dir).log
    start_logging(path, settings.log_level, [settings.token or ""], settings.unsent)
    lines = {
        "version": __version__,
        "node": settings.name,
        "address": settings.address,
        "data": settings.data_dir,
        "devices": ", ".join(settings.devices),
        "service": settings.url,
        "log": path,
    }
    for name, value in lines.items():
        show_lines(f"{name:>8}  {value}", flush=True)
    if asyncio.run(_until_signal(make_agent(settings), announcement(settings))):
        show_lines("the agent has left: its jobs have saved, and continue on other nodes", flush=True)
    else:
        show_lines("the agent has stopped; trainings continue and are resumed at the next start", flush=True)
    return 0


def announcement(settings: NodeSettings, environ: Mapping[str, str] = os.environ) -> Sighting | None:
    """What is announced of a node; None: nothing."""
    if not settings.announce:
        return None
    return Sighting(
        "agent",
        (settings.address,),
        0,
        name=settings.name,
        version=__version__,
        machine=machine_hash(host_id(environ)),
        service=settings.url,
        cpus=usable_cpus(),
        gpus=sum(device.startswith("cuda") for device in settings.devices),
    )


async def _until_signal(agent: Agent, announced: Sighting | None = None) -> bool:
    """Returns whether the agent has ended by itself."""
    running = asyncio.create_task(agent.run())
    announcing = None if announced is None else asyncio.create_task(announce(lambda: announced))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, agent.leave)
    try:
        await running
    except asyncio.CancelledError:
        return False
    finally:
        if announcing is not None:
            announcing.cancel()
            await asyncio.wait([announcing])
    return True
