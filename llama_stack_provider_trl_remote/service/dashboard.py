"""`trl-remote dashboard`: the pages of the jobs of a data directory that another process supervises, on loopback."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.jobs.store.database import require_database
from llama_stack_provider_trl.system.console import show_lines
from llama_stack_provider_trl.system.data_dir import DataDir
from llama_stack_provider_trl.system.process import FileLock

from .app import make_dashboard
from .context import Dashboard
from .pages.rendering import require_templates
from .server import Server, address_of, listen
from .settings import ServiceSettings


def serve_dashboard(data_dir: Path, port: int, token: str | None = None) -> None:
    """Serve the pages until SIGTERM or SIGINT. Raises InvalidRequest: this is no data directory, or a service runs on
    it; NoDashboard; SettingsError: the port is taken; StoreError.

    Args:
        token: what a browser must log in with; None: nothing.
    """
    require_database(data_dir)  # first: a directory of others stays as it is
    DataDir(data_dir).prepare()
    require_templates()
    given = {"data_dir": data_dir.resolve(), "host": "127.0.0.1", "port": port, "api_token": token or None}
    settings = ServiceSettings.model_validate(given)
    listener = listen(settings, "--port")
    lock = FileLock(DataDir(data_dir).service_lock)
    with listener:
        address = address_of(settings, listener)
        if not lock.acquire(f"dashboard, pid {os.getpid()}, {address}"):
            hint = f"its jobs have a dashboard: {lock.holder()}."
            raise InvalidRequest("--data-dir", str(data_dir), hint)
        try:
            asyncio.run(_serve(Dashboard(settings), listener))
        finally:
            lock.release()


async def _serve(dashboard: Dashboard, listener: socket.socket) -> None:
    try:
        await _Server(make_dashboard(dashboard)).serve(sockets=[listener])
    finally:
        await asyncio.to_thread(dashboard.close)


class _Server(Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to answer calls, and print the address."""
        await super().startup(sockets)
        assert sockets
        settings = self.parts.settings
        show_lines(f"dashboard of {settings.data_dir}: {address_of(settings, sockets[0])}", flush=True)
