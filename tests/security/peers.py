"""Peers that are no well-behaved clients."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from llama_stack_provider_trl_remote.service.http.acceptor import (
    Acceptor,
)
from llama_stack_provider_trl_remote.service.http.connections import Connection, Deadlines


class Peer:
    """An acceptor with short deadlines and an application of the test's own."""

    def __init__(
        self,
        app: Any,
        most: int = 100,
        tls: ssl.SSLContext | None = None,
        deadlines: Deadlines = Deadlines(head=0.3, body=0.3, unknown_body=0.3, reader=0.3, close=0.3),  # noqa: B008
        keep_alive: int = 1,
    ) -> None:
        config = uvicorn.Config(
            app, http=Connection, ws="none", lifespan="off", log_config=None, timeout_keep_alive=keep_alive
        )
        config.load()
        state = ServerState()

        def make() -> Connection:
            connection = Connection(config, state, {})
            connection.deadlines = deadlines
            return connection

        self.listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.listener.bind(("127.0.0.1", 0))
        self.acceptor = Acceptor(self.listener, make, most, tls, handshake=0.3)
        self.acceptor.start()

    async def connect(self, sent: bytes = b"", limit: int = 1 << 16) -> tuple[asyncio.StreamReader, Any]:
        reader, writer = await asyncio.open_connection(*self.listener.getsockname(), limit=limit)
        writer.write(sent)
        return reader, writer

    async def close(self) -> None:
        self.acceptor.close()
        await self.acceptor.wait_closed()
        self.listener.close()
        for connection in list(self.acceptor._open):
            connection.end()
        await asyncio.sleep(0.05)
