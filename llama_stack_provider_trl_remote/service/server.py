"""Runs the service: opens its data directory, logs its configuration, serves until a signal ends it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from llama_stack_provider_trl import __version__
from llama_stack_provider_trl.errors import TrlError, sentence_of
from llama_stack_provider_trl.jobs.store.database import private_data_dir
from llama_stack_provider_trl.system.console import complain, show_lines
from llama_stack_provider_trl.system.data_dir import DataDir
from llama_stack_provider_trl.system.logs import start_logging
from llama_stack_provider_trl.system.malloc import give_back, share_arenas
from llama_stack_provider_trl.system.offload import CallThreads
from llama_stack_provider_trl.system.process import FileLock, hide_from_other_processes

from ..nodes.load import LoadMeter
from ..openai.webhooks import Receiver, WebhookSender, receivers_of
from ..wire import POLL_SECONDS
from .app import make_app
from .context import Dashboard, Service
from .http.acceptor import Acceptor, default_connections, raise_descriptor_limit
from .http.connections import Connection
from .own_calls import own_url, prove_own_calls, trusting
from .settings import ServiceSettings, SettingsError

log = logging.getLogger(__name__)
_THREADS = 4
_GRACE = 5
"""Seconds that requests under way have to end when the service stops."""
_RETURN_SECONDS = 1.0
KEEP_ALIVE = 75
"""Seconds that a connection without a request stays open: more than pollers wait between two calls, and than clients
and proxies keep theirs (httpx 5 s, proxies 60 s). What reuses a connection in the moment of its end gets a reset in
place of an answer, which uvicorn's 5 s would mean for polls every 5 s. When connections are short, idle ones end."""


def serve(settings: ServiceSettings, config: Path | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status; 1: it could not start, standard error has the reason."""
    try:
        settings.check_exposure()
        if settings.announce:
            from ..nodes.discovery.mdns import require_zeroconf

            require_zeroconf("announce=true")
        listener = listen(settings)
        with listener, _claimed(settings.data_dir, address_of(settings, listener)):
            # Only now: another service on this directory would write to the same file.
            secrets = [entry.token for entry in settings.configured_tokens]
            secrets += [hook.secret.get_secret_value() for hook in settings.openai.webhooks if hook.secret is not None]
            start_logging(DataDir(settings.data_dir).service_log, settings.log_level, secrets)
            asyncio.run(_serve(settings, config, listener))
    except (TrlError, OSError) as error:
        complain(sentence_of(error, "start the service again"), "trl-remote serve")
        return 1
    return 0


async def _serve(settings: ServiceSettings, config: Path | None, listener: socket.socket) -> None:
    share_arenas()
    receivers = receivers_of(settings.openai.webhooks)  # a start that its secrets refuse changes nothing
    service = Service(settings, config)
    if settings.isolation != "off" and not service.isolation.how:
        hide_from_other_processes()
    service.start()
    try:
        _log_configuration(service, config, listener)
        server = ServiceServer(service, receivers)
        # A full collection would pass over all modules and models, and every request waits for it: 0.2 s of processor
        # time, which were 0.6 s in the flood of tests/security.
        gc.collect()
        gc.freeze()
        give_back()
        await server.serve(sockets=[listener])
    finally:
        _, running = service.jobs.waiting_and_running()
        await asyncio.to_thread(service.stop)
        left = ""
        if running:
            goes = "1 training continues and is" if running == 1 else f"{running} trainings continue and are"
            left = f"; {goes} resumed at the next start"
        show_lines(f"the service has stopped{left}", flush=True)


class Server(uvicorn.Server):
    """A uvicorn server that ends streams of events when it stops; it would wait for them otherwise."""

    def __init__(self, app: FastAPI) -> None:
        self.parts: Service | Dashboard = app.state.service
        settings = self.parts.settings
        config = uvicorn.Config(
            app,
            log_config=None,
            # Its warnings are about requests that are not HTTP: one line per request would help a flood to fill the
            # log.
            log_level="error",
            access_log=False,
            http=Connection,
            server_header=False,
            proxy_headers=False,  # a header must not choose the address for which failures are counted and recorded
            loop="asyncio",
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=_GRACE,
            timeout_keep_alive=KEEP_ALIVE,
        )
        super().__init__(config)
        self._tls = settings.tls_context()
        self._descriptors = raise_descriptor_limit()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals here: uvicorn raises a signal again at its end, which would end us before the supervisor."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to answer calls."""
        assert sockets
        # Each thread that reads the job store has a connection of its own, with its cache.
        asyncio.get_running_loop().set_default_executor(CallThreads(_THREADS, "trl-service"))
        most = self.parts.settings.max_connections or default_connections(self._descriptors)
        acceptor = Acceptor(sockets[0], self._connection, most, self._tls)
        acceptor.start()
        self.servers = [acceptor]  # type: ignore[list-item]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop streams. No connection is accepted any more: the client of a stream reconnects as soon as it ends."""
        self._end_streams()
        await super().shutdown(sockets)

    def _end_streams(self) -> None:
        for server in self.servers:
            server.close()
        self.parts.stopping.set()

    def _connection(self) -> Connection:
        return Connection(self.config, self.server_state, {})

    def _stop(self) -> None:
        self.force_exit = self.should_exit  # the second signal
        self.should_exit = True


class ServiceServer(Server):
    """The server of a service, with this machine's own agent."""

    def __init__(self, service: Service, receivers: Sequence[Receiver] = ()) -> None:
        super().__init__(make_app(service))
        self._service = service
        self._tasks: list[asyncio.Task[None]] = []
        self._webhooks = WebhookSender(service.store, receivers)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to answer calls, those of this machine's own agent included."""
        await super().startup(sockets)
        assert sockets
        self._webhooks.start()
        self._tasks += [asyncio.create_task(_measure(self._service)), asyncio.create_task(_return_memory())]
        settings, port = self._service.settings, sockets[0].getsockname()[1]
        tls = None if settings.tls_cert is None else trusting(settings.tls_cert)
        self._tasks.append(asyncio.create_task(prove_own_calls(self._service, own_url(settings, port), tls)))
        if not self._service.settings.on_loopback:
            from .head_agent import run_head_agent  # imports aiohttp: 9 MiB

            self._tasks.append(asyncio.create_task(run_head_agent(self._service, sockets[0].getsockname()[1])))
        if self._service.settings.announce:
            from .announcing import run_announcement  # imports zeroconf

            self._tasks.append(asyncio.create_task(run_announcement(self._service, sockets[0])))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop streams, the node, and the measuring of the machine."""
        self._end_streams()
        for task in self._tasks:
            task.cancel()
            await asyncio.wait([task])
        await self._service.serving.close()
        await asyncio.to_thread(self._webhooks.stop)
        await super().shutdown(sockets)


async def _measure(service: Service) -> None:
    """Record the load of this machine until cancelled."""
    meter = LoadMeter(service.devices, service.settings.data_dir, os.environ)
    while True:
        await asyncio.sleep(POLL_SECONDS)
        load = await asyncio.to_thread(meter.read)
        if load is not None:
            await asyncio.to_thread(service.loads.note, service.node_name, load)


async def _return_memory() -> None:
    """Return what the heap has freed to the system until cancelled: pages and curves of many readers at once leave
    holes in it. Takes 0.3 ms each time."""
    while True:
        await asyncio.sleep(_RETURN_SECONDS)
        await asyncio.to_thread(give_back)


@contextmanager
def _claimed(data_dir: Path, address: str) -> Iterator[None]:
    """Locks the data directory for one service; a second one is refused. (An inline provider may share it.)"""
    try:
        private_data_dir(data_dir)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        hint = "choose another directory with --data-dir or TRL_SERVICE_DATA_DIR"
        raise SettingsError(f"the data directory {data_dir} cannot be created ({error.strerror}): {hint}") from error
    lock = FileLock(DataDir(data_dir).service_lock)
    if not lock.acquire(f"pid {os.getpid()}, {address}"):
        raise SettingsError(
            f"another service runs on the data directory {data_dir} ({lock.holder()}): stop it, or choose another "
            "directory with TRL_SERVICE_DATA_DIR"
        )
    try:
        yield
    finally:
        lock.release()


def listen(settings: ServiceSettings, other_port: str = "TRL_SERVICE_PORT") -> socket.socket:
    """A socket on the address of these settings. Raises SettingsError: it cannot listen there.

    Args:
        other_port: the variable or option that sets another port, for the message.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # The protocol by its number: asyncio sets TCP_NODELAY only where it reads it. Without that the body of an answer
    # waits 40 ms for the client's acknowledgement of its head.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}; a service may be "
            f"running there already; {other_port} sets another port"
        ) from error
    return listener


def address_of(settings: ServiceSettings, listener: socket.socket) -> str:
    """The URL of a listening socket."""
    scheme = "https" if settings.tls_cert else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def _log_configuration(service: Service, config: Path | None, listener: socket.socket) -> None:
    settings = service.settings
    waiting, running = service.jobs.waiting_and_running()
    strategy = settings.fsdp_config.sharding_strategy
    ranks, origin = settings.default_ranks(service.devices)
    taken = f"{running} training, {waiting} waiting" if waiting or running else "none"
    guarded = "token required" if settings.credentials else "no token: loopback only"
    supervising = (
        "" if service.supervisor.supervising else " (another process supervises it; this one takes over after it)"
    )
    lines = {
        "version": __version__,
        "config": config or "none: defaults and TRL_SERVICE_* variables",
        "data": f"{settings.data_dir}{supervising}",
        "devices": ", ".join(service.devices),
        "ranks": f"{ranks} per job unless it sets a number ({origin}), {strategy}",
        "jobs": f"{taken} (resumed)" if waiting or running else taken,
        "isolation": service.isolation.how or f"none: {service.isolation.why_not}",
        "address": f"{address_of(settings, listener)} ({guarded})",
    }
    for name, value in lines.items():
        show_lines(f"{name:>8}  {value}", flush=True)
